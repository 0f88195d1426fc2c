// What a schedule asks of a rate beside its value. torch.optim.lr_scheduler has two forms of each rate: a closed one of
// the first rate and the epoch, and a step from the rate that the optimizer has. They differ when another schedule or
// the user changes the rate in between, and in chains.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/lr_scheduler.h"

namespace muster::optim::rates {

struct Rate::Rule {
  virtual ~Rule() = default;

  // The closed form.
  virtual double at(double first, int64_t epoch) const = 0;
  // The step: the rate at `epoch`, if it was `now` at the epoch `before`. At epoch 0, `now` is what the optimizer had
  // before the schedule. `before` is the epoch before, except for rates that go on (below).
  virtual double next(double first, double now, int64_t epoch, int64_t before) const = 0;
  // The closed form of a schedule that found the rate `start` in the optimizer, where the first rate is another one.
  virtual double from(double first, [[maybe_unused]] double start, int64_t epoch) const { return at(first, epoch); }

  virtual bool ignores_before() const { return false; }   // next() does not read `now`
  virtual bool is_factor() const { return false; }        // at() is the first rate times a function of the epoch
  virtual bool may_be_negative() const { return false; }  // without a fault of the user
  // Whether a rate goes on from the one before it in a sequence, because it has no closed form. Then first_after() is
  // its first rate there.
  virtual bool goes_on() const { return false; }
  virtual double first_after(double before) const { return before; }

  // What the schedule sets for all groups at `epoch`, and when it is made. None: it leaves the momentum as it is.
  virtual std::optional<double> momentum([[maybe_unused]] int64_t epoch) const { return {}; }
  virtual std::optional<double> first_momentum() const { return momentum(0); }
  // The first rate of those that come later in a list. A OneCycleLR and a CyclicLR bring one of their own.
  virtual double first_of_later(double first, [[maybe_unused]] bool is_first_in_list) const { return first; }
  // A rule of its own for each schedule, if it remembers what it has computed; null if it does not. `is_first`: whether
  // its schedule is the first one that is made for the optimizer.
  virtual std::shared_ptr<Rule> copy([[maybe_unused]] bool is_first) const { return nullptr; }
};

// It depends on nothing but the first rate and the epoch.
struct Absolute final : Rate::Rule {
  std::function<double(double first, int64_t epoch)> rate;
  std::function<double(int64_t epoch)> momentum_at = {};
  std::optional<double> later = {};  // the first rate of the later ones in a list
  bool is_cyclic = false;            // `later` counts only if it is the first in the list
  bool ends_below_zero = false;

  double at(double first, int64_t epoch) const override { return rate(first, epoch); }
  double next(double first, double, int64_t epoch, int64_t) const override {
    return is_cyclic && epoch == 0 ? first : rate(first, epoch);  // Python knows its base_lr after the first step only
  }
  bool ignores_before() const override { return true; }
  bool may_be_negative() const override { return ends_below_zero; }
  std::optional<double> momentum(int64_t epoch) const override {
    return momentum_at ? std::optional(momentum_at(epoch)) : std::nullopt;
  }
  double first_of_later(double first, bool is_first_in_list) const override {
    return later && (is_first_in_list || !is_cyclic) ? *later : first;
  }
};

// A rate whose rule no other schedule uses.
Rate own(const Rate& rate, bool is_first = true);

inline void require_epochs(const char* name, int64_t epochs, int64_t least) {
  if (epochs < least) throw InvalidArgument(text(name, ": expected ", least, " or more, got ", epochs));
}

// With options that each group may have for itself.
std::vector<Rate> one_cycle_of_groups(const OneCycleLROptions& options, size_t groups);
std::vector<Rate> cyclic_of_groups(const CyclicLROptions& options, size_t groups);

}  // namespace muster::optim::rates
