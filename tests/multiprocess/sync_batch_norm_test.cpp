// SyncBatchNorm and convert_sync_batchnorm(): ranks with parts of a batch do what BatchNorm does with the whole batch.
#include "muster/parallel/sync_batch_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "muster/optim/autocast.h"
#include "muster/optim/meta.h"
#include "parallel/group_beside.h"

namespace muster::test {
namespace {

constexpr int64_t kChannels = 5;

// How many collectives for batch norms this rank has had.
uint64_t collectives(const Group& group = {}) {
  const auto beside = parallel::existing_group_beside(group.resolved());
  return beside ? beside->stats().operations : 0;
}

// Rows of each rank's part, one part after another in the whole batch.
struct Parts {
  std::vector<int64_t> rows;
  int64_t whole() const { return begin(rows.size()); }
  int64_t begin(size_t rank) const {
    int64_t sum = 0;
    for (size_t r = 0; r < rank; ++r) sum += rows[r];
    return sum;
  }
  Tensor of(const Tensor& whole, int rank) const {
    const auto r = static_cast<size_t>(rank);
    return whole.narrow(0, begin(r), rows[r]);
  }
};

double tolerance(at::ScalarType dtype) { return dtype == torch::kDouble ? 1e-12 : 1e-6; }

void expect_close(const Tensor& got, const Tensor& expected, double apart, const char* what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  EXPECT_LE(largest(got - expected), apart * largest(expected)) << what;
}

void expect_same_bits_on_all_ranks(const Tensor& tensor, const World& world) {
  const Tensor all = torch::empty({world.world_size(), tensor.numel()}, tensor.options());
  all_gather_into_tensor(all, tensor);
  for (int r = 1; r < world.world_size(); ++r) EXPECT_TRUE(torch::equal(all[r], all[0]));
}

Tensor sum_over_ranks(const Tensor& tensor) {
  const Tensor sum = tensor.detach().clone();
  all_reduce(sum);
  return sum;
}

// Of one kind of input: {N, kChannels, rest…}.
struct Shape {
  std::vector<int64_t> rest;
  Tensor drawn(int64_t rows, int number, at::ScalarType dtype) const {
    std::vector<int64_t> sizes{rows, kChannels};
    sizes.insert(sizes.end(), rest.begin(), rest.end());
    return test::drawn(0, number, sizes).to(dtype);
  }
};

template <typename Norm>
Norm with_values(Norm norm, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  norm->to(dtype);
  if (norm->weight.defined()) {
    norm->weight.copy_(torch::linspace(0.5, 2, kChannels));
    norm->bias.copy_(torch::linspace(-1, 1, kChannels));
  }
  return norm;
}

// Two steps of `part` on this rank's part of a batch, and of `whole` on all of it.
template <typename PartNorm, typename WholeNorm>
void expect_as_whole(PartNorm part, WholeNorm whole, const Shape& shape, const Parts& parts, at::ScalarType dtype,
                     const World& world, double apart) {
  for (int step = 0; step < 2; ++step) {
    const Tensor x = (shape.drawn(parts.whole(), step, dtype) * 2 + 1).requires_grad_();
    const Tensor factor = shape.drawn(parts.whole(), step + 10, dtype);
    whole->zero_grad();
    const Tensor expected = whole->forward(x);
    (expected * factor).sum().backward();

    const Tensor own_x = parts.of(x.detach(), world.rank()).clone().requires_grad_();
    part->zero_grad();
    const uint64_t before = collectives();
    const Tensor y = part->forward(own_x);
    (y * parts.of(factor, world.rank())).sum().backward();
    EXPECT_EQ(collectives() - before, world.world_size() == 1 ? 0 : 2);
    expect_close(y, parts.of(expected, world.rank()), apart, "output");
    expect_close(own_x.grad(), parts.of(x.grad(), world.rank()), apart, "gradient of the input");
    const auto whole_parameters = whole->named_parameters();
    for (const auto& item : part->named_parameters())
      expect_close(sum_over_ranks(item.value().grad()), whole_parameters[item.key()].grad(), apart, item.key().c_str());
  }
  const auto buffers = whole->named_buffers();
  ASSERT_EQ(part->named_buffers().size(), buffers.size());
  for (const auto& item : part->named_buffers()) {
    expect_close(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), apart, item.key().c_str());
    expect_same_bits_on_all_ranks(item.value().reshape({-1}), world);
  }
}

std::vector<nn::BatchNormOptions> every_option() {
  std::vector<nn::BatchNormOptions> all;
  for (const bool affine : {true, false})
    for (const bool tracks : {true, false})
      all.push_back(nn::BatchNormOptions(kChannels).affine(affine).track_running_stats(tracks).eps(1e-3));
  all.push_back(nn::BatchNormOptions(kChannels).momentum(std::nullopt));
  return all;
}

template <typename Norm>
void every_case(const Shape& shape, const Parts& parts, const World& world) {
  for (const auto& options : every_option())
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      SCOPED_TRACE(testing::Message() << "affine " << options.affine() << " tracks " << options.track_running_stats()
                                      << " " << dtype);
      const Norm converted = with_values(Norm(options), dtype);
      EXPECT_EQ(convert_sync_batchnorm(converted), 1u);
      expect_as_whole(converted, with_values(Norm(options), dtype), shape, parts, dtype, world, tolerance(dtype));
      expect_as_whole(with_values(SyncBatchNorm(options), dtype), with_values(Norm(options), dtype), shape, parts,
                      dtype, world, tolerance(dtype));
    }
}

// First, because nothing takes the kernel away again. Ranks are processes.
TEST(SyncBatchNormProcess, OnlyAConversionChangesAnOperator) {
  const auto is_changed = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::batch_norm", ""});
    return contains(op->dumpState(), "sync_batch_norm.cpp");
  };
  if (is_changed()) GTEST_SKIP() << "an earlier test of this process has converted a module";
  const auto ends = in_processes({"a", "a"}, [&](World& world) {
    const Parts parts{{2, 5}};
    const auto run = [&](auto norm) {
      expect_as_whole(norm, with_values(nn::BatchNorm2d(kChannels), torch::kDouble), {{3, 3}}, parts, torch::kDouble,
                      world, 1e-12);
    };
    run(with_values(SyncBatchNorm(kChannels), torch::kDouble));
    EXPECT_FALSE(is_changed());
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    EXPECT_TRUE(is_changed());
    run(norm);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_EQ(end.status, 0) << end.said;
  EXPECT_FALSE(is_changed());
}

TEST(SyncBatchNorm, IsBatchNormOfTheWholeBatch) {
  for (const Parts& parts : {Parts{{4}}, Parts{{3, 5}}, Parts{{4, 0, 2}}, Parts{{2, 3, 2, 7}}}) {
    SCOPED_TRACE(testing::PrintToString(parts.rows));
    on_ranks(static_cast<int>(parts.rows.size()), [&](World& world) {
      every_case<nn::BatchNorm1d>({{}}, parts, world);
      every_case<nn::BatchNorm1d>({{7}}, parts, world);
      every_case<nn::BatchNorm2d>({{3, 4}}, parts, world);
      every_case<nn::BatchNorm3d>({{2, 3, 2}}, parts, world);
    });
  }
}

TEST(SyncBatchNorm, MemoryFormatsAndStrides) {
  on_ranks(2, [](World& world) {
    const Parts parts{{2, 3}};
    const Shape shape{{4, 6}};
    const Tensor x = shape.drawn(5, 0, torch::kDouble), factor = shape.drawn(5, 1, torch::kDouble);
    const auto gradient = [&](nn::BatchNorm2d norm, const Tensor& at, const Tensor& by) {
      const Tensor of = at.detach().requires_grad_();
      const Tensor y = norm(of);
      return std::pair(y.detach(), torch::autograd::grad({(y * by).sum()}, {of})[0]);
    };
    const auto [y, expected] = gradient(with_values(nn::BatchNorm2d(kChannels), torch::kDouble), x, factor);
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    const Tensor own = parts.of(x, world.rank()).clone(), by = parts.of(factor, world.rank());
    for (const Tensor& of :
         {own.contiguous(torch::MemoryFormat::ChannelsLast), own.transpose(2, 3).contiguous().transpose(2, 3),
          torch::stack({own, own}, -1).select(-1, 0)}) {
      ASSERT_FALSE(of.is_contiguous());
      for (const Tensor& each : {by, by.contiguous(torch::MemoryFormat::ChannelsLast)}) {
        const auto [own_y, own_gradient] = gradient(norm, of, each);
        expect_close(own_y, parts.of(y, world.rank()), 1e-12, "output");
        expect_close(own_gradient, parts.of(expected, world.rank()), 1e-12, "gradient of the input");
      }
    }
  });
}

// By its definition, of operators. (The third derivative of libtorch's takes mean and variance for constants.)
struct Written : nn::BatchNorm1dImpl {
  using nn::BatchNorm1dImpl::BatchNorm1dImpl;
  Tensor forward(const Tensor& x) {
    const auto [variance, mean] = torch::var_mean(x, {0, 2}, /*unbiased=*/false, /*keepdim=*/true);
    const Tensor y = (x - mean) / (variance + options.eps()).sqrt();
    return weight.defined() ? y * weight.view({1, -1, 1}) + bias.view({1, -1, 1}) : y;
  }
};

// Of x and the parameters, of a value that is made of gradients of x.
template <typename Norm>
std::vector<Tensor> gradients_of_gradients(Norm& norm, const Tensor& x, const Tensor& factor, int order) {
  Tensor value = (norm->forward(x).tanh() * factor).sum();
  for (int i = 1; i < order; ++i)
    value = torch::autograd::grad({value}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].pow(2).sum();
  std::vector<Tensor> of = norm->parameters();
  of.insert(of.begin(), x);
  return torch::autograd::grad({value}, of, {}, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
}

TEST(SyncBatchNorm, GradientsOfGradients) {
  for (const Parts& parts : {Parts{{3, 4}}, Parts{{3, 0, 2}}})
    on_ranks(static_cast<int>(parts.rows.size()), [&](World& world) {
      for (const auto& options : every_option())
        for (const auto dtype : {torch::kDouble, torch::kFloat})
          for (const int order : {2, 3}) {
            SCOPED_TRACE(testing::Message() << order << " affine " << options.affine() << " " << dtype);
            const Shape shape{{3}};
            auto whole = with_values(nn::BatchNorm1d(options), dtype),
                 part = with_values(nn::BatchNorm1d(options), dtype);
            auto written = with_values(std::make_shared<Written>(options), dtype);
            convert_sync_batchnorm(part);
            const Tensor x = shape.drawn(parts.whole(), 0, dtype).requires_grad_();
            const Tensor factor = shape.drawn(parts.whole(), 1, dtype);
            const Tensor own = parts.of(x.detach(), world.rank()).clone().requires_grad_();
            const auto expected = order == 2 ? gradients_of_gradients(whole, x, factor, order)
                                             : gradients_of_gradients(written, x, factor, order);
            const auto got = gradients_of_gradients(part, own, parts.of(factor, world.rank()), order);
            const double apart = (dtype == torch::kDouble ? 1e-12 : 1e-5) * (order == 2 ? 1 : 10);
            expect_close(got[0], parts.of(expected[0], world.rank()), apart, "input");
            for (size_t i = 1; i < got.size(); ++i)
              if (expected[i].defined()) expect_close(sum_over_ranks(got[i]), expected[i], apart, "parameter");
          }
    });
}

// --- nets ---

// As people write them: holders are members, one is in a Sequential.
struct SmallResNet : nn::Module {
  std::optional<ActivationCheckpointOptions> checkpoint;  // of each block
  Tensor forward(const Tensor& x) {
    const auto block = [&](ResidualBlock& of, const Tensor& at) {
      if (!checkpoint) return of.forward(at);
      return activation_checkpoint(
          *checkpoint, [&of](const Tensor& y) { return of.forward(y); }, at);
    };
    return last(block(*second, block(*first, norm(conv(x)).relu_())).mean({2, 3}));
  }
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).bias(false)));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(8));
  std::shared_ptr<ResidualBlock> first = register_module("first", std::make_shared<ResidualBlock>(8, 8, 1)),
                                 second = register_module("second", std::make_shared<ResidualBlock>(8, 16, 2));
  nn::Linear last = register_module("last", nn::Linear(16, 4));
};
constexpr size_t kNorms = 6;

const Prepare kInDouble = [](nn::Module& net) { net.to(torch::kDouble); };
Tensor image_of(int rank, int step) { return drawn(rank, step, {3, 3, 8, 8}).to(torch::kDouble); }
Tensor label_of(int rank, int step) { return words(rank, step, {3}, 4); }

// One process with the whole batch.
std::shared_ptr<SmallResNet> trained_on_the_whole_batch(int ranks) {
  const auto net = make<SmallResNet>(7, kInDouble);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> images, labels;
    for (int rank = 0; rank < ranks; ++rank) {
      images.push_back(image_of(rank, step));
      labels.push_back(label_of(rank, step));
    }
    sgd.zero_grad();
    torch::cross_entropy_loss(net->forward(torch::cat(images)), torch::cat(labels)).backward();
    sgd.step();
  }
  return net;
}

enum class Convert { kBefore, kAfter };

// wrap(net): a DistributedDataParallel or the like.
void expect_training_as_on_the_whole_batch(const HostOfRank& hosts, Convert when,
                                           const std::optional<ActivationCheckpointOptions>& checkpoint,
                                           const auto& wrap) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  at::set_num_threads(1);
  const auto before = copies(make<SmallResNet>(7, kInDouble)->named_parameters());
  const auto alone = trained_on_the_whole_batch(static_cast<int>(hosts.size()));
  on_hosts(hosts, [&](World& world) {
    const auto net = make<SmallResNet>(7 + static_cast<uint64_t>(world.rank()), kInDouble);
    net->checkpoint = checkpoint;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    if (when == Convert::kBefore) {
      EXPECT_EQ(convert_sync_batchnorm(net), kNorms);
    }
    auto model = wrap(net);
    if (when == Convert::kAfter) {
      EXPECT_EQ(convert_sync_batchnorm(model.module()), kNorms);
    }
    const uint64_t collectives_before = collectives();
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      torch::cross_entropy_loss(model(image_of(world.rank(), step)), label_of(world.rank(), step)).backward();
      sgd.step();
    }
    const uint64_t again = checkpoint ? kNorms - 1 : 0;
    EXPECT_EQ(collectives() - collectives_before, 3 * (2 * kNorms + again));
    if constexpr (requires { model.gather(); }) model.gather();
    test::expect_close(*net, *alone, before, {.apart = 1e-9});
    const auto buffers = alone->named_buffers();
    for (const auto& item : net->named_buffers()) {
      if (!checkpoint)
        expect_close(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), 1e-11,
                     item.key().c_str());
      expect_same_bits_on_all_ranks(item.value().reshape({-1}), world);
    }
    barrier();
    if constexpr (requires { model.synchronize(); }) model.synchronize();
  });
}

TEST(SyncBatchNorm, UnderDistributedDataParallel) {
  const auto wrap = [](const auto& net) { return DistributedDataParallel(net); };
  for (const auto when : {Convert::kBefore, Convert::kAfter})
    expect_training_as_on_the_whole_batch({"a", "a", "a"}, when, {}, wrap);
}

TEST(SyncBatchNorm, WithActivationCheckpoints) {
  const auto some = [](std::string_view operation) {
    return operation == "aten::native_batch_norm" || operation == "aten::convolution";
  };
  for (const auto& options : {kNoRandomNumbers,
                              {.preserve_rng_state = false, .early_stop = true},
                              ActivationCheckpointOptions{.preserve_rng_state = false, .keep = some}})
    expect_training_as_on_the_whole_batch({"a", "a"}, Convert::kBefore, options,
                                          [](const auto& net) { return DistributedDataParallel(net); });
}

TEST(SyncBatchNorm, UnderDistributedDataParallelWithGradientsUnderWay) {
  expect_training_as_on_the_whole_batch({"a", "b"}, Convert::kBefore, {}, [](const auto& net) {
    return DistributedDataParallel(net, {.bucket_cap_mb = 1e-6, .first_bucket_cap_mb = 1e-6});
  });
}

TEST(SyncBatchNorm, UnderFullyShardedDataParallel) {
  for (const FsdpOptions& options : {FsdpOptions{}, full({.unit_cap_mb = 1e-6, .max_gathered_units = 2})})
    for (const auto when : {Convert::kBefore, Convert::kAfter})
      expect_training_as_on_the_whole_batch(kTwoEach, when,
                                            when == Convert::kAfter ? std::optional(kNoRandomNumbers) : std::nullopt,
                                            [&](const auto& net) { return fully_shard(net, options); });
}

// Operators get copies of the parameters there, and there are no running statistics by which the module could be known.
TEST(SyncBatchNorm, IsKnownWhenParametersAreReplacedByCopies) {
  struct Net : nn::Module {
    nn::BatchNorm1d norm =
        register_module("norm", nn::BatchNorm1d(nn::BatchNormOptions(kChannels).track_running_stats(false)));
    Tensor forward(const Tensor& x) { return norm(x); }
  };
  on_hosts(kApart, [](World& world) {
    const auto net = make<Net>(7, kInDouble);
    convert_sync_batchnorm(net);
    auto model = fully_shard(net, full({.mixed_precision = {.param_dtype = torch::kFloat}}));
    const Parts parts{{2, 4}};
    const Tensor x = Shape{}.drawn(6, 0, torch::kDouble);
    const Tensor y = model(parts.of(x, world.rank()));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    const Tensor expected = (x - x.mean(0)) / (x.var(0, false) + 1e-5).sqrt();
    expect_close(y.to(torch::kDouble), parts.of(expected, world.rank()), 1e-6, "output");
    y.sum().backward();
    model.synchronize();
  });
}

TEST(SyncBatchNorm, StaysInFloat32InMixedPrecision) {
  struct Net : nn::Module {
    nn::Conv2d conv = register_module("conv", nn::Conv2d(3, 8, 3));
    SyncBatchNorm norm = register_module("norm", SyncBatchNorm(8));
    at::ScalarType seen = torch::kLong;
    Tensor forward(const Tensor& x) {
      seen = (norm->weight + 0).scalar_type();
      return norm(conv(x));
    }
  };
  on_hosts(kApart, [](World& world) {
    for (FsdpOptions options : {FsdpOptions{}, full()}) {
      options.mixed_precision = {.param_dtype = torch::kBFloat16};
      auto model = fully_shard(std::make_shared<Net>(), options);
      const Tensor y = model(drawn(0, world.rank(), {2, 3, 6, 6}) + world.rank());
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(model.module()->seen, torch::kFloat);
      const Tensor mean = y.detach().to(torch::kFloat).mean({0, 2, 3});
      EXPECT_GT(largest(mean), 0.05);  // of this rank's part
      EXPECT_LT(largest(sum_over_ranks(mean)), 0.02);
      y.sum().backward();
      model.synchronize();
    }
  });
}

// New parameters in every step; the running statistics stay.
TEST(SyncBatchNorm, TakesStepsOfMetaSgd) {
  on_ranks(2, [](World& world) {
    struct Net : nn::Module {
      nn::BatchNorm1d first = register_module("first", nn::BatchNorm1d(kChannels));
      SyncBatchNorm second = register_module("second", SyncBatchNorm(kChannels));
      Tensor forward(const Tensor& x) { return second(first(x).tanh()); }
    };
    const auto net = std::make_shared<Net>();  // not by make(), which lets one rank at a time construct
    net->to(torch::kDouble);
    EXPECT_EQ(convert_sync_batchnorm(net), 1u);
    const auto before = net->parameters();
    const Tensor x = Shape{}.drawn(4, world.rank(), torch::kDouble);
    const uint64_t collectives_before = collectives();
    optim::MetaSGD inner(*net, {.lr = 0.1});
    inner.step(net->forward(x).tanh().sum());  // two in forward, one in backward, two in each recomputation
    EXPECT_FALSE(before[0].is_same(net->first->weight));
    const uint64_t after_step = collectives();
    EXPECT_GT(after_step, collectives_before);
    const Tensor loss = net->forward(x).tanh().sum();
    EXPECT_EQ(collectives(), after_step + 2);
    for (const Tensor& each : torch::autograd::grad({loss}, before)) EXPECT_TRUE(each.isfinite().all().item<bool>());
  });
}

// --- dtypes ---

TEST(SyncBatchNorm, BFloat16AndFloat16) {
  on_ranks(2, [](World& world) {
    const Parts parts{{3, 5}};
    const Shape shape{{4, 4}};
    for (const auto dtype : {torch::kBFloat16, torch::kHalf})
      for (const bool all_low : {false, true})
        for (const bool affine : {true, false}) {
          SCOPED_TRACE(testing::Message() << dtype << all_low << affine);
          const nn::BatchNormOptions options =
              nn::BatchNormOptions(kChannels).affine(affine).track_running_stats(!all_low);
          auto whole = with_values(nn::BatchNorm2d(options), torch::kFloat),
               part = with_values(nn::BatchNorm2d(options), all_low ? dtype : torch::kFloat);
          convert_sync_batchnorm(part);
          const Tensor x = shape.drawn(8, 0, dtype), factor = shape.drawn(8, 1, dtype);
          const Tensor all_x = x.to(torch::kFloat).requires_grad_();
          const Tensor expected = whole(all_x);
          (expected * factor.to(torch::kFloat)).sum().backward();
          const Tensor own_x = parts.of(x, world.rank()).clone().requires_grad_();
          const Tensor y = part(own_x);
          EXPECT_EQ(y.scalar_type(), dtype);
          (y * parts.of(factor, world.rank())).sum().backward();
          EXPECT_EQ(own_x.grad().scalar_type(), dtype);
          const double rounding = dtype == torch::kHalf ? 1e-3 : 8e-3;
          expect_close(y.to(torch::kFloat), parts.of(expected, world.rank()), rounding, "output");
          expect_close(own_x.grad().to(torch::kFloat), parts.of(all_x.grad(), world.rank()), rounding, "gradient");
          if (affine) {
            EXPECT_EQ(part->weight.grad().scalar_type(), part->weight.scalar_type());
          }
          if (all_low) continue;
          // float32 in spite of the input
          expect_close(part->running_mean, whole->running_mean, 1e-6, "running_mean");
          expect_close(part->running_var, whole->running_var, 1e-6, "running_var");
        }
  });
}

TEST(SyncBatchNorm, UnderAutocast) {
  on_ranks(2, [](World& world) {
    const auto net = make<SmallResNet>(7, nullptr), whole = make<SmallResNet>(7, nullptr);
    convert_sync_batchnorm(net);
    const Autocast guard(torch::kBFloat16);
    const auto image = [](int rank) { return image_of(rank, 0).to(torch::kFloat); };
    const Tensor y = net->norm(net->conv(image(world.rank())));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    const Tensor expected = whole->norm(whole->conv(torch::cat({image(0), image(1)})));
    expect_close(y.to(torch::kFloat), expected.narrow(0, 3 * world.rank(), 3).to(torch::kFloat), 8e-3, "output");
    net->forward(image(world.rank())).sum().backward();
    EXPECT_EQ(net->norm->weight.grad().scalar_type(), torch::kFloat);
  });
}

// --- what is synchronized, and what is not ---

TEST(SyncBatchNorm, EvaluationAndOtherModulesAreLocal) {
  on_ranks(2, [](World& world) {
    auto converted = with_values(nn::BatchNorm1d(kChannels), torch::kFloat);
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    auto other = with_values(nn::BatchNorm1d(kChannels), torch::kFloat);
    convert_sync_batchnorm(converted);
    const auto copy = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(converted->clone());
    const Tensor x = Shape{}.drawn(4 + world.rank(), world.rank(), torch::kFloat).requires_grad_();
    const uint64_t before = collectives();
    EXPECT_TRUE(torch::equal(copy->forward(x), other(x)));
    converted->eval();
    module->eval();
    other->eval();
    other->reset_running_stats();
    EXPECT_TRUE(torch::equal(converted(x), other(x)));
    EXPECT_TRUE(torch::equal(module(x), other(x)));
    converted(x).sum().backward();
    EXPECT_EQ(collectives(), before);
    // Without gradients; and a clone of the module.
    converted->train();
    module->train();
    {
      const torch::NoGradGuard no_grad;
      converted(x);
    }
    {
      const c10::InferenceMode inference;
      converted(x.detach() * 1);
      std::dynamic_pointer_cast<SyncBatchNormImpl>(module->clone())->forward(x.detach() * 1);
    }
    EXPECT_EQ(collectives(), before + 3);
  });
}

TEST(SyncBatchNorm, OnlyWhatNeedsAGradientHasACollectiveInBackward) {
  on_ranks(2, [](World& world) {
    auto norm = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    auto whole = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    convert_sync_batchnorm(norm);
    const Parts parts{{2, 3}};
    const Tensor x = Shape{}.drawn(5, 0, torch::kDouble), own = parts.of(x, world.rank());
    uint64_t before = collectives();
    norm(own).square().sum().backward();
    whole(x).square().sum().backward();
    EXPECT_EQ(collectives(), before + 1);
    expect_close(sum_over_ranks(norm->weight.grad()), whole->weight.grad(), 1e-12, "weight");
    // With frozen parameters.
    for (auto each : {norm, whole})
      for (auto& parameter : each->parameters()) parameter.set_requires_grad(false);
    before = collectives();
    const Tensor of = own.clone().requires_grad_(), all = x.clone().requires_grad_();
    norm(of).pow(3).sum().backward();
    whole(all).pow(3).sum().backward();
    EXPECT_EQ(collectives(), before + 2);
    expect_close(of.grad(), parts.of(all.grad(), world.rank()), 1e-12, "input");
  });
}

TEST(SyncBatchNorm, KeepsObjectsThroughConversionsOfDtypeAndFiles) {
  on_ranks(2, [](World& world) {
    const auto net = make<SmallResNet>(7, nullptr);
    const auto names = [&] {
      std::vector<std::string> all;
      for (const auto& item : net->named_buffers()) all.push_back(item.key());
      for (const auto& item : net->named_parameters()) all.push_back(item.key());
      return all;
    };
    const auto names_before = names();
    const Tensor weight = net->norm->weight;
    const auto* const module = net->norm.get();
    EXPECT_EQ(convert_sync_batchnorm(net), kNorms);
    EXPECT_EQ(convert_sync_batchnorm(*net), kNorms);  // again
    EXPECT_EQ(names(), names_before);
    EXPECT_TRUE(weight.is_same(net->norm->weight));
    EXPECT_EQ(module, net->norm.get());
    std::stringstream file;
    torch::save(net, file);
    torch::load(net, file);
    net->to(torch::kDouble);
    net->to(torch::kDouble);  // to itself
    for (auto& parameter : net->parameters()) parameter.set_data(parameter.detach().clone());
    const uint64_t before = collectives();
    net->forward(image_of(world.rank(), 0)).sum().backward();
    EXPECT_EQ(collectives(), before + 2 * kNorms);
    // The module's file is that of a BatchNorm.
    auto saved = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    saved(Shape{}.drawn(3, 0, torch::kFloat));
    std::stringstream other;
    torch::save(saved, other);
    auto loaded = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    torch::load(loaded, other);
    for (const auto& item : saved->named_buffers())
      EXPECT_TRUE(torch::equal(item.value(), loaded->named_buffers()[item.key()])) << item.key();
    EXPECT_TRUE(torch::equal(saved->weight, loaded->weight));
  });
}

TEST(SyncBatchNorm, AllBatchesEmpty) {
  on_ranks(2, [](World&) {
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    convert_sync_batchnorm(norm);
    const Tensor x = Shape{{2, 2}}.drawn(0, 0, torch::kFloat).requires_grad_();
    const Tensor y = norm(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_TRUE(torch::equal(norm->running_mean, torch::zeros({kChannels})));
  });
}

TEST(SyncBatchNorm, OneValuePerChannelInAll) {
  on_ranks(3, [](World& world) {
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    const Shape shape;
    EXPECT_CONTAINS(message_of<c10::Error>([&] { module(shape.drawn(world.rank() == 1 ? 1 : 0, 0, torch::kFloat)); }),
                    "Expected more than 1 value per channel when training");
    // One on each rank is enough.
    const Tensor x = shape.drawn(3, 0, torch::kDouble);
    module->to(torch::kDouble);
    const Tensor y = module(x.narrow(0, world.rank(), 1));
    const Tensor expected = with_values(nn::BatchNorm1d(kChannels), torch::kDouble)(x);
    expect_close(y, expected.narrow(0, world.rank(), 1), 1e-12, "output");
  });
}

TEST(SyncBatchNorm, Groups) {
  on_ranks(3, [](World& world) {
    const Group pair = world.new_group({2, 0}), other = world.new_group({0, 1, 2});
    auto norm = with_values(nn::BatchNorm1d(kChannels), torch::kDouble);
    if (world.rank() == 1) {
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { convert_sync_batchnorm(norm, pair); }), "not a member");
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { SyncBatchNorm(kChannels, pair); }), "not a member");
    } else {
      EXPECT_EQ(convert_sync_batchnorm(norm, pair), 1u);
      const Tensor x = Shape{}.drawn(5, 0, torch::kDouble);
      const Tensor expected = with_values(nn::BatchNorm1d(kChannels), torch::kDouble)(x);
      const Parts parts{{3, 2}};
      expect_close(norm(parts.of(x, pair.rank())), parts.of(expected, pair.rank()), 1e-12, "output");
      EXPECT_EQ(collectives(), 0u);
      expect_refusal({"the net itself is synchronized in another group already", "clone()"},
                     [&] { convert_sync_batchnorm(norm, other); });
    }
    nn::Sequential nothing(nn::Linear(2, 2));
    EXPECT_EQ(convert_sync_batchnorm(nothing), 0u);
  });
}

TEST(SyncBatchNorm, BadUse) {
  std::shared_ptr<SmallResNet> left;
  SyncBatchNorm left_module{nullptr};
  on_ranks(2, [&](World& world) {
    auto norm = with_values(nn::BatchNorm2d(kChannels), torch::kFloat);
    auto module = with_values(SyncBatchNorm(kChannels), torch::kFloat);
    convert_sync_batchnorm(norm);
    expect_refusal({"5 channels (weight)", "[2, 3, 4, 4] has 3"}, [&] { norm(torch::ones({2, 3, 4, 4})); });
    expect_refusal({"5 channels", "[2, 3] has 3"}, [&] { module(torch::ones({2, 3})); });
    expect_refusal({"size [5]", "two dimensions or more"}, [&] { module(torch::ones({5})); });
    expect_refusal({"Long"}, [&] { module(torch::ones({2, 5}, torch::kLong)); });
    expect_refusal({"weight", "is Float", "input is Double"}, [&] { module(torch::ones({2, 5}, torch::kDouble)); });
    EXPECT_THROW(norm(torch::ones({2, 5})), c10::Error);  // as an ordinary BatchNorm2d
    expect_refusal({"input", "device meta"}, [&] { module(torch::ones({2, 5, 3}, torch::kMeta)); });
    auto without_values = on_meta([&] { return nn::BatchNorm2d(kChannels); });
    convert_sync_batchnorm(without_values);
    expect_refusal({"weight", "device meta"}, [&] { without_values(torch::ones({2, 5, 3, 3})); });

    nn::Sequential net(nn::Linear(2, 3), nn::BatchNorm1d(nn::BatchNormOptions(3).eps(world.rank() == 0 ? 1e-5 : 1e-3)));
    const std::string what = message_of<Mismatch>([&] { convert_sync_batchnorm(net); });
    if (world.rank() == 1) {
      EXPECT_CONTAINS(what, "eps 0.001");
    }
    EXPECT_CONTAINS(message_of<Mismatch>([&] { convert_sync_batchnorm(nn::BatchNorm1d(3 + world.rank())); }),
                    "differs");
    const auto different = make<SmallResNet>(7, nullptr);
    convert_sync_batchnorm(different);
    if (world.rank() == 0) {
      left = different;
      left_module = module;
    }
  });
  // The World has ended.
  const Tensor x = image_of(0, 0).to(torch::kFloat);
  EXPECT_CONTAINS(message_of<Aborted>([&] { left->forward(x); }), "convert_sync_batchnorm() in the new World");
  EXPECT_THROW(left_module(torch::ones({2, 5})), Aborted);
  left->eval();
  EXPECT_TRUE(left->forward(x).isfinite().all().item<bool>());
  EXPECT_CONTAINS(message_of<Aborted>([&] { convert_sync_batchnorm(left); }), "World");
  run_threads(1, [&](World&) {
    left->train();
    convert_sync_batchnorm(left);
    EXPECT_TRUE(left->forward(x).isfinite().all().item<bool>());
  });
}

}  // namespace
}  // namespace muster::test
