#include "muster/optim/lr_scheduler.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <numeric>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/optimizers.h"

namespace muster::optim {
namespace {

namespace of_torch = torch::optim;  // this namespace has names as SGD and Adam of its own

void require_epochs(const char* name, int64_t epochs, int64_t least) {
  if (epochs < least) throw InvalidArgument(text(name, " must be at least ", least, ", got ", epochs));
}

double cosine_between(double start, double end, double part) {
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1);
}
double line_between(double start, double end, double part) { return (end - start) * part + start; }

bool set_momentum_of(of_torch::OptimizerOptions& options, double momentum) {
  if (auto* const of = dynamic_cast<of_torch::SGDOptions*>(&options)) {
    of->momentum(momentum);
  } else if (auto* const of = dynamic_cast<of_torch::RMSpropOptions*>(&options)) {
    of->momentum(momentum);
  } else if (auto* const of = dynamic_cast<of_torch::AdamOptions*>(&options)) {
    std::get<0>(of->betas()) = momentum;
  } else if (auto* const of = dynamic_cast<of_torch::AdamWOptions*>(&options)) {
    std::get<0>(of->betas()) = momentum;
  } else {
    return false;
  }
  return true;
}

std::vector<double> read_numbers(torch::serialize::InputArchive& archive, const char* name, const char* of) {
  c10::IValue value;
  if (!archive.try_read(name, value) || !value.isDoubleList())
    throw CorruptError(text("the archive does not hold a ", of), "Load what save() of the same class has written");
  return value.toDoubleVector();
}

}  // namespace

ScheduledRates rates_of(torch::optim::Optimizer& optimizer) {
  return {.get =
              [&optimizer] {
                std::vector<double> lrs;
                for (const auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
                return lrs;
              },
          .set =
              [&optimizer](const std::vector<double>& lrs) {
                auto& groups = optimizer.param_groups();
                if (groups.size() != lrs.size())
                  throw InvalidArgument(
                      text("the optimizer has ", groups.size(), " groups, and its schedule was made for ", lrs.size()),
                      "Make the schedule after the last add_param_group()");
                for (size_t i = 0; i < lrs.size(); ++i) groups[i].options().set_lr(lrs[i]);
              },
          .set_momentum =
              [&optimizer](double momentum) {
                if (auto* const ours = dynamic_cast<TorchOptimizerBase*>(&optimizer))
                  return ours->set_momentum(momentum);
                auto& groups = optimizer.param_groups();
                return std::all_of(groups.begin(), groups.end(),
                                   [&](auto& group) { return set_momentum_of(group.options(), momentum); });
              }};
}

LRScheduler::LRScheduler(ScheduledRates of, std::vector<Rate> rates, Momentum momentum)
    : of_(std::move(of)), firsts_(of_.get()), rates_(std::move(rates)), momentum_(std::move(momentum)) {
  if (rates_.size() == 1) rates_.resize(firsts_.size(), rates_.front());
  if (rates_.size() != firsts_.size())
    throw InvalidArgument(
        text("the optimizer has ", firsts_.size(), " groups, and the schedule has rates for ", rates_.size()));
  step(0);  // a warm-up begins below the first rate
}

std::vector<double> LRScheduler::last_lrs() const {
  std::vector<double> lrs;
  for (size_t i = 0; i < firsts_.size(); ++i) lrs.push_back(rates_[i](firsts_[i], epoch_));
  return lrs;
}

void LRScheduler::step(int64_t epoch) {
  if (epoch < 0) throw InvalidArgument(text("the epoch must be at least 0, got ", epoch));
  const int64_t before = std::exchange(epoch_, epoch);
  try {
    const std::vector<double> lrs = last_lrs(), before_lrs = of_.get();
    of_.set(lrs);
    if (momentum_ && !of_.set_momentum(momentum_(epoch))) {
      of_.set(before_lrs);
      throw InvalidArgument("the optimizer has neither momentum nor betas", "Set cycle_momentum to false");
    }
  } catch (...) {
    epoch_ = before;
    throw;
  }
}

void LRScheduler::save(torch::serialize::OutputArchive& archive) const {
  std::vector<double> numbers = firsts_;
  numbers.push_back(static_cast<double>(epoch_));
  archive.write("schedule", c10::IValue(numbers));
}

void LRScheduler::load(torch::serialize::InputArchive& archive) {
  std::vector<double> numbers = read_numbers(archive, "schedule", "schedule of the learning rate");
  if (numbers.size() != firsts_.size() + 1)
    throw InvalidArgument(
        text("the saved schedule has ", numbers.size() - 1, " groups, and this one ", firsts_.size()));
  const auto epoch = static_cast<int64_t>(numbers.back());
  numbers.pop_back();
  firsts_.swap(numbers);
  try {
    step(epoch);
  } catch (...) {
    firsts_.swap(numbers);
    throw;
  }
}

namespace rates {

Rate constant(double factor, int64_t total_iters) {
  if (!(factor >= 0 && factor <= 1)) throw InvalidArgument(text("factor must be from 0 to 1, got ", factor));
  return [=](double first, int64_t epoch) { return epoch < total_iters ? first * factor : first; };
}

Rate step(int64_t step_size, double gamma) {
  require_epochs("step_size", step_size, 1);
  return [=](double first, int64_t epoch) { return first * std::pow(gamma, static_cast<double>(epoch / step_size)); };
}

Rate multi_step(std::vector<int64_t> milestones, double gamma) {
  return [=](double first, int64_t epoch) {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [&](int64_t at) { return at <= epoch; });
    return first * std::pow(gamma, static_cast<double>(passed));
  };
}

Rate exponential(double gamma) {
  return [=](double first, int64_t epoch) { return first * std::pow(gamma, static_cast<double>(epoch)); };
}

Rate lambda(std::function<double(int64_t)> factor) {
  if (!factor) throw InvalidArgument("LambdaLR needs a function");
  return [factor = std::move(factor)](double first, int64_t epoch) { return first * factor(epoch); };
}

namespace {

// These two go on from the rate that the optimizer has when they begin. In a sequence that is the last one of the rate
// before.
struct Multiplicative {
  struct Product {
    int64_t epoch = 0;
    double value = 1;
  };
  std::function<double(int64_t)> factor;
  std::shared_ptr<Product> last = std::make_shared<Product>();

  double operator()(double first, int64_t epoch) const {
    if (epoch < last->epoch) *last = {};
    while (last->epoch < epoch) last->value *= factor(++last->epoch);
    return first * last->value;
  }
};
struct Swa {
  double swa_lr;
  int64_t anneal_epochs;
  bool cosine;

  double operator()(double first, int64_t epoch) const {
    const double part =
        anneal_epochs == 0 ? 1 : std::min(1.0, static_cast<double>(epoch) / static_cast<double>(anneal_epochs));
    const double share = cosine ? (1 - std::cos(std::numbers::pi * part)) / 2 : part;
    return swa_lr * share + first * (1 - share);
  }
};

}  // namespace

Rate multiplicative(std::function<double(int64_t)> factor) {
  if (!factor) throw InvalidArgument("MultiplicativeLR needs a function");
  return Multiplicative{.factor = std::move(factor)};
}

Rate cosine_annealing(int64_t t_max, double eta_min) {
  require_epochs("t_max", t_max, 1);
  return [=](double first, int64_t epoch) {
    const double part = static_cast<double>(epoch) / static_cast<double>(t_max);
    return eta_min + (first - eta_min) * (1 + std::cos(std::numbers::pi * part)) / 2;
  };
}

Rate cosine_annealing_warm_restarts(int64_t t_0, int64_t t_mult, double eta_min) {
  require_epochs("t_0", t_0, 1);
  require_epochs("t_mult", t_mult, 1);
  return [=](double first, int64_t epoch) {
    int64_t length = t_0, at = epoch;
    if (t_mult == 1) at %= t_0;
    while (at >= length) {
      at -= length;
      length *= t_mult;
    }
    return cosine_annealing(length, eta_min)(first, at);
  };
}

Rate linear(double start_factor, double end_factor, int64_t total_iters) {
  if (!(start_factor > 0 && start_factor <= 1) || !(end_factor >= 0 && end_factor <= 1) || total_iters < 1)
    throw InvalidArgument("start_factor must be above 0 and at most 1, end_factor from 0 to 1, total_iters at least 1");
  return [=](double first, int64_t epoch) {
    const double part = static_cast<double>(std::min(epoch, total_iters)) / static_cast<double>(total_iters);
    return first * (start_factor + (end_factor - start_factor) * part);
  };
}

Rate polynomial(int64_t total_iters, double power) {
  require_epochs("total_iters", total_iters, 1);
  return [=](double first, int64_t epoch) {
    const double part = static_cast<double>(std::min(epoch, total_iters)) / static_cast<double>(total_iters);
    return first * std::pow(1 - part, power);
  };
}

Rate swa(double swa_lr, int64_t anneal_epochs, bool cosine) {
  require_epochs("anneal_epochs", anneal_epochs, 0);
  return Swa{.swa_lr = swa_lr, .anneal_epochs = anneal_epochs, .cosine = cosine};
}

Rate sequential(std::vector<Rate> rates, std::vector<int64_t> milestones) {
  if (rates.empty() || milestones.size() + 1 != rates.size())
    throw InvalidArgument(text(rates.size(), " rates need one milestone less, and not ", milestones.size()));
  if (!std::is_sorted(milestones.begin(), milestones.end()) || (!milestones.empty() && milestones.front() < 0))
    throw InvalidArgument("milestones must ascend, from 0 on");
  return [rates = std::move(rates), milestones = std::move(milestones)](double first, int64_t epoch) {
    const auto rate_at = [&](const auto& again, int64_t when) -> double {
      const auto passed =
          static_cast<size_t>(std::upper_bound(milestones.begin(), milestones.end(), when) - milestones.begin());
      const int64_t begin = passed == 0 ? 0 : milestones[passed - 1];
      const Rate& rate = rates[passed];
      if (begin == 0) return rate(first, when);
      if (rate.template target<Swa>()) return rate(again(again, begin - 1), when - begin);
      if (const auto* const product = rate.template target<Multiplicative>())  // Python multiplies at epoch 0 as well
        return rate(again(again, begin - 1) * product->factor(0), when - begin);
      return rate(first, when - begin);
    };
    return rate_at(rate_at, epoch);
  };
}

Rate chained(std::vector<Rate> rates) {
  if (rates.empty()) throw InvalidArgument("ChainedScheduler needs at least one rate");
  return [rates = std::move(rates)](double first, int64_t epoch) {
    if (first == 0) return 0.0;
    return std::accumulate(rates.begin(), rates.end(), first,
                           [&](double product, const Rate& rate) { return product * (rate(first, epoch) / first); });
  };
}

}  // namespace rates

// --- a cycle ---

namespace {

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
    throw InvalidArgument(text("pct_start must be from 0 to 1, got ", options.pct_start));
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

std::vector<LRScheduler::Rate> rates_of_one_cycle(const OneCycleLROptions& options, size_t groups) {
  std::vector<double> most = options.max_lrs;
  if (most.empty()) most.assign(groups, options.max_lr);
  std::vector<LRScheduler::Rate> rates;
  for (const double max_lr : most) {
    if (!(max_lr > 0)) throw InvalidArgument(text("max_lr must be above 0, got ", max_lr));
    const double first = max_lr / options.div_factor, last = first / options.final_div_factor;
    Phases phases{ends_of(options), {first, max_lr, last}, options.cosine};
    if (options.three_phase) phases.values = {first, max_lr, first, last};
    rates.push_back([phases, total = options.total_steps](double, int64_t epoch) {
      if (epoch > total) throw InvalidArgument(text("step ", epoch, " of a OneCycleLR of ", total, " steps"));
      return std::max(0.0, phases.at(epoch));  // after the last step, a line goes on below 0
    });
  }
  return rates;
}

std::function<double(int64_t)> momentum_of_one_cycle(const OneCycleLROptions& options) {
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
  if (!(down >= 1)) throw InvalidArgument(text("step_size_down must be at least 1, got ", down));
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

std::vector<LRScheduler::Rate> rates_of_cycle(const CyclicLROptions& options, size_t groups) {
  std::vector<double> base = options.base_lrs, most = options.max_lrs;
  if (base.empty()) base.assign(groups, options.base_lr);
  if (most.empty()) most.assign(groups, options.max_lr);
  if (base.size() != groups || most.size() != groups)
    throw InvalidArgument(
        text("CyclicLR got ", base.size(), " base_lrs and ", most.size(), " max_lrs for ", groups, " groups"));
  std::vector<LRScheduler::Rate> rates;
  for (size_t i = 0; i < groups; ++i)
    rates.push_back([wave = wave_of(options), base = base[i], most = most[i]](double, int64_t epoch) {
      return base + (most - base) * wave(epoch);
    });
  return rates;
}

std::function<double(int64_t)> momentum_of(const CyclicLROptions& options) {
  if (!options.cycle_momentum) return {};
  return [wave = wave_of(options), base = options.base_momentum, most = options.max_momentum](int64_t epoch) {
    return most - (most - base) * wave(epoch);
  };
}

}  // namespace

OneCycleLR::OneCycleLR(const ScheduledRates& of, const OneCycleLROptions& options)
    : LRScheduler(of, rates_of_one_cycle(options, of.get().size()), momentum_of_one_cycle(options)) {}

CyclicLR::CyclicLR(const ScheduledRates& of, const CyclicLROptions& options)
    : LRScheduler(of, rates_of_cycle(options, of.get().size()), momentum_of(options)) {}

namespace rates {

Rate one_cycle(const OneCycleLROptions& options) {
  if (!options.max_lrs.empty()) throw InvalidArgument("rates::one_cycle() is of all groups", "Set max_lr");
  return rates_of_one_cycle(options, 1).front();
}
Rate cyclic(const CyclicLROptions& options) {
  if (!options.base_lrs.empty() || !options.max_lrs.empty())
    throw InvalidArgument("rates::cyclic() is of all groups", "Set base_lr and max_lr");
  return rates_of_cycle(options, 1).front();
}

}  // namespace rates

// --- a plateau ---

ReduceLROnPlateau::ReduceLROnPlateau(ScheduledRates of, const ReduceLROnPlateauOptions& options)
    : of_(std::move(of)),
      options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  if (!(options.factor < 1)) throw InvalidArgument(text("factor must be below 1, got ", options.factor));
  const size_t groups = of_.get().size(), least = options.min_lrs.size();
  if (least != 0 && least != groups)
    throw InvalidArgument(text("ReduceLROnPlateau got ", least, " min_lrs for ", groups, " groups"));
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const double by = options_.threshold;
  if (options_.maximize) return metric > (options_.relative ? best_ * (by + 1.0) : best_ + by);
  return metric < (options_.relative ? best_ * (1.0 - by) : best_ - by);
}

void ReduceLROnPlateau::step(double metric) {
  if (is_better(metric)) {
    best_ = metric;
    bad_epochs_ = 0;
  } else {
    ++bad_epochs_;
  }
  if (cooldown_left_ > 0) {
    --cooldown_left_;
    bad_epochs_ = 0;
  }
  if (bad_epochs_ <= options_.patience) return;
  cooldown_left_ = options_.cooldown;
  bad_epochs_ = 0;
  std::vector<double> lrs = of_.get();
  for (size_t i = 0; i < lrs.size(); ++i) {
    const double least = options_.min_lrs.empty() ? options_.min_lr : options_.min_lrs[i];
    if (const double reduced = std::max(lrs[i] * options_.factor, least); lrs[i] - reduced > options_.eps)
      lrs[i] = reduced;
  }
  of_.set(lrs);
}

void ReduceLROnPlateau::save(torch::serialize::OutputArchive& archive) const {
  archive.write("plateau", c10::IValue(std::vector<double>{best_, static_cast<double>(bad_epochs_),
                                                           static_cast<double>(cooldown_left_)}));
}

void ReduceLROnPlateau::load(torch::serialize::InputArchive& archive) {
  const auto numbers = read_numbers(archive, "plateau", "ReduceLROnPlateau");
  if (numbers.size() != 3) throw CorruptError("the archive does not hold a ReduceLROnPlateau");
  best_ = numbers[0];
  bad_epochs_ = static_cast<int64_t>(numbers[1]);
  cooldown_left_ = static_cast<int64_t>(numbers[2]);
}

}  // namespace muster::optim
