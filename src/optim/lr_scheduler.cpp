#include "muster/optim/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "muster/base/error.h"

namespace muster::optim {

LRScheduler::LRScheduler(double first, std::function<void(double)> set, Rate rate)
    : first_(first), set_(std::move(set)), rate_(std::move(rate)) {
  set_(rate_(first_, 0));  // a warm-up begins below the first rate
}

void LRScheduler::step(int64_t epoch) {
  if (epoch < 0) throw InvalidArgument("the epoch must be at least 0, got " + std::to_string(epoch));
  set_(rate_(first_, epoch));
  epoch_ = epoch;
}

namespace rates {

LRScheduler::Rate step(int64_t step_size, double gamma) {
  if (step_size < 1) throw InvalidArgument("step_size must be at least 1, got " + std::to_string(step_size));
  return [=](double first, int64_t epoch) { return first * std::pow(gamma, static_cast<double>(epoch / step_size)); };
}

LRScheduler::Rate multi_step(std::vector<int64_t> milestones, double gamma) {
  return [=](double first, int64_t epoch) {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [&](int64_t at) { return at <= epoch; });
    return first * std::pow(gamma, static_cast<double>(passed));
  };
}

LRScheduler::Rate exponential(double gamma) {
  return [=](double first, int64_t epoch) { return first * std::pow(gamma, static_cast<double>(epoch)); };
}

LRScheduler::Rate lambda(std::function<double(int64_t)> factor) {
  if (!factor) throw InvalidArgument("LambdaLR needs a function");
  return [factor = std::move(factor)](double first, int64_t epoch) { return first * factor(epoch); };
}

LRScheduler::Rate cosine_annealing(int64_t t_max, double eta_min) {
  if (t_max < 1) throw InvalidArgument("t_max must be at least 1, got " + std::to_string(t_max));
  return [=](double first, int64_t epoch) {
    const double part = static_cast<double>(epoch) / static_cast<double>(t_max);
    return eta_min + (first - eta_min) * (1 + std::cos(std::numbers::pi * part)) / 2;
  };
}

LRScheduler::Rate linear(double start_factor, double end_factor, int64_t total_iters) {
  if (!(start_factor > 0 && start_factor <= 1) || !(end_factor >= 0 && end_factor <= 1) || total_iters < 1)
    throw InvalidArgument("start_factor must be above 0 and at most 1, end_factor from 0 to 1, total_iters at least 1");
  return [=](double first, int64_t epoch) {
    const double part = static_cast<double>(std::min(epoch, total_iters)) / static_cast<double>(total_iters);
    return first * (start_factor + (end_factor - start_factor) * part);
  };
}

}  // namespace rates
}  // namespace muster::optim
