#include "muster/optim/lr_scheduler.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/optimizers.h"
#include "optim/rate_rule.h"

namespace muster::optim {
namespace {

namespace of_torch = torch::optim;  // this namespace has names as SGD and Adam of its own

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

namespace {

[[noreturn]] void throw_other_groups(size_t now, size_t groups) {
  throw InvalidArgument(text("the optimizer: expected ", groups, " groups, as when its schedule was made, got ", now),
                        "Make the schedule after the last add_param_group()");
}

}  // namespace

LRScheduler::LRScheduler(ScheduledRates of, std::vector<Rate> rates) : of_(std::move(of)), rates_(std::move(rates)) {
  const std::vector<double> firsts = of_.get();
  if (rates_.size() == 1) rates_.resize(firsts.size(), rates_.front());
  for (Rate& rate : rates_) rate = rates::own(rate);
  if (rates_.size() != firsts.size())
    throw InvalidArgument(text("the rates of the schedule: expected one for each of the optimizer's ", firsts.size(),
                               " groups, got ", rates_.size()));
  // A warm-up begins below the first rate.
  for (size_t i = 0; i < firsts.size(); ++i) groups_.push_back({.first = firsts[i], .last = rates_[i](firsts[i], 0)});
  set(groups_, 0, rates_.front().rule().first_momentum());
}

std::vector<double> LRScheduler::last_lrs() const {
  std::vector<double> lrs;
  for (const Group& group : groups_) lrs.push_back(group.last);
  return lrs;
}

void LRScheduler::go_to(int64_t epoch, bool from_now) {
  if (epoch < 0) throw InvalidArgument(text("the epoch: expected 0 or more, got ", epoch));
  const std::vector<double> now = of_.get();
  if (now.size() != groups_.size()) throw_other_groups(now.size(), groups_.size());
  std::vector<Group> groups = groups_;
  for (size_t i = 0; i < groups.size(); ++i) {
    Group& group = groups[i];
    const Rate::Rule& rule = rates_[i].rule();
    const bool is_changed = group.is_off || now[i] != group.seen;
    group.is_off = is_changed && (from_now || rule.goes_on()) && !rule.ignores_before();
    group.last = group.is_off ? rule.next(group.first, now[i], epoch, epoch_) : rule.at(group.first, epoch);
  }
  set(std::move(groups), epoch, rates_.front().rule().momentum(epoch));
}

void LRScheduler::set(std::vector<Group> groups, int64_t epoch, std::optional<double> momentum) {
  const std::vector<double> before = of_.get();
  if (before.size() != groups.size()) throw_other_groups(before.size(), groups.size());
  std::vector<double> lrs;
  for (size_t i = 0; i < groups.size(); ++i) {
    const bool raised = groups[i].last < 0 && !of_.may_be_negative && rates_[i].rule().may_be_negative();
    lrs.push_back(raised ? 0 : groups[i].last);
  }
  of_.set(lrs);
  if (momentum && !of_.set_momentum(*momentum)) {
    of_.set(before);
    throw InvalidArgument("the optimizer has neither momentum nor betas", "Set cycle_momentum to false");
  }
  const std::vector<double> seen = of_.get();
  for (size_t i = 0; i < groups.size(); ++i) groups[i].seen = seen[i];
  groups_ = std::move(groups);
  epoch_ = epoch;
}

void LRScheduler::save(torch::serialize::OutputArchive& archive) const {
  std::vector<double> numbers;
  for (const Group& group : groups_) numbers.push_back(group.first);
  numbers.push_back(static_cast<double>(epoch_));
  archive.write("schedule", c10::IValue(numbers));
  // By group: `last`, `seen`, `is_off`, and the rate that the optimizer has now.
  const std::vector<double> now = of_.get();
  if (now.size() != groups_.size()) throw_other_groups(now.size(), groups_.size());
  std::vector<double> of_groups;
  for (size_t i = 0; i < groups_.size(); ++i)
    for (const double number : {groups_[i].last, groups_[i].seen, groups_[i].is_off ? 1.0 : 0.0, now[i]})
      of_groups.push_back(number);
  archive.write("rates", c10::IValue(of_groups));
}

void LRScheduler::load(torch::serialize::InputArchive& archive) {
  const char* const what = "schedule of the learning rate";
  const std::vector<double> numbers = read_numbers(archive, "schedule", what);
  if (numbers.size() != groups_.size() + 1)
    throw InvalidArgument(
        text("the saved schedule: expected ", groups_.size(), " groups, as this one has, got ", numbers.size() - 1));
  const std::vector<double> of_groups = read_numbers(archive, "rates", what);
  if (of_groups.size() != 4 * groups_.size()) throw CorruptError(text("the archive does not hold a ", what));
  const auto epoch = static_cast<int64_t>(numbers.back());
  std::vector<Group> groups;
  std::vector<double> now;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const double* const saved = &of_groups[4 * i];
    groups.push_back({.first = numbers[i], .last = saved[0], .seen = saved[1], .is_off = saved[2] != 0});
    now.push_back(saved[3]);
  }
  set(groups, epoch, rates_.front().rule().momentum(epoch));
  groups_ = std::move(groups);
  of_.set(now);
}

OneCycleLR::OneCycleLR(const ScheduledRates& of, const OneCycleLROptions& options)
    : LRScheduler(of, rates::one_cycle_of_groups(options, of.get().size())) {}

CyclicLR::CyclicLR(const ScheduledRates& of, const CyclicLROptions& options)
    : LRScheduler(of, rates::cyclic_of_groups(options, of.get().size())) {}

// --- a plateau ---

ReduceLROnPlateau::ReduceLROnPlateau(ScheduledRates of, const ReduceLROnPlateauOptions& options)
    : of_(std::move(of)),
      options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity()) {
  if (!(options.factor < 1)) throw InvalidArgument(text("factor: expected a number below 1, got ", options.factor));
  const size_t groups = of_.get().size(), least = options.min_lrs.size();
  if (least != 0 && least != groups)
    throw InvalidArgument(
        text("min_lrs of ReduceLROnPlateau: expected one for each of ", groups, " groups, got ", least));
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
