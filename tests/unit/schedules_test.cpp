// Schedules of optimizers with groups are those of Python.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "support/ask_python.h"
#include "support/ranks.h"
#include "unit/schedule_cases.h"

namespace muster::test {
namespace {

using namespace schedules;

double metric(int step) {
  return 1.0 / (1 + step / 40) + 0.001 * std::sin(step);
}  // schedules_reference.py has the same

constexpr int kSteps = 1000;

// Schedules of one optimizer that are stepped one after another, or one for some time and then another.
struct Stepped {
  std::string python;
  std::function<std::function<void(int step)>(Optimizer&)> make;
};
std::vector<Stepped> stepped_cases() {
  const auto inverse = [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); };
  const auto both = [](auto make_first, auto make_second) {
    return [=](Optimizer& optimizer) -> std::function<void(int)> {
      return [first = Schedule(make_first(optimizer)), second = Schedule(make_second(optimizer))](int) {
        first->step();
        second->step();
      };
    };
  };
  const auto turns = [](int steps, auto make_first, auto make_second) {
    return [=](Optimizer& optimizer) -> std::function<void(int)> {
      return [=, first = Schedule(make_first(optimizer)), second = Schedule(make_second(optimizer))](int step) {
        (step < steps ? first : second)->step();
      };
    };
  };
  const auto before_plateau = [](auto make_first) {
    return [=](Optimizer& optimizer) -> std::function<void(int)> {
      return [first = Schedule(make_first(optimizer)),
              plateau = std::make_shared<ReduceLROnPlateau>(
                  optimizer, ReduceLROnPlateauOptions{.factor = 0.7, .patience = 5})](int step) {
        first->step();
        plateau->step(metric(step));
      };
    };
  };
  return {
      {"Together(LinearLR(optimizer, 0.25, total_iters=30), ExponentialLR(optimizer, 0.99))",
       both(maker<LinearLR>(0.25, 1.0, 30), maker<ExponentialLR>(0.99))},
      {"Together(CosineAnnealingWarmRestarts(optimizer, 50), ExponentialLR(optimizer, 0.1))",
       both(maker<CosineAnnealingWarmRestarts>(50), maker<ExponentialLR>(0.1))},
      {"Together(StepLR(optimizer, 40, gamma=0.5), CosineAnnealingLR(optimizer, 90, eta_min=0.001))",
       both(maker<StepLR>(40, 0.5), maker<CosineAnnealingLR>(90, 0.001))},
      {"Together(LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), PolynomialLR(optimizer, 500, power=2))",
       both(maker<LambdaLR>(inverse), maker<PolynomialLR>(500, 2.0))},
      {"Together(LinearLR(optimizer, 0.1, total_iters=30), Plateau(optimizer, factor=0.7, patience=5))",
       before_plateau(maker<LinearLR>(0.1, 1.0, 30))},
      {"Together(PolynomialLR(optimizer, 200), Plateau(optimizer, factor=0.7, patience=5))",
       before_plateau(maker<PolynomialLR>(200))},
      {"Turns(160, MultiplicativeLR(optimizer, lambda epoch: 1 - 1 / (2 + epoch)), SWALR(optimizer, 0.05))",
       turns(160, maker<MultiplicativeLR>([](int64_t epoch) { return 1 - 1 / (2.0 + static_cast<double>(epoch)); }),
             maker<SWALR>(0.05))},
      {"Turns(300, CosineAnnealingLR(optimizer, 400), SWALR(optimizer, 0.02, anneal_epochs=50, "
       "anneal_strategy='linear'))",
       turns(300, maker<CosineAnnealingLR>(400), maker<SWALR>(0.02, 50, false))},
      {"Turns(300, SWALR(optimizer, 0.02, anneal_epochs=50), ExponentialLR(optimizer, 0.995))",
       turns(300, maker<SWALR>(0.02, 50), maker<ExponentialLR>(0.995))},
  };
}

TEST(Schedules, EqualPythonOverAThousandSteps) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch";
  std::vector<std::string> lines;
  std::vector<std::vector<double>> ours;
  const auto note = [](Optimizer& optimizer, std::vector<double>& numbers) {
    for (const double rate : rates_now(optimizer)) numbers.push_back(rate);
    numbers.push_back(momentum_of(optimizer));
  };
  for (const ScheduleCase& one : schedule_cases())
    for (const std::string kind : {"SGD", "AdamW"})
      for (const auto make : {of_muster, of_libtorch}) {
        const auto optimizer = make(kind);
        const Schedule schedule = one.make(*optimizer);
        auto& numbers = ours.emplace_back();
        note(*optimizer, numbers);
        for (int step = 0; step < kSteps; ++step) {
          schedule->step();
          note(*optimizer, numbers);
        }
        EXPECT_EQ(schedule->last_lrs(), rates_now(*optimizer));
        lines.push_back(kind + "|" + one.python);
      }
  for (const Stepped& one : stepped_cases())
    for (const auto make : {of_muster, of_libtorch}) {
      const auto optimizer = make("SGD");
      const auto step = one.make(*optimizer);
      auto& numbers = ours.emplace_back();
      note(*optimizer, numbers);
      for (int at = 0; at < kSteps; ++at) {
        step(at);
        note(*optimizer, numbers);
      }
      lines.push_back("SGD|" + one.python);
    }
  const auto plateau = [&](const std::string& python, const ReduceLROnPlateauOptions& options, double sign) {
    const auto optimizer = of_muster("SGD");
    ReduceLROnPlateau schedule(*optimizer, options);
    auto& numbers = ours.emplace_back();
    note(*optimizer, numbers);
    for (int step = 0; step < kSteps; ++step) {
      schedule.step(sign * metric(step));
      note(*optimizer, numbers);
    }
    lines.push_back("SGD|" + python);
  };
  plateau("ReduceLROnPlateau(optimizer)", {}, 1);
  plateau(
      "ReduceLROnPlateau(optimizer, factor=0.7, patience=3, threshold=0.01, threshold_mode='abs', cooldown=5, "
      "min_lr=1e-3)",
      {.factor = 0.7, .patience = 3, .threshold = 0.01, .relative = false, .cooldown = 5, .min_lr = 1e-3}, 1);
  plateau("ReduceLROnPlateau(optimizer, mode='max', factor=0.9, patience=20)",
          {.maximize = true, .factor = 0.9, .patience = 20}, 1);
  plateau("ReduceLROnPlateau(optimizer, factor=0.5, patience=2, min_lr=[1e-3, 1e-2])",
          {.factor = 0.5, .patience = 2, .min_lrs = {1e-3, 1e-2}}, 1);
  const auto theirs = ask_python("unit/schedules_reference.py", lines);
  ASSERT_EQ(theirs.size(), lines.size());
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_LE(farthest(ours[i], theirs[i]), 1e-12) << lines[i];
}

// A warm-up before a OneCycleLR, which begins with its own epoch 0.
TEST(Schedules, AOneCycleInASequence) {
  const OneCycleLROptions options{.max_lr = 0.4, .total_steps = 100, .cycle_momentum = false};
  const auto optimizer = of_muster("SGD"), other = of_muster("SGD");
  SequentialLR sequence(*optimizer, {rates::linear(0.1, 1, 10), rates::one_cycle(options)}, {10});
  OneCycleLR alone(*other, options);
  for (int epoch = 10; epoch < 110; ++epoch) {
    sequence.step(epoch);
    EXPECT_EQ(rates_now(*optimizer), rates_now(*other)) << epoch;
    alone.step();
  }
}

// After its last step a training loop calls step() once more. The rate is then below 0, as Python's is, and everything
// else works: the optimizer's state, its steps, and a DistributedOptimizer's schedule.
TEST(Schedules, AfterItsLastStepALinearOneCycleIsBelowZero) {
  const at::Tensor parameter = at::ones({1}).requires_grad_();
  muster::SGD sgd({parameter}, {.lr = 0.1});
  const OneCycleLROptions options{.max_lr = 0.4, .total_steps = 100, .cosine = false, .cycle_momentum = false};
  OneCycleLR schedule(sgd, options);
  for (int step = 0; step < 99; ++step) schedule.step();
  EXPECT_GT(sgd.options().lr, 0);
  schedule.step();
  EXPECT_LT(sgd.options().lr, 0);
  EXPECT_EQ(sgd.state_dict().at("param_groups.0.lr").item<double>(), schedule.last_lr());
  muster::SGD other_sgd({at::ones({1}).requires_grad_()}, {.lr = 0.1});
  other_sgd.load_state_dict(sgd.state_dict());
  EXPECT_EQ(other_sgd.options().lr, schedule.last_lr());
  parameter.mutable_grad() = at::ones({1});
  sgd.step();
  EXPECT_GT(parameter.item<double>(), 1);

  optim::SGD functional({.lr = 0.1});
  OneCycleLR of_functional(functional, options);
  of_functional.step(100);
  EXPECT_EQ(functional.lr(), 0);

  // A step that is refused changes nothing.
  sgd.options().momentum = 0.9;
  OneCycleLR other(sgd, {.max_lr = 0.4, .total_steps = 100});
  sgd.add_param_group(torch::optim::OptimizerParamGroup({at::ones({1}).requires_grad_()}));
  const double momentum = sgd.options().momentum, lr = sgd.options().lr;
  EXPECT_THROW(other.step(), InvalidArgument);
  EXPECT_EQ(sgd.options().momentum, momentum);
  EXPECT_EQ(sgd.options().lr, lr);
  EXPECT_EQ(other.last_epoch(), 0);
}

}  // namespace
}  // namespace muster::test
