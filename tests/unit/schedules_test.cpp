// Schedules of optimizers with groups are those of Python; they resume, and count whatever the user counts.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/data/sampler.h"
#include "muster/optim/lr_scheduler.h"
#include "muster/optim/optimizers.h"
#include "support/archived.h"
#include "support/ask_python.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

namespace t = torch::optim;
using namespace optim;  // the schedules
using Optimizer = t::Optimizer;

double metric(int step) {
  return 1.0 / (1 + step / 40) + 0.001 * std::sin(step);
}  // schedules_reference.py has the same

constexpr int kSteps = 1000;

template <typename O, typename Options>
std::unique_ptr<Optimizer> two_groups(const std::function<Options(double lr)>& options) {
  std::vector<t::OptimizerParamGroup> groups;
  for (const double lr : {0.1, 0.02})
    groups.emplace_back(std::vector<at::Tensor>{at::zeros({1}).requires_grad_()},
                        std::make_unique<Options>(options(lr)));
  return std::make_unique<O>(groups);
}
std::unique_ptr<Optimizer> of_muster(const std::string& kind) {
  if (kind == "SGD")
    return two_groups<muster::SGD, ParamGroupOptions<SGDOptions>>(
        [](double lr) { return ParamGroupOptions<SGDOptions>({.lr = lr, .momentum = 0.9}); });
  return two_groups<muster::AdamW, ParamGroupOptions<AdamWOptions>>(
      [](double lr) { return ParamGroupOptions<AdamWOptions>({.lr = lr}); });
}
std::unique_ptr<Optimizer> of_libtorch(const std::string& kind) {
  if (kind == "SGD") {
    std::vector<t::OptimizerParamGroup> groups;
    for (const double lr : {0.1, 0.02})
      groups.emplace_back(std::vector<at::Tensor>{at::zeros({1}).requires_grad_()},
                          std::make_unique<t::SGDOptions>(t::SGDOptions(lr).momentum(0.9)));
    return std::make_unique<t::SGD>(groups, t::SGDOptions(0.1).momentum(0.9));
  }
  return two_groups<t::AdamW, t::AdamWOptions>([](double lr) { return t::AdamWOptions(lr); });
}
double momentum_of(Optimizer& optimizer) {
  auto& options = optimizer.param_groups()[0].options();
  if (auto* const of = dynamic_cast<t::SGDOptions*>(&options)) return of->momentum();
  if (auto* const of = dynamic_cast<t::AdamWOptions*>(&options)) return std::get<0>(of->betas());
  if (auto* const of = dynamic_cast<ParamGroupOptions<SGDOptions>*>(&options)) return of->values.momentum;
  return dynamic_cast<ParamGroupOptions<AdamWOptions>&>(options).values.betas.first;
}
std::vector<double> rates_now(Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

using Schedule = std::shared_ptr<LRScheduler>;
struct ScheduleCase {
  std::string python;
  std::function<Schedule(Optimizer&)> make;
};
template <typename S, typename... Arguments>
std::function<Schedule(Optimizer&)> maker(Arguments... arguments) {
  return [=](Optimizer& optimizer) { return std::make_shared<S>(optimizer, arguments...); };
}

std::vector<ScheduleCase> schedule_cases() {
  const auto shrink = [](int64_t epoch) { return 1 - 1 / (2.0 + static_cast<double>(epoch)); };
  using Rates = std::vector<LRScheduler::Rate>;
  return {
      {"StepLR(optimizer, 70, gamma=0.8)", maker<StepLR>(70, 0.8)},
      {"MultiStepLR(optimizer, [30, 200, 600], gamma=0.5)",
       maker<MultiStepLR>(std::vector<int64_t>{30, 200, 600}, 0.5)},
      {"ExponentialLR(optimizer, 0.997)", maker<ExponentialLR>(0.997)},
      {"LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))",
       maker<LambdaLR>([](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); })},
      {"MultiplicativeLR(optimizer, lambda epoch: 1 - 1 / (2 + epoch))", maker<MultiplicativeLR>(shrink)},
      {"CosineAnnealingLR(optimizer, 300, eta_min=0.001)", maker<CosineAnnealingLR>(300, 0.001)},
      {"CosineAnnealingWarmRestarts(optimizer, 50)", maker<CosineAnnealingWarmRestarts>(50)},
      {"CosineAnnealingWarmRestarts(optimizer, 30, 3, eta_min=0.002)",
       maker<CosineAnnealingWarmRestarts>(30, 3, 0.002)},
      {"ConstantLR(optimizer)", maker<ConstantLR>()},
      {"LinearLR(optimizer, 0.25, end_factor=0.5, total_iters=100)", maker<LinearLR>(0.25, 0.5, 100)},
      {"PolynomialLR(optimizer, 700, power=1.5)", maker<PolynomialLR>(700, 1.5)},
      {"SWALR(optimizer, 0.05)", maker<SWALR>(0.05)},
      {"SWALR(optimizer, 0.05, anneal_epochs=100, anneal_strategy='linear')", maker<SWALR>(0.05, 100, false)},
      {"SWALR(optimizer, 0.05, anneal_epochs=0)", maker<SWALR>(0.05, 0)},
      {"SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), CosineAnnealingLR(optimizer, 950)], [50])",
       maker<SequentialLR>(Rates{rates::linear(0.1, 1, 50), rates::cosine_annealing(950, 0)},
                           std::vector<int64_t>{50})},
      {"ChainedScheduler([ConstantLR(optimizer, 0.1, total_iters=20), ExponentialLR(optimizer, 0.99)], optimizer)",
       maker<ChainedScheduler>(Rates{rates::constant(0.1, 20), rates::exponential(0.99)})},
      {"OneCycleLR(optimizer, 0.4, total_steps=1000)",
       maker<OneCycleLR>(OneCycleLROptions{.max_lr = 0.4, .total_steps = 1000})},
      {"OneCycleLR(optimizer, [0.4, 0.1], total_steps=1001, pct_start=0.2, anneal_strategy='linear', "
       "base_momentum=0.7, "
       "max_momentum=0.9, div_factor=10, final_div_factor=100, three_phase=True)",
       maker<OneCycleLR>(OneCycleLROptions{.max_lrs = {0.4, 0.1},
                                           .total_steps = 1001,
                                           .pct_start = 0.2,
                                           .cosine = false,
                                           .base_momentum = 0.7,
                                           .max_momentum = 0.9,
                                           .div_factor = 10,
                                           .final_div_factor = 100,
                                           .three_phase = true})},
      {"OneCycleLR(optimizer, 0.4, total_steps=2000, cycle_momentum=False)",
       maker<OneCycleLR>(OneCycleLROptions{.max_lr = 0.4, .total_steps = 2000, .cycle_momentum = false})},
      {"CyclicLR(optimizer, 0.01, 0.1, step_size_up=60)",
       maker<CyclicLR>(CyclicLROptions{.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60})},
      {"CyclicLR(optimizer, 0.01, 0.1, step_size_up=60, step_size_down=40, mode='triangular2')",
       maker<CyclicLR>(CyclicLROptions{.base_lr = 0.01,
                                       .max_lr = 0.1,
                                       .step_size_up = 60,
                                       .step_size_down = 40,
                                       .mode = CyclicLROptions::Mode::kTriangular2})},
      {"CyclicLR(optimizer, [0.01, 0.02], [0.1, 0.3], step_size_up=60, scale_fn=lambda cycle: 1 / (1 + cycle))",
       maker<CyclicLR>(CyclicLROptions{.base_lrs = {0.01, 0.02},
                                       .max_lrs = {0.1, 0.3},
                                       .step_size_up = 60,
                                       .scale_fn = [](double cycle) { return 1 / (1 + cycle); }})},
      {"CyclicLR(optimizer, 0.01, 0.1, step_size_up=60, scale_fn=lambda step: 1 / (1 + step), "
       "scale_mode='iterations')",
       maker<CyclicLR>(CyclicLROptions{.base_lr = 0.01,
                                       .max_lr = 0.1,
                                       .step_size_up = 60,
                                       .scale_fn = [](double step) { return 1 / (1 + step); },
                                       .scale_by_step = true})},
      {"SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), "
       "CyclicLR(optimizer, 0.01, 0.1, step_size_up=60, cycle_momentum=False)], [50])",
       maker<SequentialLR>(
           Rates{rates::linear(0.1, 1, 50), rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60})},
           std::vector<int64_t>{50})},
      {"SequentialLR(optimizer, [CosineAnnealingLR(optimizer, 300), SWALR(optimizer, 0.02, anneal_epochs=40)], [200])",
       maker<SequentialLR>(Rates{rates::cosine_annealing(300, 0), rates::swa(0.02, 40, true)},
                           std::vector<int64_t>{200})},
      {"SequentialLR(optimizer, [ConstantLR(optimizer, 0.1, total_iters=1000), "
       "MultiplicativeLR(optimizer, lambda epoch: 1 - 1 / (2 + epoch))], [150])",
       maker<SequentialLR>(Rates{rates::constant(0.1, 1000), rates::multiplicative(shrink)},
                           std::vector<int64_t>{150})},
      {"LambdaLR(optimizer, [lambda epoch: 1 / (1 + epoch), lambda epoch: 0.9 ** epoch])",
       maker<LambdaLR>(std::vector<std::function<double(int64_t)>>{
           [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); },
           [](int64_t epoch) { return std::pow(0.9, static_cast<double>(epoch)); }})},
      {"MultiplicativeLR(optimizer, [lambda epoch: 1 - 1 / (2 + epoch), lambda epoch: 0.99])",
       maker<MultiplicativeLR>(std::vector<std::function<double(int64_t)>>{shrink, [](int64_t) { return 0.99; }})},
      {"SWALR(optimizer, [0.05, 0.01], anneal_epochs=30)", maker<SWALR>(std::vector<double>{0.05, 0.01}, 30)},
      {"CyclicLR(optimizer, 0.01, 0.1, step_size_up=60, mode='exp_range', gamma=0.999, cycle_momentum=False)",
       maker<CyclicLR>(CyclicLROptions{.base_lr = 0.01,
                                       .max_lr = 0.1,
                                       .step_size_up = 60,
                                       .mode = CyclicLROptions::Mode::kExpRange,
                                       .gamma = 0.999,
                                       .cycle_momentum = false})},
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
        for (int step = 0; step < kSteps; ++step) {
          schedule->step();
          note(*optimizer, numbers);
        }
        EXPECT_EQ(schedule->last_lrs(), rates_now(*optimizer));
        lines.push_back(kind + "|" + one.python);
      }
  const auto plateau = [&](const std::string& python, const ReduceLROnPlateauOptions& options, double sign) {
    const auto optimizer = of_muster("SGD");
    ReduceLROnPlateau schedule(*optimizer, options);
    auto& numbers = ours.emplace_back();
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

// After its last step a training loop calls step() once more. Python's rate is then below 0.
TEST(Schedules, ALinearOneCycleDoesNotFallBelowZero) {
  muster::SGD sgd({at::ones({1}).requires_grad_()}, {.lr = 0.1, .momentum = 0.9});
  OneCycleLR schedule(sgd, {.max_lr = 0.4, .total_steps = 100, .cosine = false});
  for (int step = 0; step < 99; ++step) schedule.step();
  EXPECT_GT(sgd.options().lr, 0);
  schedule.step();
  EXPECT_EQ(sgd.options().lr, 0);
  EXPECT_EQ(sgd.state_dict().at("param_groups.0.lr").item<double>(), 0);

  // A step that is refused changes nothing.
  OneCycleLR other(sgd, {.max_lr = 0.4, .total_steps = 100});
  sgd.add_param_group(torch::optim::OptimizerParamGroup({at::ones({1}).requires_grad_()}));
  const double momentum = sgd.options().momentum, lr = sgd.options().lr;
  EXPECT_THROW(other.step(), InvalidArgument);
  EXPECT_EQ(sgd.options().momentum, momentum);
  EXPECT_EQ(sgd.options().lr, lr);
  EXPECT_EQ(other.last_epoch(), 0);
}

TEST(Schedules, AnyEpochInAnyOrder) {
  for (const ScheduleCase& one : schedule_cases()) {
    const auto optimizer = of_muster("SGD"), other = of_muster("SGD");
    const Schedule in_order = one.make(*optimizer), jumps = one.make(*other);
    std::vector<std::vector<double>> rates{rates_now(*optimizer)};
    for (int step = 1; step < 200; ++step) {
      in_order->step();
      rates.push_back(rates_now(*optimizer));
    }
    for (const int64_t at : {150, 3, 199, 0, 77}) {
      jumps->step(at);
      EXPECT_EQ(rates_now(*other), rates[static_cast<size_t>(at)]) << one.python;
      EXPECT_EQ(jumps->last_epoch(), at);
    }
  }
}

// A schedule that counts the samples of all ranks has the same rates for any number of ranks and any size of a batch. A
// MultiplicativeLR multiplies at each call, so it does not count samples (lr_scheduler.h).
TEST(Schedules, CountedInSamplesTheyAreThoseOfAnyNumberOfRanks) {
  constexpr size_t kSamples = 960, kCommon = 32;
  const auto cases = schedule_cases();
  // By case, the rates after each multiple of kCommon samples.
  const auto rates_of = [&](int ranks, size_t batch) {
    std::vector<std::vector<std::vector<double>>> rates(cases.size());
    run_threads(ranks, [&](World& world) {
      for (size_t i = 0; i < cases.size(); ++i) {
        const auto optimizer = of_muster("SGD");
        const Schedule schedule = cases[i].make(*optimizer);
        DistributedSampler sampler(kSamples);
        int64_t samples = 0;
        while (const auto mine = sampler.next(batch)) {
          at::Tensor count = at::full({1}, static_cast<int64_t>(mine->size()), at::kLong);
          all_reduce(count);
          samples += count.item<int64_t>();
          schedule->step(samples);
          if (world.rank() == 0 && samples % kCommon == 0) rates[i].push_back(rates_now(*optimizer));
        }
      }
    });
    return rates;
  };
  const auto expected = rates_of(1, kCommon);
  EXPECT_EQ(expected[0].size(), kSamples / kCommon);
  for (const auto& [ranks, batch] : {std::pair(1, size_t{4}), {2, size_t{16}}, {4, size_t{2}}}) {
    const auto rates = rates_of(ranks, batch);
    for (size_t i = 0; i < cases.size(); ++i)
      EXPECT_TRUE(rates[i] == expected[i] || cases[i].python.find("MultiplicativeLR") != std::string::npos)
          << cases[i].python;
  }
}

// Into a schedule whose optimizer has been restored already, so that its first rate would be another.
TEST(Schedules, Resume) {
  for (const ScheduleCase& one : schedule_cases()) {
    const auto optimizer = of_muster("SGD"), other = of_muster("SGD");
    const Schedule whole = one.make(*optimizer);
    for (int step = 0; step < 120; ++step) whole->step();
    for (size_t i = 0; i < 2; ++i) other->param_groups()[i].options().set_lr(rates_now(*optimizer)[i]);
    const Schedule second = one.make(*other);
    load(*second, saved(*whole));
    EXPECT_EQ(rates_now(*other), rates_now(*optimizer)) << one.python;
    for (int step = 0; step < 20; ++step) {
      whole->step();
      second->step();
    }
    EXPECT_EQ(rates_now(*other), rates_now(*optimizer)) << one.python;
    EXPECT_EQ(momentum_of(*other), momentum_of(*optimizer)) << one.python;
  }
  const auto optimizer = of_muster("SGD"), other = of_muster("SGD");
  ReduceLROnPlateau first(*optimizer, {.patience = 2}), second(*other, {.patience = 2});
  for (int step = 0; step < 10; ++step) first.step(step);
  load(second, saved(first));
  for (size_t i = 0; i < 2; ++i) other->param_groups()[i].options().set_lr(rates_now(*optimizer)[i]);
  for (int step = 0; step < 4; ++step) {
    first.step(step);
    second.step(step);
    EXPECT_EQ(rates_now(*other), rates_now(*optimizer));
  }
  EXPECT_EQ(first.best(), 0);
}

TEST(Schedules, BadUseIsRefused) {
  const auto optimizer = of_muster("SGD");
  const auto refusal = [&](const auto& make) { return message_of<InvalidArgument>(make); };
  auto& o = *optimizer;
  EXPECT_CONTAINS(refusal([&] { StepLR(o, 0); }), "step_size");
  EXPECT_CONTAINS(refusal([&] { PolynomialLR(o, 0); }), "total_iters");
  EXPECT_CONTAINS(refusal([&] { ConstantLR(o, 2); }), "factor");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 0.1}); }), "total_steps");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.total_steps = 5}); }), "max_lr");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lrs = {1, 2, 3}, .total_steps = 5}); }), "rates for 3");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 1, .total_steps = 10, .pct_start = 0.1}); }), "has none");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 1, .total_steps = 10, .pct_start = 1}); }), "has none");
  EXPECT_CONTAINS(refusal([&] { ReduceLROnPlateau(o, {.factor = 1}); }), "factor");
  EXPECT_CONTAINS(refusal([&] { ReduceLROnPlateau(o, {.min_lrs = {0.1}}); }), "1 min_lrs for 2 groups");
  EXPECT_CONTAINS(refusal([&] { CyclicLR(o, {.max_lr = 1, .base_lrs = {0.1}}); }), "1 base_lrs and 2 max_lrs for 2");
  EXPECT_CONTAINS(refusal([&] { rates::cyclic({.max_lrs = {0.1, 0.2}}); }), "of all groups");
  EXPECT_CONTAINS(refusal([&] { rates::one_cycle({.max_lrs = {0.1, 0.2}, .total_steps = 5}); }), "of all groups");
  EXPECT_CONTAINS(refusal([&] { SWALR(o, {0.1, 0.2, 0.3}); }), "rates for 3");
  EXPECT_CONTAINS(refusal([&] { SequentialLR(o, {rates::exponential(1)}, {5}); }), "milestone");
  EXPECT_CONTAINS(refusal([&] { ChainedScheduler(o, {}); }), "at least one");
  OneCycleLR short_one(o, {.max_lr = 0.1, .total_steps = 5});
  short_one.step(5);
  EXPECT_CONTAINS(refusal([&] { short_one.step(); }), "step 6 of a OneCycleLR of 5 steps");
  EXPECT_EQ(short_one.last_epoch(), 5);
  EXPECT_CONTAINS(refusal([&] { short_one.step(-1); }), "at least 0");
  muster::Adagrad without({at::zeros({1}).requires_grad_()});
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(without, {.max_lr = 0.1, .total_steps = 5}); }),
                  "neither momentum nor betas");
  EXPECT_EQ(without.options().lr, 0.01);
  OneCycleLR(without, {.max_lr = 0.1, .total_steps = 5, .cycle_momentum = false});
  StepLR of_one(without, 3);
  EXPECT_CONTAINS(refusal([&] { load(of_one, saved(short_one)); }), "has 2 groups, and this one 1");
  torch::serialize::OutputArchive empty;
  EXPECT_THROW(load(of_one, bytes_of(empty)), CorruptError);
  without.add_param_group(t::OptimizerParamGroup({at::zeros({1}).requires_grad_()}));
  EXPECT_CONTAINS(refusal([&] { of_one.step(); }), "has 2 groups, and its schedule was made for 1");
}

}  // namespace
}  // namespace muster::test
