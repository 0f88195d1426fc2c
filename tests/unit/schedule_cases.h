// Optimizers with two groups, and the schedules that are compared with Python's.
#pragma once

#include <ATen/ops/zeros.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/optim/lr_scheduler.h"
#include "muster/optim/optimizers.h"

namespace muster::test::schedules {

namespace t = torch::optim;
using namespace optim;  // the schedules
using Optimizer = t::Optimizer;

template <typename O, typename Options>
std::unique_ptr<Optimizer> two_groups(const std::function<Options(double lr)>& options) {
  std::vector<t::OptimizerParamGroup> groups;
  for (const double lr : {0.1, 0.02})
    groups.emplace_back(std::vector<at::Tensor>{at::zeros({1}).requires_grad_()},
                        std::make_unique<Options>(options(lr)));
  return std::make_unique<O>(groups);
}
inline std::unique_ptr<Optimizer> of_muster(const std::string& kind) {
  if (kind == "SGD")
    return two_groups<muster::SGD, ParamGroupOptions<SGDOptions>>(
        [](double lr) { return ParamGroupOptions<SGDOptions>({.lr = lr, .momentum = 0.9}); });
  return two_groups<muster::AdamW, ParamGroupOptions<AdamWOptions>>(
      [](double lr) { return ParamGroupOptions<AdamWOptions>({.lr = lr}); });
}
inline std::unique_ptr<Optimizer> of_libtorch(const std::string& kind) {
  if (kind == "SGD") {
    std::vector<t::OptimizerParamGroup> groups;
    for (const double lr : {0.1, 0.02})
      groups.emplace_back(std::vector<at::Tensor>{at::zeros({1}).requires_grad_()},
                          std::make_unique<t::SGDOptions>(t::SGDOptions(lr).momentum(0.9)));
    return std::make_unique<t::SGD>(groups, t::SGDOptions(0.1).momentum(0.9));
  }
  return two_groups<t::AdamW, t::AdamWOptions>([](double lr) { return t::AdamWOptions(lr); });
}
inline double momentum_of(Optimizer& optimizer) {
  auto& options = optimizer.param_groups()[0].options();
  if (auto* const of = dynamic_cast<t::SGDOptions*>(&options)) return of->momentum();
  if (auto* const of = dynamic_cast<t::AdamWOptions*>(&options)) return std::get<0>(of->betas());
  if (auto* const of = dynamic_cast<ParamGroupOptions<SGDOptions>*>(&options)) return of->values.momentum;
  return dynamic_cast<ParamGroupOptions<AdamWOptions>&>(options).values.betas.first;
}
inline std::vector<double> rates_now(Optimizer& optimizer) {
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

inline std::vector<ScheduleCase> schedule_cases() {
  const auto shrink = [](int64_t epoch) { return 1 - 1 / (2.0 + static_cast<double>(epoch)); };
  const auto inverse = [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); };
  using Rates = std::vector<LRScheduler::Rate>;
  const auto chain = [](const Rates& rates) { return maker<ChainedScheduler>(rates); };
  const auto sequence = [](const Rates& rates, const std::vector<int64_t>& milestones) {
    return maker<SequentialLR>(rates, milestones);
  };
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
           Rates{rates::linear(0.1, 1, 50),
                 rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60, .cycle_momentum = false})},
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
      // Chains, in which each rate goes on from those before it or ignores them.
      {"ChainedScheduler([LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), ExponentialLR(optimizer, 0.9)])",
       chain({rates::lambda(inverse), rates::exponential(0.9)})},
      {"ChainedScheduler([ExponentialLR(optimizer, 0.9), LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), "
       "LinearLR(optimizer, 0.5, total_iters=30)])",
       chain({rates::exponential(0.9), rates::lambda(inverse), rates::linear(0.5, 1, 30)})},
      {"ChainedScheduler([OneCycleLR(optimizer, 0.4, total_steps=1000), StepLR(optimizer, 100, gamma=0.5), "
       "LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))])",
       chain({rates::one_cycle({.max_lr = 0.4, .total_steps = 1000}), rates::step(100, 0.5), rates::lambda(inverse)})},
      {"ChainedScheduler([CyclicLR(optimizer, 0.01, 0.1, step_size_up=60), PolynomialLR(optimizer, 700)])",
       chain({rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60}), rates::polynomial(700, 1)})},
      {"ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=20), CosineAnnealingWarmRestarts(optimizer, 50), "
       "ConstantLR(optimizer, 0.5, total_iters=70)])",
       chain({rates::linear(0.1, 1, 20), rates::cosine_annealing_warm_restarts(50, 1, 0), rates::constant(0.5, 70)})},
      {"ChainedScheduler([ExponentialLR(optimizer, 0.999), CosineAnnealingLR(optimizer, 300, eta_min=0.001)])",
       chain({rates::exponential(0.999), rates::cosine_annealing(300, 0.001)})},
      {"ChainedScheduler([CosineAnnealingLR(optimizer, 70), MultiStepLR(optimizer, [30, 90], gamma=0.5)])",
       chain({rates::cosine_annealing(70, 0), rates::multi_step({30, 90}, 0.5)})},
      {"ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=50), SWALR(optimizer, 0.05, anneal_epochs=100), "
       "MultiplicativeLR(optimizer, lambda epoch: 1 - 1 / (2 + epoch))])",
       chain({rates::linear(0.1, 1, 50), rates::swa(0.05, 100, true), rates::multiplicative(shrink)})},
      {"ChainedScheduler([SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), "
       "CosineAnnealingLR(optimizer, 950)], [50]), ExponentialLR(optimizer, 0.999)])",
       chain({rates::sequential({rates::linear(0.1, 1, 50), rates::cosine_annealing(950, 0)}, {50}),
              rates::exponential(0.999)})},
      // A power that underflows, a sequence that brings a first rate or a momentum of its own.
      {"ChainedScheduler([LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), ExponentialLR(optimizer, 0.1)])",
       chain({rates::lambda(inverse), rates::exponential(0.1)})},
      {"ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=20), SequentialLR(optimizer, [LinearLR(optimizer, 0.5, "
       "total_iters=10), ExponentialLR(optimizer, 0.999)], [5])])",
       chain({rates::linear(0.1, 1, 20),
              rates::sequential({rates::linear(0.5, 1, 10), rates::exponential(0.999)}, {5})})},
      {"ChainedScheduler([SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), OneCycleLR(optimizer, "
       "0.4, total_steps=300), ConstantLR(optimizer)], [50, 300]), ExponentialLR(optimizer, 0.999)])",
       chain({rates::sequential({rates::linear(0.1, 1, 50), rates::one_cycle({.max_lr = 0.4, .total_steps = 300}),
                                 rates::constant(1.0 / 3, 5)},
                                {50, 300}),
              rates::exponential(0.999)})},
      {"ChainedScheduler([SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), OneCycleLR(optimizer, "
       "0.4, total_steps=1000)], [50]), LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))])",
       chain({rates::sequential({rates::linear(0.1, 1, 50), rates::one_cycle({.max_lr = 0.4, .total_steps = 1000})},
                                {50}),
              rates::lambda(inverse)})},
      {"ChainedScheduler([OneCycleLR(optimizer, 0.4, total_steps=1000, base_momentum=0.8, max_momentum=0.9), "
       "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), CyclicLR(optimizer, 0.01, 0.1, "
       "step_size_up=60)], [50])])",
       chain({rates::one_cycle({.max_lr = 0.4, .total_steps = 1000, .base_momentum = 0.8, .max_momentum = 0.9}),
              rates::sequential(
                  {rates::linear(0.1, 1, 50), rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60})},
                  {50})})},
      {"ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=50), CyclicLR(optimizer, 0.01, 0.1, step_size_up=60)])",
       chain({rates::linear(0.1, 1, 50), rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60})})},
      // A OneCycleLR or a CyclicLR gives those beside it in a sequence another first rate.
      {"SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), "
       "OneCycleLR(optimizer, 0.4, total_steps=300), ExponentialLR(optimizer, 0.99)], [50, 350])",
       sequence(
           {rates::linear(0.1, 1, 50), rates::one_cycle({.max_lr = 0.4, .total_steps = 300}), rates::exponential(0.99)},
           {50, 350})},
      {"SequentialLR(optimizer, [CosineAnnealingLR(optimizer, 40, eta_min=0.001), "
       "OneCycleLR(optimizer, 0.4, total_steps=900, anneal_strategy='linear')], [100])",
       sequence(
           {rates::cosine_annealing(40, 0.001), rates::one_cycle({.max_lr = 0.4, .total_steps = 900, .cosine = false})},
           {100})},
      {"SequentialLR(optimizer, [CyclicLR(optimizer, 0.01, 0.1, step_size_up=60), StepLR(optimizer, 70, gamma=0.8), "
       "SWALR(optimizer, 0.02, anneal_epochs=0)], [200, 700])",
       sequence({rates::cyclic({.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 60}), rates::step(70, 0.8),
                 rates::swa(0.02, 0, true)},
                {200, 700})},
      {"SequentialLR(optimizer, [LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), "
       "CosineAnnealingWarmRestarts(optimizer, 30, 3, eta_min=0.002), PolynomialLR(optimizer, 100)], [0, 400])",
       sequence(
           {rates::lambda(inverse), rates::cosine_annealing_warm_restarts(30, 3, 0.002), rates::polynomial(100, 1)},
           {0, 400})},
  };
}

}  // namespace muster::test::schedules
