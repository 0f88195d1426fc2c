// The communication hooks that are made already, equal to PyTorch's on the same numbers, with their states in
// snapshots; and ModelAverager.
#include <torch/serialize.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <sstream>

#include "multiprocess/comm_hook_fixture.h"

namespace muster::test::hook_tests {
namespace {

namespace fs = std::filesystem;

void expect_equal_on_all_ranks(const std::vector<Tensor>& tensors, const World& world) {
  for (const Tensor& tensor : tensors) {
    Tensor first = tensor.clone();
    broadcast(first, 0);
    EXPECT_TRUE(torch::equal(first, tensor)) << world.rank();
  }
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

struct Question {
  std::string hook;  // as comm_hooks_peer.py calls it
  int rank, start;
  bool feedback, warm;
  std::string dtype;
  double tolerance;
};

// A question about an averager ("periodic", "hierarchical") needs a hook that leaves gradients as they are.
CommHook hook_of(const Question& question, World& world) {
  const hooks::PowerSgd power({.matrix_approximation_rank = std::max(question.rank, 1),
                               .start_iter = question.start,
                               .use_error_feedback = question.feedback,
                               .warm_start = question.warm,
                               .batched = question.hook == "batched_power"});
  const auto post_local = [&] {
    return hooks::PostLocalSgd({.start_local_sgd_iter = question.start, .subgroup = world.group().split(world.rank())});
  };
  const auto no_average = [&] {
    return hooks::PostLocalSgd({.start_local_sgd_iter = question.start, .post_local_gradient_all_reduce = false});
  };
  const std::map<std::string, std::function<CommHook()>> makers = {
      {"power", [&] { return power; }},
      {"batched_power", [&] { return power; }},
      {"bf16_power", [&] { return hooks::bf16_compress_wrapper(power); }},
      {"fp16_power", [&] { return hooks::fp16_compress_wrapper(power); }},
      {"fp16", [] { return hooks::fp16_compress; }},
      {"bf16", [] { return hooks::bf16_compress; }},
      {"fp16_average", [] { return hooks::fp16_compress_wrapper(hooks::all_reduce); }},
      {"bf16_average", [] { return hooks::bf16_compress_wrapper(hooks::all_reduce); }},
      {"quantize", [] { return hooks::quantize(); }},
      {"quantize_blocks", [&] { return hooks::quantize({.elements_per_scale = question.rank}); }},
      {"post_local", post_local},
      {"periodic", no_average},
      {"hierarchical", no_average},
  };
  return makers.at(question.hook)();
}

TEST(CommHook, EqualToPyTorchsOnTheSameNumbers) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch==2.13.0";
  const std::vector<Question> questions = {
      {"power", 1, 2, true, true, "float64", 1e-9},
      {"power", 2, 2, true, true, "float32", 2e-4},
      {"power", 3, 3, true, false, "float64", 1e-9},
      {"power", 2, 2, false, true, "float64", 1e-9},
      {"power", 4, 0, false, false, "float64", 1e-9},
      {"batched_power", 1, 2, true, true, "float64", 1e-9},
      {"batched_power", 2, 2, false, false, "float64", 1e-9},
      {"fp16", 0, 0, false, false, "float32", 0},
      {"bf16", 0, 0, false, false, "float32", 0},
      {"fp16_average", 0, 0, false, false, "float32", 0},
      {"bf16_average", 0, 0, false, false, "float32", 0},
      {"bf16_power", 1, 2, false, true, "float32", 0.1},
      {"fp16_power", 1, 2, false, true, "float32", 0.02},
      {"quantize", 0, 0, false, false, "float32", 0},
      {"quantize_blocks", 100, 0, false, false, "float32", 0},
      {"post_local", 0, 2, false, false, "float64", 1e-14},
      {"periodic", 0, 3, false, false, "float64", 1e-13},
      {"hierarchical", 0, 2, false, false, "float64", 1e-13},
  };
  constexpr int kSteps = 7;
  Comparison comparison;
  for (const Question& q : questions)
    for (const int ranks : {1, 2}) {
      const bool averages_models = q.hook == "periodic" || q.hook == "hierarchical";
      if (ranks == 1 && averages_models) continue;
      std::vector<double> ours;
      on_ranks(ranks, [&](World& world) {
        // One bucket is a square without padding, whose error PyTorch's hook keeps, too.
        auto shapes = kShapes;
        if (q.hook == "batched_power") shapes.push_back({1});
        if (q.hook == "quantize_blocks") shapes = {{16, 20}, {32}, {9, 4, 8}, {16, 8}};
        const auto net = std::make_shared<HookNet>(shapes, q.dtype == "float64" ? torch::kDouble : torch::kFloat);
        HookDdp ddp(net, hook_of(q, world));
        ModelAveragerOptions averaging{.periods = {{3, {}}}, .warmup_steps = q.start};
        if (q.hook == "hierarchical") averaging.periods = {{2, world.group().split(world.rank())}, {4, {}}};
        PostLocalSgdOptimizer<torch::optim::SGD> optimizer(ddp->parameters(),
                                                           torch::optim::SGDOptions(0.1).momentum(0.9), averaging);
        std::vector<double> numbers;
        for (int step = 0; step < kSteps; ++step) {
          auto of_step = flat_numbers(step_of(ddp, step, world));
          if (averages_models) {
            optimizer.step();
            of_step = flat_numbers(ddp->parameters());
          }
          // PyTorch's first bucket has the parameters in another order.
          if (q.hook != "quantize_blocks" || step > 0) numbers.insert(numbers.end(), of_step.begin(), of_step.end());
        }
        if (world.rank() == 0) ours = numbers;
      });
      comparison.add(
          text(ranks, ' ', q.hook, ' ', q.rank, ' ', kSteps, ' ', q.start, ' ', q.feedback, ' ', q.warm, ' ', q.dtype),
          ours, q.tolerance);
    }
  comparison.with("multiprocess/comm_hooks_peer.py");
}

// Half a level apart at most, of the ranks' average; zeros stay zeros; what is not finite stays so.
TEST(CommHook, EightBitsTravel) {
  expect_refusal({"QuantizeOptions::elements_per_scale: expected 0 or more, got -1"},
                 [] { hooks::quantize({.elements_per_scale = -1}); });
  for (const int ranks : {1, 3})
    on_ranks(ranks, [&](World& world) {
      auto plain = ddp_with(nullptr);
      const auto exact = step_of(plain, 1, world);
      double far_before = 1;
      for (const int64_t each : {int64_t{0}, INT64_MAX, int64_t{64}, int64_t{7}, int64_t{1}}) {
        SCOPED_TRACE(text(ranks, " ranks, ", each, " elements per scale"));
        auto ddp = ddp_with(hooks::quantize({.elements_per_scale = each}));
        const auto got = step_of(ddp, 1, world);
        expect_equal_on_all_ranks(got, world);
        double far = 0;
        for (size_t i = 0; i < got.size(); ++i) far = std::max(far, (got[i] - exact[i]).abs().max().item<double>());
        EXPECT_LE(far, 2.5 / 255 + 1e-6);  // gradients are up to 1.25 times 2, on both sides of zero
        EXPECT_LE(far, far_before);
        far_before = far;
        ddp->zero_grad();
        (ddp.forward(0, world.rank(), ranks) * 0).backward();
        for (const Tensor& parameter : ddp->p) EXPECT_EQ(parameter.grad().abs().max().item<float>(), 0);
        for (const double odd : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()}) {
          ddp->zero_grad();
          (ddp.forward(0, world.rank(), ranks) + ddp->p[1][2] * (world.rank() == 0 ? odd : 0)).backward();
          EXPECT_FALSE(ddp->p[1].grad().isfinite().all().item<bool>());
        }
        step_of(ddp, 1, world);
      }
      EXPECT_LT(far_before, 1e-6);
    });
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
TEST(CommHook, StatesAfterInfiniteGradients) {
  on_ranks(2, [](World& world) {
    const std::vector<std::function<CommHook()>> made = {
        [] { return hooks::PowerSgd({.matrix_approximation_rank = 1, .start_iter = 0}); },
        [] { return hooks::PowerSgd({.matrix_approximation_rank = 3, .start_iter = 0}); },
        [] { return hooks::TopK({.ratio = 0.05, .start_iter = 0}); },
    };
    for (const auto& hook : made) {
      auto ddp = ddp_with(hook()), other = ddp_with(hook());
      step_of(ddp, 0, world);
      step_of(other, 0, world);
      for (const Tensor& parameter : ddp->p) parameter.mutable_grad() = Tensor();
      const double scale = world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
      (ddp.forward(1, world.rank(), 2) * scale).backward();
      EXPECT_TRUE(std::any_of(ddp->p.begin(), ddp->p.end(),
                              [](const Tensor& parameter) { return !parameter.grad().isfinite().all().item<bool>(); }));
      const auto got = step_of(ddp, 2, world), expected = step_of(other, 2, world);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-3, 1e-4)) << i;
    }

    // In the first step, before there is a state, which can be saved all the same.
    const hooks::TopK top({.ratio = 0.05, .start_iter = 0});
    auto ddp = ddp_with(top), plain = ddp_with(hooks::TopK({.ratio = 0.05, .start_iter = 0}));
    (ddp.forward(0, world.rank(), 2) * std::numeric_limits<double>::infinity()).backward();
    std::stringstream bytes;
    torch::serialize::OutputArchive archive;
    top.save(archive);
    archive.save_to(bytes);
    EXPECT_FALSE(bytes.str().empty());
    expect_same(step_of(ddp, 1, world), step_of(plain, 1, world));
  });
}

TEST(CommHook, AParameterWithoutElements) {
  on_ranks(2, [](World& world) {
    const std::vector<CommHook> all = {hooks::all_reduce,
                                       hooks::bf16_compress,
                                       hooks::fp16_compress,
                                       hooks::TopK({.ratio = 0.1, .start_iter = 0}),
                                       hooks::PowerSgd({.start_iter = 0}),
                                       hooks::bf16_compress_wrapper(hooks::PowerSgd({.start_iter = 0}))};
    for (size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      const auto net = std::make_shared<HookNet>(std::vector<Shape>{{0, 5}, {600, 600}});  // the second is large
      HookDdp ddp(net, all[i]);
      for (int step = 0; step < 2; ++step) {
        const auto got = step_of(ddp, step, world);
        EXPECT_EQ(got[0].sizes(), (Shape{0, 5}));
        EXPECT_TRUE(got[1].isfinite().all().item<bool>());
      }
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

// In 16 bits the sum of four such gradients is beyond the largest number, and their average is not.
TEST(CommHook, TopKAveragesWhereASumWouldOverflow) {
  on_ranks(4, [](World& world) {
    const auto net = std::make_shared<nn::LinearImpl>(nn::LinearOptions(4, 1).bias(false));
    DistributedDataParallel ddp(net);
    ddp.register_comm_hook(hooks::fp16_compress_wrapper(hooks::TopK({.ratio = 1, .start_iter = 0})));
    ddp(torch::full({1, 4}, 30'000.0 + world.rank())).sum().backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({1, 4}, 30'000.0), 1e-3, 0)) << net->weight.grad();
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
    expect_refusal({"a period of ModelAverager: expected 1 or more, got 0"}, [] {
      ModelAverager({.periods = {{0, {}}}});
    });
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
}  // namespace muster::test::hook_tests
