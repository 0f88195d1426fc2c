// Rates that rise and fall, with the momentum (lr_scheduler.h).
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/lr_scheduler.h"
#include "optim/rate_rule.h"

namespace muster::optim::rates {

namespace {

double cosine_between(double start, double end, double part) {
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1);
}
double line_between(double start, double end, double part) { return (end - start) * part + start; }

// From one value to the next, with the epochs at which they are reached.
struct Phases {
  std::vector<double> ends;  // epochs
  std::vector<double> values;
  bool cosine;

  double at(int64_t epoch) const {
    const auto step = static_cast<double>(epoch);
    double begin = 0;
    size_t phase = 0;
    for (; phase + 1 < ends.size() && step > ends[phase]; ++phase) begin = ends[phase];
    const double part = (step - begin) / (ends[phase] - begin);
    return (cosine ? cosine_between : line_between)(values[phase], values[phase + 1], part);
  }
};

std::vector<double> ends_of(const OneCycleLROptions& options) {
  require_epochs("total_steps", options.total_steps, 1);
  if (!(options.pct_start >= 0 && options.pct_start <= 1))
    throw InvalidArgument(text("pct_start: expected a number from 0 to 1, got ", options.pct_start));
  const auto total = static_cast<double>(options.total_steps);
  std::vector<double> ends{options.pct_start * total - 1, total - 1};
  if (options.three_phase) ends.insert(ends.begin() + 1, 2 * options.pct_start * total - 2);
  double begin = 0;
  for (const double end : ends) {
    if (end == begin)
      throw InvalidArgument(
          text("with pct_start ", options.pct_start, ", a phase of ", options.total_steps, " steps has none"),
          "Change pct_start or total_steps");
    begin = end;
  }
  return ends;
}

std::function<double(int64_t)> momentum_of(const OneCycleLROptions& options) {
  if (!options.cycle_momentum) return {};
  Phases phases{ends_of(options), {options.max_momentum, options.base_momentum, options.max_momentum}, options.cosine};
  if (options.three_phase) phases.values.push_back(options.max_momentum);
  return [phases](int64_t epoch) { return phases.at(epoch); };
}

// How high the wave of a CyclicLR is, from 0 to 1.
std::function<double(int64_t)> wave_of(const CyclicLROptions& options) {
  require_epochs("step_size_up", options.step_size_up, 1);
  const auto up = static_cast<double>(options.step_size_up);
  const auto down = static_cast<double>(options.step_size_down.value_or(options.step_size_up));
  if (!(down >= 1)) throw InvalidArgument(text("step_size_down: expected 1 or more, got ", down));
  return [up, total = up + down, mode = options.mode, gamma = options.gamma, scale = options.scale_fn,
          by_step = options.scale_by_step](int64_t epoch) {
    const auto step = static_cast<double>(epoch);
    const double cycle = std::floor(1 + step / total), x = 1.0 + step / total - cycle, ratio = up / total;
    const double height = x <= ratio ? x / ratio : (x - 1) / (ratio - 1);
    if (scale) return height * scale(by_step ? step : cycle);
    switch (mode) {
      case CyclicLROptions::Mode::kTriangular2:
        return height / std::pow(2.0, cycle - 1);
      case CyclicLROptions::Mode::kExpRange:
        return height * std::pow(gamma, step);
      default:
        return height;
    }
  };
}

std::function<double(int64_t)> momentum_of(const CyclicLROptions& options) {
  if (!options.cycle_momentum) return {};
  return [wave = wave_of(options), base = options.base_momentum, most = options.max_momentum](int64_t epoch) {
    return most - (most - base) * wave(epoch);
  };
}

}  // namespace

std::vector<Rate> one_cycle_of_groups(const OneCycleLROptions& options, size_t groups) {
  std::vector<double> most = options.max_lrs;
  if (most.empty()) most.assign(groups, options.max_lr);
  const auto momentum = momentum_of(options);
  std::vector<Rate> rates;
  for (const double max_lr : most) {
    if (!(max_lr > 0)) throw InvalidArgument(text("max_lr: expected a number above 0, got ", max_lr));
    const double first = max_lr / options.div_factor, last = first / options.final_div_factor;
    Phases phases{ends_of(options), {first, max_lr, last}, options.cosine};
    if (options.three_phase) phases.values = {first, max_lr, first, last};
    Absolute rate;
    rate.rate = [phases, total = options.total_steps](double, int64_t epoch) {
      if (epoch > total) throw InvalidArgument(text("OneCycleLR: expected at most ", total, " steps, got ", epoch));
      return phases.at(epoch);
    };
    rate.momentum_at = momentum;
    rate.later = first;
    rate.ends_below_zero = !options.cosine;
    rates.push_back(Rate(std::make_shared<Absolute>(std::move(rate))));
  }
  return rates;
}

std::vector<Rate> cyclic_of_groups(const CyclicLROptions& options, size_t groups) {
  std::vector<double> base = options.base_lrs, most = options.max_lrs;
  if (base.empty()) base.assign(groups, options.base_lr);
  if (most.empty()) most.assign(groups, options.max_lr);
  if (base.size() != groups || most.size() != groups)
    throw InvalidArgument(text("base_lrs and max_lrs of CyclicLR: expected one for each of ", groups, " groups, got ",
                               base.size(), " and ", most.size()));
  std::vector<Rate> rates;
  for (size_t i = 0; i < groups; ++i) {
    Absolute rate;
    rate.rate = [wave = wave_of(options), base = base[i], most = most[i]](double, int64_t epoch) {
      return base + (most - base) * wave(epoch);
    };
    rate.momentum_at = momentum_of(options);
    rate.later = base[i];
    rate.is_cyclic = true;
    rates.push_back(Rate(std::make_shared<Absolute>(std::move(rate))));
  }
  return rates;
}

Rate one_cycle(const OneCycleLROptions& options) {
  if (!options.max_lrs.empty()) throw InvalidArgument("rates::one_cycle() is of all groups", "Set max_lr");
  return one_cycle_of_groups(options, 1).front();
}
Rate cyclic(const CyclicLROptions& options) {
  if (!options.base_lrs.empty() || !options.max_lrs.empty())
    throw InvalidArgument("rates::cyclic() is of all groups", "Set base_lr and max_lr");
  return cyclic_of_groups(options, 1).front();
}

}  // namespace muster::optim::rates
