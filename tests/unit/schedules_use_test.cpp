// Schedules go to any epoch, resume, and count whatever the user counts.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/data/sampler.h"
#include "muster/optim/functional_optimizer.h"
#include "support/archived.h"
#include "support/ranks.h"
#include "unit/schedule_cases.h"

namespace muster::test {
namespace {

using namespace schedules;

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

// A schedule that counts the samples of all ranks has the same rates for any number of ranks and any size of a batch.
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
    for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(rates[i], expected[i]) << cases[i].python;
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
  // Someone has changed the rate: before the last step, or after it.
  for (const auto& make : {maker<LinearLR>(0.1, 1.0, 30), maker<CosineAnnealingLR>(300, 0.001), maker<SWALR>(0.02, 10)})
    for (const int changed_at : {39, 40}) {
      const auto optimizer = of_muster("SGD"), other = of_muster("SGD");
      const Schedule whole = make(*optimizer), second = make(*other);
      for (int step = 1; step <= 40; ++step) {
        whole->step();
        if (step == 15 || step == changed_at)
          for (auto& group : optimizer->param_groups()) group.options().set_lr(group.options().get_lr() / 2);
      }
      load(*second, saved(*whole));
      for (int step = 0; step < 20; ++step) {
        EXPECT_EQ(rates_now(*other), rates_now(*optimizer));
        whole->step();
        second->step();
      }
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
  EXPECT_CONTAINS(refusal([&] { LRScheduler(o, std::function<double(double, int64_t)>()); }), "needs a function");
  EXPECT_CONTAINS(refusal([&] { PolynomialLR(o, 0); }), "total_iters");
  EXPECT_CONTAINS(refusal([&] { ConstantLR(o, 2); }), "factor");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 0.1}); }), "total_steps");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.total_steps = 5}); }), "max_lr");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lrs = {1, 2, 3}, .total_steps = 5}); }), "2 groups, got 3");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 1, .total_steps = 10, .pct_start = 0.1}); }), "has none");
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(o, {.max_lr = 1, .total_steps = 10, .pct_start = 1}); }), "has none");
  EXPECT_CONTAINS(refusal([&] { ReduceLROnPlateau(o, {.factor = 1}); }), "factor");
  EXPECT_CONTAINS(refusal([&] { ReduceLROnPlateau(o, {.min_lrs = {0.1}}); }),
                  "expected one for each of 2 groups, got 1");
  EXPECT_CONTAINS(refusal([&] { CyclicLR(o, {.max_lr = 1, .base_lrs = {0.1}}); }), "2 groups, got 1 and 2");
  EXPECT_CONTAINS(refusal([&] { rates::cyclic({.max_lrs = {0.1, 0.2}}); }), "of all groups");
  EXPECT_CONTAINS(refusal([&] { rates::one_cycle({.max_lrs = {0.1, 0.2}, .total_steps = 5}); }), "of all groups");
  EXPECT_CONTAINS(refusal([&] { SWALR(o, {0.1, 0.2, 0.3}); }), "2 groups, got 3");
  EXPECT_CONTAINS(refusal([&] { SequentialLR(o, {rates::exponential(1)}, {5}); }), "milestone");
  EXPECT_CONTAINS(refusal([&] { ChainedScheduler(o, {}); }), "at least one");
  {  // A step that is refused is refused again, and a function that throws once is called again.
    ChainedScheduler chain(
        o, {rates::sequential({rates::exponential(0.5), rates::one_cycle({.max_lr = 0.1, .total_steps = 5})}, {3}),
            rates::exponential(0.9)});
    chain.step(8);
    for (int again = 0; again < 2; ++again)
      EXPECT_CONTAINS(refusal([&] { chain.step(); }), "OneCycleLR: expected at most 5 steps");
    EXPECT_EQ(chain.last_epoch(), 8);
    bool throws = true;
    MultiplicativeLR product(o, std::function<double(int64_t)>([&](int64_t epoch) {
                               if (epoch == 2 && std::exchange(throws, false)) throw std::runtime_error("once");
                               return 0.5;
                             }));
    const double first = product.last_lr();
    product.step();
    EXPECT_THROW(product.step(), std::runtime_error);
    product.step();
    EXPECT_EQ(product.last_lr(), first / 4);
  }
  // An optimizer that takes no rate below 0 refuses those of a function, and one that is not a number.
  optim::SGD functional({.lr = 0.1});
  for (const double bad : {-1.0, std::nan("")})
    EXPECT_THROW(LRScheduler(functional, [bad](double, int64_t) { return bad; }), InvalidArgument);
  OneCycleLR short_one(o, {.max_lr = 0.1, .total_steps = 5});
  short_one.step(5);
  EXPECT_CONTAINS(refusal([&] { short_one.step(); }), "OneCycleLR: expected at most 5 steps, got 6");
  EXPECT_EQ(short_one.last_epoch(), 5);
  EXPECT_CONTAINS(refusal([&] { short_one.step(-1); }), "expected 0 or more, got -1");
  muster::Adagrad without({at::zeros({1}).requires_grad_()});
  EXPECT_CONTAINS(refusal([&] { OneCycleLR(without, {.max_lr = 0.1, .total_steps = 5}); }),
                  "neither momentum nor betas");
  EXPECT_EQ(without.options().lr, 0.01);
  OneCycleLR(without, {.max_lr = 0.1, .total_steps = 5, .cycle_momentum = false});
  StepLR of_one(without, 3);
  EXPECT_CONTAINS(refusal([&] { load(of_one, saved(short_one)); }), "expected 1 groups, as this one has, got 2");
  torch::serialize::OutputArchive empty;
  EXPECT_THROW(load(of_one, bytes_of(empty)), CorruptError);
  without.add_param_group(t::OptimizerParamGroup({at::zeros({1}).requires_grad_()}));
  EXPECT_CONTAINS(refusal([&] { of_one.step(); }),
                  "the optimizer: expected 1 groups, as when its schedule was made, got 2");
}

}  // namespace
}  // namespace muster::test
