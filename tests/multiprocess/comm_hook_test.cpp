// Communication hooks of DistributedDataParallel: what a hook sees, when its steps run, and the hooks that are made
// already, equal to PyTorch's on the same numbers.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/serialize.h>

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "support/ask_python.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;
namespace hooks = comm_hooks;
using Shape = std::vector<int64_t>;

const std::vector<Shape> kShapes = {{12, 20}, {7}, {9, 4, 3}, {16, 8}};

// The same numbers as gradient() of comm_hooks_peer.py.
Tensor numbers_of(size_t parameter, int step, const Shape& shape, at::ScalarType dtype) {
  const auto p = static_cast<double>(parameter);
  const Tensor i = torch::arange(c10::multiply_integers(shape), torch::kFloat64);
  return (torch::sin(i * (0.37 + 0.11 * p) + step) + 0.25 * torch::cos(i * i * 0.013 + p)).view(shape).to(dtype);
}

// Its gradients are what the test says.
struct HookNet : nn::Module {
  std::vector<Tensor> p;
  at::ScalarType dtype;
  bool in_order = true;  // false: gradients become ready in another order than the reverse of the parameters'
  explicit HookNet(const std::vector<Shape>& shapes = kShapes, at::ScalarType type = torch::kFloat) : dtype(type) {
    for (size_t i = 0; i < shapes.size(); ++i)
      p.push_back(register_parameter(text("p", i), torch::zeros(shapes[i], type)));
  }
  // On rank `rank` of `size`, a part of the same sum that differs from rank to rank.
  Tensor wanted(size_t i, int step, int rank, int size) const {
    const Tensor mean = numbers_of(i, step, p[i].sizes().vec(), dtype);
    return mean * (1 + 0.5 * (2 * rank - size + 1));
  }
  Tensor forward(int step, int rank = 0, int size = 1) {
    Tensor sum = torch::zeros({}, dtype);
    for (size_t n = 0; n < p.size(); ++n) {
      const size_t i = in_order ? n : (3 * n + 1) % p.size();
      sum = sum + (p[i] * wanted(i, step, rank, size)).sum();
    }
    return sum;
  }
};

// Gradients after a step with this hook.
std::vector<Tensor> step_of(DistributedDataParallel<HookNet>& ddp, int step, const World& world) {
  for (const Tensor& parameter : ddp->p) parameter.mutable_grad() = Tensor();
  ddp.forward(step, world.rank(), world.world_size()).backward();
  std::vector<Tensor> all;
  for (const Tensor& parameter : ddp->p) all.push_back(parameter.grad().clone());
  return all;
}

struct HookDdp : DistributedDataParallel<HookNet> {
  HookDdp(const std::shared_ptr<HookNet>& net, const CommHook& hook, DdpOptions options = {})
      : DistributedDataParallel<HookNet>(net, std::move(options)) {
    if (hook) register_comm_hook(hook);
  }
};
HookDdp ddp_with(const CommHook& hook, at::ScalarType dtype = torch::kFloat, const DdpOptions& options = {}) {
  return {std::make_shared<HookNet>(kShapes, dtype), hook, options};
}

std::vector<double> flat_numbers(const std::vector<Tensor>& tensors) {
  std::vector<double> all;
  for (const Tensor& tensor : tensors) {
    const Tensor flat = tensor.to(torch::kFloat64).reshape({-1}).contiguous();
    all.insert(all.end(), flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
  }
  return all;
}

void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& expected, const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << what << " parameter " << i;
}
void expect_equal_on_all_ranks(const std::vector<Tensor>& tensors, const World& world) {
  for (const Tensor& tensor : tensors) {
    Tensor first = tensor.clone();
    broadcast(first, 0);
    EXPECT_TRUE(torch::equal(first, tensor)) << world.rank();
  }
}
void expect_close(const std::vector<Tensor>& got, const std::vector<Tensor>& expected, double tolerance) {
  EXPECT_LE(farthest(flat_numbers(got), flat_numbers(expected)), tolerance);
}

constexpr double kBytes = 1.0 / (1 << 20);
const DdpOptions kManyBuckets = {.bucket_cap_mb = 400 * kBytes, .first_bucket_cap_mb = 100 * kBytes};

TEST(CommHook, SeesEachBucketOnceInOrder) {
  on_ranks(2, [](World& world) {
    std::vector<size_t> seen;
    std::vector<std::string> names;
    const auto hook = [&](GradBucket& bucket) -> HookFuture {
      EXPECT_EQ(bucket.index(), seen.size());
      seen.push_back(bucket.index());
      EXPECT_EQ(bucket.is_last(), bucket.index() == 3);
      EXPECT_EQ(bucket.group().size(), 2);
      const auto gradients = bucket.gradients();
      EXPECT_EQ(gradients.size(), bucket.places().size());
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), bucket.places()[i].parameter.sizes());
        EXPECT_TRUE(gradients[i].is_alias_of(bucket.buffer()));
        names.push_back(bucket.places()[i].name);
        gradients[i].fill_(static_cast<double>(bucket.index()) + 1);
      }
      return bucket.buffer();
    };
    auto ddp = ddp_with(hook, torch::kFloat, kManyBuckets);
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      names.clear();
      step_of(ddp, step, world);
      EXPECT_EQ(seen.size(), 4U);
      EXPECT_EQ(names.size(), 4U);
      const auto buckets = ddp.bucket_names();
      if (step == 0) continue;  // the order of the first step is not that of the others
      for (size_t b = 0; b < buckets.size(); ++b) EXPECT_EQ(buckets[b], std::vector<std::string>{names[b]});
      for (size_t b = 0; b < buckets.size(); ++b)
        EXPECT_EQ(ddp->named_parameters()[buckets[b][0]].grad().max().item<double>(), static_cast<double>(b) + 1);
    }
  });
}

TEST(CommHook, StepsThatCommunicateRunInOrderInTheThreadOfBackward) {
  on_ranks(3, [](World& world) {
    const auto here = std::this_thread::get_id();
    std::vector<std::string> events;
    const auto hook = [&](GradBucket& bucket) {
      const std::string name = text(bucket.index());
      events.push_back(name + " begins");
      const Tensor buffer = bucket.buffer();
      return HookFuture(all_reduce_async(buffer), buffer)
          .then([&, name](const Tensor& sum) -> HookFuture {
            EXPECT_EQ(std::this_thread::get_id(), here);
            events.push_back(name + " goes on");
            return {all_reduce_async(sum), sum};  // sums of sums
          })
          .then([&, name](const Tensor& sum) -> HookFuture {
            events.push_back(name + " and on");
            broadcast(sum, 1);
            return sum;
          })
          .then([&](const Tensor& sum) {
            EXPECT_EQ(std::this_thread::get_id(), here);
            return sum / 9;
          });
    };
    auto ddp = ddp_with(hook, torch::kDouble, kManyBuckets);
    auto plain = ddp_with(nullptr, torch::kDouble);
    for (int step = 0; step < 2; ++step) {
      events.clear();
      expect_close(step_of(ddp, step, world), step_of(plain, step, world), 1e-14);
      const std::vector<std::string> expected = {"0 begins",  "1 begins",  "0 goes on", "2 begins",
                                                 "0 and on",  "1 goes on", "3 begins",  "1 and on",
                                                 "2 goes on", "2 and on",  "3 goes on", "3 and on"};
      EXPECT_EQ(events, expected);
    }
  });
}

TEST(CommHook, AveragesAreThoseWithoutAHook) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "a", "b"}})
    on_hosts(hosts, [](World& world) {
      for (const DdpOptions& options : {DdpOptions(), kManyBuckets}) {
        auto plain = ddp_with(nullptr, torch::kFloat, options),
             ddp = ddp_with(hooks::all_reduce, torch::kFloat, options);
        for (int step = 0; step < 3; ++step) expect_same(step_of(ddp, step, world), step_of(plain, step, world));
      }
      auto own = ddp_with(hooks::noop);
      const auto gradients = step_of(own, 5, world);
      for (size_t i = 0; i < gradients.size(); ++i)
        EXPECT_TRUE(torch::equal(gradients[i], own->wanted(i, 5, world.rank(), world.world_size())));
    });
}

// A gradient of its own block on the heap, one with other strides, and one without elements.
TEST(CommHook, LargeAndUnusualGradients) {
  on_ranks(2, [](World& world) {
    const std::vector<Shape> shapes = {{513, 601}, {8, 6, 3, 3}, {0, 5}, {}, {20, 14}};
    const auto make = [&](const CommHook& hook) {
      auto net = std::make_shared<HookNet>(shapes);
      const torch::NoGradGuard no_grad;
      net->p[1].set_data(net->p[1].contiguous(at::MemoryFormat::ChannelsLast));
      net->p[4].set_data(torch::zeros({14, 20}).t());
      return HookDdp(net, hook);
    };
    auto plain = make(nullptr), all = make(hooks::all_reduce);
    auto exact = make(hooks::PowerSgd({.matrix_approximation_rank = 601, .start_iter = 0, .min_compression_rate = 0})),
         top = make(hooks::TopK({.ratio = 1}));
    for (int step = 0; step < 3; ++step) {
      const auto expected = step_of(plain, step, world);
      expect_same(step_of(all, step, world), expected);
      expect_close(step_of(exact, step, world), expected, 2e-4);
      expect_close(step_of(top, step, world), expected, 1e-6);
    }
  });
}

TEST(CommHook, SixteenBitsTravel) {
  on_ranks(3, [](World& world) {
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      const bool is_half = dtype == torch::kHalf;
      auto ddp = ddp_with(is_half ? hooks::fp16_compress : hooks::bf16_compress);
      at::ScalarType seen = torch::kFloat;
      const CommHook inner = [&](GradBucket& bucket) {
        seen = bucket.buffer().scalar_type();
        return hooks::all_reduce(bucket);
      };
      auto wrapped = ddp_with(is_half ? hooks::fp16_compress_wrapper(inner) : hooks::bf16_compress_wrapper(inner));
      const auto gradients = step_of(ddp, 1, world), of_wrapped = step_of(wrapped, 1, world);
      EXPECT_EQ(seen, dtype);
      for (size_t i = 0; i < gradients.size(); ++i) {
        Tensor sum = ddp->wanted(i, 1, world.rank(), 3).to(dtype).div_(3);
        all_reduce(sum);
        EXPECT_TRUE(torch::equal(gradients[i], sum.to(torch::kFloat)));
        Tensor average = ddp->wanted(i, 1, world.rank(), 3).to(dtype);
        all_reduce(average, {.op = ReduceOp::AVG});
        EXPECT_TRUE(torch::equal(of_wrapped[i], average.to(torch::kFloat)));
      }
    }
  });
}

TEST(CommHook, EqualToPyTorchsOnTheSameNumbers) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch==2.13.0";
  struct Case {
    const char* hook;
    int rank, start;
    bool feedback, warm;
    const char* dtype;
    double tolerance;
  };
  const std::vector<Case> cases = {
      {"power", 1, 2, true, true, "float64", 1e-9},   {"power", 2, 2, true, true, "float32", 2e-4},
      {"power", 3, 3, true, false, "float64", 1e-9},  {"power", 2, 2, false, true, "float64", 1e-9},
      {"power", 4, 0, false, false, "float64", 1e-9}, {"fp16", 0, 0, false, false, "float32", 0},
      {"bf16", 0, 0, false, false, "float32", 0},     {"bf16_power", 1, 2, false, true, "float32", 0.1},
  };
  constexpr int kSteps = 6;
  Comparison comparison;
  for (const Case& c : cases)
    for (const int ranks : {1, 2}) {
      if (ranks > 1 && c.hook != std::string("power")) continue;  // an average of rounded numbers is another number
      const std::string question =
          text(c.hook, " ", c.rank, " ", kSteps, " ", c.start, " ", c.feedback, " ", c.warm, " ", c.dtype);
      std::vector<double> ours;
      on_ranks(ranks, [&](World& world) {
        const hooks::PowerSgd power({.matrix_approximation_rank = std::max(c.rank, 1),
                                     .start_iter = c.start,
                                     .use_error_feedback = c.feedback,
                                     .warm_start = c.warm});
        const std::string name = c.hook;
        const CommHook hook = name == "power"  ? CommHook(power)
                              : name == "fp16" ? CommHook(hooks::fp16_compress)
                              : name == "bf16" ? CommHook(hooks::bf16_compress)
                                               : hooks::bf16_compress_wrapper(power);
        auto ddp = ddp_with(hook, c.dtype == std::string("float64") ? torch::kDouble : torch::kFloat);
        std::vector<double> numbers;
        for (int step = 0; step < kSteps; ++step) {
          const auto of_step = flat_numbers(step_of(ddp, step, world));
          numbers.insert(numbers.end(), of_step.begin(), of_step.end());
        }
        if (world.rank() == 0) ours = numbers;
      });
      comparison.add(question, ours, c.tolerance);
    }
  comparison.with("multiprocess/comm_hooks_peer.py");
}

TEST(CommHook, PowerSgdLosesNothingThatFeedbackDoesNotGiveBack) {
  on_ranks(2, [](World& world) {
    for (const bool batched : {false, true}) {
      const hooks::PowerSgd power({.matrix_approximation_rank = 2, .start_iter = 0, .batched = batched});
      const auto net = std::make_shared<HookNet>(kShapes, torch::kDouble);
      net->in_order = false;  // so the second step has other buckets than the first
      HookDdp ddp(net, power);
      auto plain = ddp_with(nullptr, torch::kDouble);
      // The sum of what arrives lags behind the sum of the gradients by no more than the last error.
      std::vector<Tensor> lag;
      for (int step = 0; step < 40; ++step) {
        const auto got = step_of(ddp, 0, world), expected = step_of(plain, 0, world);
        if (lag.empty())
          for (const Tensor& each : got) lag.push_back(torch::zeros_like(each));
        for (size_t i = 0; i < got.size(); ++i) lag[i] += expected[i] - got[i];
      }
      double far = 0;
      for (const Tensor& each : lag) far = std::max(far, each.abs().max().item<double>());
      EXPECT_LT(far, 12) << batched;
      EXPECT_GT(far, 1e-6) << batched;  // so it was compressed
      EXPECT_GT(power.compression().before, power.compression().after);
      EXPECT_EQ(power.iter(), 40);
    }
  });
}

// With gradients of zeros the factors would be NaN.
TEST(CommHook, PowerSgdOfZeros) {
  on_ranks(2, [](World& world) {
    for (const int64_t rank : {1, 3}) {
      auto ddp = ddp_with(hooks::PowerSgd({.matrix_approximation_rank = rank, .start_iter = 0}));
      for (int step = 0; step < 3; ++step) {
        ddp->zero_grad();
        (ddp.forward(step, world.rank(), 2) * 0).backward();
        for (const Tensor& parameter : ddp->p) EXPECT_EQ(parameter.grad().abs().max().item<float>(), 0);
      }
      const auto got = step_of(ddp, 1, world);
      auto plain = ddp_with(nullptr);
      const auto expected = step_of(plain, 1, world);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_GT((got[i] * expected[i]).sum().item<float>(), 0.05 * expected[i].square().sum().item<float>()) << i;
    }
  });
}

// A GradScaler skips such a step.
TEST(CommHook, PowerSgdAfterInfiniteGradients) {
  on_ranks(2, [](World& world) {
    for (const int64_t rank : {1, 3}) {
      auto ddp = ddp_with(hooks::PowerSgd({.matrix_approximation_rank = rank, .start_iter = 0})),
           other = ddp_with(hooks::PowerSgd({.matrix_approximation_rank = rank, .start_iter = 0}));
      step_of(ddp, 0, world);
      step_of(other, 0, world);
      for (const Tensor& parameter : ddp->p) parameter.mutable_grad() = Tensor();
      const double scale = world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
      (ddp.forward(1, world.rank(), 2) * scale).backward();
      EXPECT_FALSE(ddp->p[0].grad().isfinite().all().item<bool>());
      const auto got = step_of(ddp, 2, world), expected = step_of(other, 2, world);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-3, 1e-4)) << i;
    }
  });
}

TEST(CommHook, TopKSendsTheLargestAndKeepsTheRest) {
  on_ranks(2, [](World& world) {
    const hooks::TopK top({.ratio = 0.05, .start_iter = 1});
    auto ddp = ddp_with(top, torch::kDouble), plain = ddp_with(nullptr, torch::kDouble);
    expect_same(step_of(ddp, 0, world), step_of(plain, 0, world));
    const auto all_of = [&](int step, int rank) {
      std::vector<Tensor> all;
      for (size_t i = 0; i < ddp->p.size(); ++i) all.push_back(ddp->wanted(i, step, rank, 2).reshape({-1}));
      return torch::cat(all);
    };
    std::vector<Tensor> left(2, torch::zeros_like(all_of(0, 0)));
    for (int step = 1; step < 5; ++step) {
      Tensor expected = torch::zeros_like(left[0]);
      const auto k = std::llround(0.05 * static_cast<double>(expected.numel()));
      for (int rank = 0; rank < 2; ++rank) {
        Tensor& mine = left[static_cast<size_t>(rank)];
        mine = mine + all_of(step, rank);
        const Tensor largest = std::get<1>(mine.abs().topk(k));
        expected.index_add_(0, largest, mine.index_select(0, largest) / 2);
        mine.index_fill_(0, largest, 0);
      }
      std::vector<Tensor> got;
      for (const Tensor& gradient : step_of(ddp, step, world)) got.push_back(gradient.reshape({-1}));
      EXPECT_TRUE(torch::allclose(torch::cat(got), expected, 0, 1e-12)) << step;
      EXPECT_EQ(torch::cat(got).count_nonzero().item<int64_t>(), expected.count_nonzero().item<int64_t>());
    }
    EXPECT_EQ(top.iter(), 5);
  });
}

template <typename Hook>
void go_on_after_loading(const std::function<Hook()>& make) {
  const auto folder = fs::temp_directory_path() / text("muster_comm_hook_", ::getpid());
  on_ranks(2, [&](World& world) {
    Hook mine = make();
    auto ddp = ddp_with(mine);
    for (int step = 0; step < 3; ++step) step_of(ddp, step, world);
    Snapshot snapshot({.folder = folder, .every = 1});
    snapshot.add("hook", mine);
    snapshot.save(3);
    Hook other = make();
    Snapshot again({.folder = folder, .every = 1});
    again.add("hook", other);
    EXPECT_EQ(again.restore(), 3);
    EXPECT_EQ(other.iter(), 3);
    auto loaded = ddp_with(other), anew = ddp_with(make());
    for (int step = 3; step < 6; ++step) {
      const auto expected = step_of(ddp, step, world);
      expect_same(step_of(loaded, step, world), expected, text("step ", step));
      EXPECT_FALSE(torch::equal(step_of(anew, step, world)[0], expected[0]));
    }
  });
  fs::remove_all(folder);
}
TEST(CommHook, AStateInASnapshotGoesOnToTheBit) {
  for (const bool warm : {true, false})
    go_on_after_loading<hooks::PowerSgd>(
        [=] { return hooks::PowerSgd({.matrix_approximation_rank = 2, .start_iter = 0, .warm_start = warm}); });
  go_on_after_loading<hooks::TopK>([] { return hooks::TopK({.ratio = 0.1}); });
}

// Factors of another rank are not gone on with.
TEST(CommHook, AStateOfAnotherRankOfApproximation) {
  on_ranks(2, [](World& world) {
    hooks::PowerSgd two({.matrix_approximation_rank = 2, .start_iter = 0}),
        four({.matrix_approximation_rank = 4, .start_iter = 0});
    auto ddp = ddp_with(four);
    step_of(ddp, 0, world);
    std::stringstream file;
    torch::serialize::OutputArchive out;
    four.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    two.load(in);
    auto other = ddp_with(two), plain = ddp_with(nullptr);
    const auto got = step_of(other, 1, world);
    expect_equal_on_all_ranks(got, world);
    EXPECT_GT((got[0] * step_of(plain, 1, world)[0]).sum().item<float>(), 0);
  });
}

TEST(CommHook, PostLocalSgdAveragesWithinSubgroupsLater) {
  on_ranks(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    const hooks::PostLocalSgd local({.start_local_sgd_iter = 2, .subgroup = pair});
    auto ddp = ddp_with(local, torch::kDouble), plain = ddp_with(nullptr, torch::kDouble),
         of_pair = ddp_with(nullptr, torch::kDouble, {.group = pair});
    for (int step = 0; step < 4; ++step) {
      const auto of_all = step_of(plain, step, world), of_two = step_of(of_pair, step, world);
      expect_close(step_of(ddp, step, world), step < 2 ? of_all : of_two, 1e-14);
    }
    EXPECT_EQ(local.iter(), 4);
    // Without any communication.
    auto alone = ddp_with(
        hooks::PostLocalSgd({.start_local_sgd_iter = 0, .subgroup = pair, .post_local_gradient_all_reduce = false}));
    auto none = ddp_with(hooks::noop);
    const auto operations = [&] { return world.group().stats().operations + pair.stats().operations; };
    const uint64_t before = operations();
    for (int step = 1; step < 3; ++step) {
      EXPECT_TRUE(torch::equal(step_of(alone, step, world)[0], alone->wanted(0, step, world.rank(), 4)));
      EXPECT_TRUE(torch::equal(step_of(none, step, world)[0], alone->wanted(0, step, world.rank(), 4)));
    }
    EXPECT_EQ(operations(), before);
  });
}

TEST(CommHook, AccumulationUnusedParametersAndExceptions) {
  on_ranks(2, [](World& world) {
    struct Partial : HookNet {
      Tensor forward(size_t used, bool throws = false) {
        Tensor sum = torch::zeros({});
        for (size_t i = 0; i < used; ++i) {
          sum = sum + (p[i] * wanted(i, 1, 0, 1)).sum();
          if (throws && i == 0)
            sum.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("a step that fails"); });
        }
        return sum;
      }
    };
    int calls = 0;
    const auto counted = [&](GradBucket& bucket) {
      ++calls;
      return hooks::all_reduce(bucket);
    };
    DistributedDataParallel<Partial> ddp(std::make_shared<Partial>());
    ddp.register_comm_hook(counted);
    {
      const auto guard = ddp.no_sync();
      ddp.forward(4).backward();
      EXPECT_EQ(calls, 0);
    }
    ddp.forward(4).backward();
    EXPECT_GT(calls, 0);
    EXPECT_TRUE(torch::allclose(ddp->p[0].grad(), 2 * ddp->wanted(0, 1, 0, 1)));
    ddp->zero_grad();
    const std::string what = message_of<InvalidArgument>([&] { ddp.forward(world.rank() == 0 ? 4 : 2).backward(); });
    EXPECT_CONTAINS(what, "p2, p3");
    EXPECT_TRUE(torch::allclose(ddp->p[3].grad(), ddp->wanted(3, 1, 0, 1) / 2));
    // One rank's backward() throws before it has the last gradient; it makes up for it, and the next step is good.
    ddp->zero_grad();
    if (world.rank() == 0)
      EXPECT_THROW(ddp.forward(4, true).backward(), std::runtime_error);
    else
      EXPECT_THROW(ddp.forward(4).backward(), InvalidArgument);
    ddp->zero_grad();
    ddp.forward(4).backward();
    EXPECT_TRUE(torch::allclose(ddp->p[1].grad(), ddp->wanted(1, 1, 0, 1)));
  });
}

HookFuture counted_in_state(std::shared_ptr<int>& state, GradBucket& bucket) {
  ++*state;
  return hooks::all_reduce(bucket);
}

TEST(CommHook, MayHaveAState) {
  on_ranks(1, [](World& world) {
    const auto calls = std::make_shared<int>(0);
    DistributedDataParallel<HookNet> ddp(std::make_shared<HookNet>());
    ddp.register_comm_hook(calls, &counted_in_state);
    step_of(ddp, 0, world);
    EXPECT_EQ(*calls, 1);
  });
}

// An error on all ranks costs the step, not the next one.
TEST(CommHook, AStepAfterAnError) {
  on_ranks(2, [](World& world) {
    int step = 0;
    std::vector<int> calls(4);
    const auto hook = [&](GradBucket& bucket) {
      ++calls[static_cast<size_t>(step)];
      const Tensor buffer = bucket.buffer();
      if (step == 0 && bucket.index() == 2) throw std::runtime_error("a hook that fails");
      return HookFuture(all_reduce_async(buffer, {.op = ReduceOp::AVG}), buffer)
          .then([&, index = bucket.index()](const Tensor& average) -> HookFuture {
            if (step == 1 && index == 1) throw std::runtime_error("a step that fails");
            return average;
          })
          .then([&](const Tensor& average) { return step == 2 ? average.narrow(0, 0, 1) : average; });
    };
    auto ddp = ddp_with(hook, torch::kFloat, kManyBuckets), plain = ddp_with(nullptr);
    EXPECT_THROW(step_of(ddp, 0, world), std::runtime_error);
    ddp.forward(0, world.rank(), 2);  // makes up for it
    step = 1;
    EXPECT_THROW(step_of(ddp, 1, world), std::runtime_error);
    ddp.forward(0, world.rank(), 2);
    step = 2;
    expect_refusal({"returned a tensor of 1 elements"}, [&] { step_of(ddp, 2, world); });
    step = 3;
    expect_same(step_of(ddp, 3, world), step_of(plain, 3, world));
    EXPECT_EQ(calls, (std::vector<int>{4, 4, 4, 4}));
  });
}

TEST(CommHook, WhatWasNotSentArrivesWhereAParameterIsUnused) {
  on_ranks(2, [](World& world) {
    struct Partial : HookNet {
      Tensor forward(size_t used) {
        Tensor sum = torch::zeros({});
        for (size_t i = 0; i < used; ++i) sum = sum + (p[i] * wanted(i, 1, 0, 1)).sum();
        return sum;
      }
    };
    DistributedDataParallel<Partial> ddp(std::make_shared<Partial>(), {.find_unused_parameters = true});
    ddp.register_comm_hook(hooks::TopK({.ratio = 0.75}));
    Tensor arrived = torch::zeros(kShapes[3]);
    for (int step = 0; step < 6; ++step) {
      ddp->zero_grad();
      ddp.forward(step == 0 ? 4 : 1).backward();
      if (ddp->p[3].grad().defined()) arrived += ddp->p[3].grad();
    }
    EXPECT_TRUE(torch::allclose(arrived, ddp->wanted(3, 1, 0, 1)));
    EXPECT_FALSE(ddp->p[3].grad().defined());  // when everything has arrived
    (void)world;
  });
}

TEST(CommHook, BadUseIsOneSentence) {
  on_ranks(2, [](World& world) {
    auto none = ddp_with([](GradBucket&) { return HookFuture(Tensor()); });
    expect_refusal({"the communication hook returned no tensor", "p"}, [&] { step_of(none, 0, world); });
    auto other = ddp_with([](GradBucket&) { return HookFuture(torch::zeros({3})); });
    expect_refusal({"returned a tensor of 3 elements for the bucket of"}, [&] { step_of(other, 0, world); });
    expect_refusal({"has a communication hook already"}, [&] { other.register_comm_hook(hooks::noop); });
    expect_refusal({"the communication hook is empty"}, [&] { ddp_with(nullptr).register_comm_hook(CommHook()); });
    expect_refusal({"set_buffer() gets a tensor"}, [&] {
      auto bad = ddp_with([](GradBucket& bucket) -> HookFuture {
        bucket.set_buffer(torch::zeros({2}));
        return bucket.buffer();
      });
      step_of(bad, 0, world);
    });
    expect_refusal({"matrix_approximation_rank is 0"}, [] { hooks::PowerSgd({.matrix_approximation_rank = 0}); });
    expect_refusal({"ratio is 0"}, [] { hooks::TopK({.ratio = 0}); });
    expect_refusal({"ratio is 1.5"}, [] { hooks::TopK({.ratio = 1.5}); });
    expect_refusal({"is empty"}, [] { hooks::fp16_compress_wrapper(nullptr); });
  });
}

TEST(ModelAverager, AveragesAmongTheRanksOfTheLargestPeriod) {
  on_ranks(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    ModelAverager averager({.periods = {{2, pair}, {6, {}}}, .warmup_steps = 1});
    for (int step = 0; step < 8; ++step) {
      const std::vector<Tensor> parameters = {torch::full({3, 2}, 1. * world.rank(), torch::requires_grad()),
                                              torch::full({5}, 10. * world.rank(), torch::kDouble),
                                              torch::full({2, 2}, -1. * world.rank()).t()};
      const bool due = step >= 1 && step % 2 == 0;
      EXPECT_EQ(averager.average_parameters(parameters), due);
      const double expected = step == 6 ? 1.5 : due ? 0.5 + world.rank() / 2 * 2 : world.rank();
      EXPECT_EQ(parameters[0].min().item<double>(), expected) << step;
      EXPECT_EQ(parameters[0].max().item<double>(), expected) << step;
      EXPECT_EQ(parameters[1].max().item<double>(), 10 * expected) << step;
      EXPECT_EQ(parameters[2].max().item<double>(), -expected) << step;
      EXPECT_TRUE(parameters[0].requires_grad());
    }
    EXPECT_EQ(averager.step(), 8);
    expect_refusal({"has no period"}, [] { ModelAverager({}); });
    expect_refusal({"a period of ModelAverager is 0"}, [] { ModelAverager({.periods = {{0, {}}}}); });
    const Group first = world.group().split(world.rank() < 2 ? 0 : -1);
    if (world.rank() >= 2) {
      expect_refusal({"not a member of the group with period 3"}, [&] { ModelAverager({.periods = {{3, first}}}); });
    }
  });
}

// Post-local SGD: averages of gradients, then of parameters.
TEST(ModelAverager, KeepsRanksTogetherThatTrainByThemselves) {
  on_ranks(2, [](World& world) {
    auto ddp = ddp_with(hooks::PostLocalSgd({.start_local_sgd_iter = 2, .post_local_gradient_all_reduce = false}),
                        torch::kDouble);
    ModelAverager averager({.periods = {{3, {}}}});
    std::vector<Tensor> alone;  // what one process has after the mean of both ranks' gradients
    for (const Tensor& parameter : ddp->p) alone.push_back(torch::zeros_like(parameter));
    for (int step = 0; step < 7; ++step) {
      const auto gradients = step_of(ddp, step, world);
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < gradients.size(); ++i) {
        ddp->p[i].sub_(gradients[i], 0.1);
        alone[i].sub_(numbers_of(i, step, kShapes[i], torch::kDouble), 0.1);
      }
      averager.average_parameters(ddp->parameters());
      if (step % 3 == 0) expect_close(ddp->parameters(), alone, 1e-12);
      if (step == 5) {
        EXPECT_FALSE(torch::allclose(ddp->p[0], alone[0]));
      }
    }
  });
}

}  // namespace
}  // namespace muster::test
