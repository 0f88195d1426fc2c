// clip_grad_norm_ and clip_grad_value_: the numbers of Python's, and one norm for one process, DistributedDataParallel
// and both strategies of FullyShardedDataParallel.
#include "muster/optim/clip_grad.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "support/ask_python.h"

namespace muster::test::clipping {
namespace {

using Tensors = std::vector<Tensor>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A parameter of this shape, whose gradient is given.
Tensor with_gradient(const Tensor& gradient) {
  Tensor parameter = torch::zeros_like(gradient, torch::requires_grad());
  parameter.mutable_grad() = gradient;
  return parameter;
}

// As in clip_grad_reference.py.
Tensors parameters_of(at::ScalarType dtype) {
  const std::vector<std::vector<int64_t>> shapes = {{3, 5}, {}, {0, 2}, {7}, {2, 1, 4}, {300, 70}};
  Tensors all;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Tensor angles =
        torch::arange(c10::multiply_integers(shapes[i]), torch::kDouble) * 0.7 + static_cast<double>(i);
    all.push_back(with_gradient((torch::cos(angles) * static_cast<double>(i + 1)).view(shapes[i]).to(dtype)));
  }
  return all;
}
std::vector<double> elements_of(double norm, const Tensors& parameters) {
  std::vector<double> all{norm};
  for (const Tensor& parameter : parameters) {
    const Tensor flat = parameter.grad().flatten().to(torch::kDouble);
    all.insert(all.end(), flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
  }
  return all;
}

TEST(ClipGrad, NumbersAreThoseOfPython) {
  at::set_num_threads(1);
  Comparison comparison;
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const std::string name = dtype == torch::kFloat ? "float32" : "float64";
    const double tolerance = dtype == torch::kFloat ? 1e-6 : 1e-12;
    for (const bool foreach : {false, true}) {
      const std::string end = foreach ? "True" : "False";
      for (const double type : {1.0, 2.0, 3.0, kInfinity})
        for (const double limit : {0.5, 1e9, 0.0}) {
          const Tensors parameters = parameters_of(dtype);
          const double norm = clip_grad_norm_(parameters, limit, {.norm_type = type, .foreach = foreach});
          EXPECT_GT(norm, 1);
          comparison.add(text(name, "|norm|", limit, "|", type, "|", end), elements_of(norm, parameters), tolerance);
        }
      for (const double limit : {0.5, 1e9, 0.0}) {
        const Tensors parameters = parameters_of(dtype);
        clip_grad_value_(parameters, limit, foreach);
        comparison.add(text(name, "|value|", limit, "|0|", end), elements_of(0, parameters), tolerance);
      }
    }
  }
  comparison.with("unit/clip_grad_reference.py");
}

TEST(ClipGrad, WithoutGradientsTheNormIsZero) {
  EXPECT_EQ(clip_grad_norm_(Tensors{}, 1), 0);
  const Tensor without = torch::ones({2}, torch::requires_grad());
  const Tensor empty = with_gradient(torch::zeros({0, 3}));
  for (const double type : {1.0, 2.0, kInfinity})
    EXPECT_EQ(clip_grad_norm_(Tensors{without, empty}, 1, {.norm_type = type}), 0);
  clip_grad_value_(Tensors{without, empty}, 1);
  EXPECT_FALSE(without.grad().defined());
  const Tensor one = with_gradient(torch::full({4}, 3.0));  // a tensor by itself is a list too
  EXPECT_EQ(clip_grad_norm_(one, 1), 6);
  EXPECT_NEAR(one.grad().norm().item<double>(), 1, 1e-6);
}

// Module::parameters() has it twice.
TEST(ClipGrad, ASharedParameterCountsOnce) {
  struct Tied : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 3)),
                      again = register_module("again", first);
  } net;
  const auto parameters = net.parameters();
  ASSERT_EQ(parameters.size(), 4u);
  for (const torch::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
  EXPECT_NEAR(clip_grad_norm_(parameters, 1), std::sqrt(12.0), 1e-6);
  EXPECT_NEAR(clip_grad_norm_(parameters, 1), 1, 1e-5);
}

TEST(ClipGrad, DtypesMayDiffer) {
  for (const bool foreach : {false, true}) {
    const Tensor a = with_gradient(torch::full({300}, 300, torch::kHalf)),  // float16 cannot hold the sum of squares
        b = with_gradient(torch::full({2}, 1e3, torch::kDouble)),
                 c = with_gradient(torch::full({3}, 2, torch::kBFloat16));
    const double norm = clip_grad_norm_(Tensors{a, b, c}, 10, {.foreach = foreach});
    EXPECT_NEAR(norm, std::sqrt(300 * 9e4 + 2e6 + 12), 1e-3);
    EXPECT_NEAR(b.grad()[0].item<double>(), 1e3 * 10 / norm, 1e-6);
    EXPECT_NEAR(a.grad()[0].item<double>(), 3e3 / norm, 1e-3);
    EXPECT_EQ(a.grad().scalar_type(), torch::kHalf);
  }
}

TEST(ClipGrad, ANormThatIsNotFinite) {
  for (const bool foreach : {false, true})
    for (const double type : {1.0, 2.0, kInfinity})
      for (const double bad : {kInfinity, kNaN}) {
        SCOPED_TRACE(testing::Message() << foreach << ' ' << type << ' ' << bad);
        const Tensor a = with_gradient(torch::tensor({1.0, bad})), b = with_gradient(torch::tensor({2.0}));
        expect_refusal({"clip_grad_norm_: the norm of the gradients", "expected a finite number"}, [&] {
          clip_grad_norm_(Tensors{a, b}, 1, {.norm_type = type, .error_if_nonfinite = true, .foreach = foreach});
        });
        EXPECT_EQ(b.grad().item<double>(), 2);
        EXPECT_EQ(a.grad()[0].item<double>(), 1);
        const double norm = clip_grad_norm_(Tensors{a, b}, 1, {.norm_type = type, .foreach = foreach});
        EXPECT_EQ(std::isnan(norm), std::isnan(bad));
        EXPECT_TRUE(a.grad()[1].isnan().item<bool>());  // infinity times 0, too
        if (std::isnan(bad))
          EXPECT_TRUE(b.grad().isnan().item<bool>());
        else
          EXPECT_EQ(b.grad().item<double>(), 0);
      }
  const Tensor values = with_gradient(torch::tensor({kNaN, kInfinity, -5.0}));
  clip_grad_value_(values, 2);
  EXPECT_TRUE(values.grad()[0].isnan().item<bool>());
  EXPECT_EQ(values.grad()[1].item<double>(), 2);
  EXPECT_EQ(values.grad()[2].item<double>(), -2);
}

TEST(ClipGrad, ChecksItsArgumentsBeforeAnythingChanges) {
  const Tensor a = with_gradient(torch::full({2}, 5.0));
  for (const double wrong : {-1.0, kNaN}) {
    expect_refusal({"clip_grad_norm_: max_norm: expected 0 or more, got"}, [&] { clip_grad_norm_(a, wrong); });
    expect_refusal({"norm_type: expected 1, 2, …"}, [&] { clip_grad_norm_(a, 1, {.norm_type = wrong}); });
    expect_refusal({"clip_grad_value_: clip_value: expected 0 or more"}, [&] { clip_grad_value_(a, wrong); });
  }
  expect_refusal({"norm_type", "got 0"}, [&] { clip_grad_norm_(a, 1, {.norm_type = 0}); });
  expect_refusal({"copies: expected 1 or more, got 0"}, [&] { clip_grad_norm_(a, 1, {.copies = 0}); });
  const Tensor sparse = with_gradient(torch::ones({3, 2}));
  sparse.mutable_grad() = torch::ones({3, 2}).to_sparse();
  expect_refusal(
      {"clip_grad_norm_: gradient: expected dense floating-point numbers, got Float of layout Sparse and shape [3, 2]"},
      [&] {
        clip_grad_norm_(Tensors{a, sparse}, 1);
      });
  expect_refusal({"clip_grad_value_: gradient: expected dense floating-point numbers"}, [&] {
    clip_grad_value_(Tensors{a, sparse}, 1);
  });
  EXPECT_TRUE(at::equal(a.grad(), torch::full({2}, 5.0)));
}

TEST(ClipGrad, ADefectOfOneRankIsAnErrorOnAll) {
  on_ranks(2, [](World& world) {
    const Tensor a = with_gradient(torch::ones({3, 2}));
    if (world.rank() == 1) a.mutable_grad() = torch::ones({3, 2}).to_sparse();
    expect_refusal({world.rank() == 1 ? "layout Sparse" : "another rank's gradient is not dense"},
                   [&] { clip_grad_norm_(a, 1, {.sharded_over = world.group()}); });
    const Tensor b = with_gradient(torch::full({1}, world.rank() == 1 ? kNaN : 1.0));
    for (const double type : {2.0, kInfinity})
      expect_refusal({"got nan"}, [&] {
        clip_grad_norm_(b, 1, {.norm_type = type, .error_if_nonfinite = true, .sharded_over = world.group()});
      });
  });
}

// Each rank has a part of the batch; the loss is the mean over all.
TEST(ClipGrad, OneProcessDdpAndFsdpHaveTheSameNorm) {
  constexpr double kLimit = 1e-2;
  on_hosts(kTwoEach, [&](World& world) {
    const auto input = [](int rank) { return fsdp_input(rank, 2); };
    for (const double type : {1.0, 2.0, kInfinity}) {
      SCOPED_TRACE(testing::Message() << "norm of type " << type);
      const auto alone = make<FsdpNet>(7, {});
      for (int rank = 0; rank < world.world_size(); ++rank)
        (alone->forward(input(rank)).square().sum() / world.world_size()).backward();
      const double norm = clip_grad_norm_(alone->parameters(), kLimit, {.norm_type = type});
      EXPECT_GT(norm, 10 * kLimit);
      const auto expect_as_alone = [&](const char* what, double got, const nn::Module& net) {
        EXPECT_NEAR(got, norm, 1e-5 * norm) << what;
        const auto expected = alone->named_parameters();
        for (const auto& item : net.named_parameters())
          if (const Tensor& gradient = item.value().grad(); gradient.defined()) {
            const Tensor& other = expected[item.key()].grad();
            EXPECT_LE((gradient - other).norm().item<double>(), 1e-5 * other.norm().item<double>())
                << what << ": " << item.key();
          }
      };
      {
        const auto net = make<FsdpNet>(7, {});
        DistributedDataParallel ddp(net);
        ddp(input(world.rank())).square().sum().backward();
        expect_as_alone("DDP", clip_grad_norm_(net->parameters(), kLimit, {.norm_type = type}), *net);
      }
      for (const FsdpOptions& options : {FsdpOptions{}, full()}) {
        const auto net = make<FsdpNet>(7, {});
        auto model = fully_shard(net, options);
        model(input(world.rank())).square().sum().backward();
        expect_as_alone("FSDP", model.clip_grad_norm_(kLimit, type), *net);
        model.synchronize();
      }
      // Every rank has a part of a vector, which is what the option is for.
      const Tensor mine = with_gradient(torch::full({world.rank()}, 2.0));  // 0 to 3 elements
      const double whole = clip_grad_norm_(mine, kLimit, {.norm_type = type, .sharded_over = world.group()});
      EXPECT_NEAR(whole, type == 1 ? 12 : type == 2 ? std::sqrt(24.0) : 2, 1e-6);
      EXPECT_NEAR(mine.grad().abs().sum().item<double>(), 2 * kLimit / whole * world.rank(), 1e-6);
    }
  });
}

}  // namespace
}  // namespace muster::test::clipping
