// The rates of lr_scheduler.h.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/lr_scheduler.h"
#include "optim/rate_rule.h"

namespace muster::optim::rates {
namespace {

// How much of a line is behind, from 0 to 1.
double part_of(int64_t epoch, int64_t total) {
  return static_cast<double>(std::min(epoch, total)) / static_cast<double>(total);
}

struct Factor final : Rate::Rule {
  std::function<double(int64_t epoch)> factor;
  std::function<double(int64_t epoch)> step;  // from the epoch before, from 1 on

  Factor(std::function<double(int64_t epoch)> some, std::function<double(int64_t epoch)> its_step)
      : factor(std::move(some)), step(std::move(its_step)) {}
  double at(double first, int64_t epoch) const override { return first * factor(epoch); }
  double next(double, double now, int64_t epoch, int64_t) const override {
    return now * (epoch == 0 ? factor(0) : step(epoch));
  }
  double from(double, double start, int64_t epoch) const override { return at(start, epoch); }
  bool is_factor() const override { return true; }
};

Rate by_factor(std::function<double(int64_t epoch)> factor, std::function<double(int64_t epoch)> step) {
  return Rate(std::make_shared<Factor>(std::move(factor), std::move(step)));
}
// With steps that are quotients. A line that has ended at 0 leaves the rate as it is.
Rate by_factor(const std::function<double(int64_t epoch)>& factor) {
  return by_factor(factor, [factor](int64_t epoch) {
    const double before = factor(epoch - 1);
    return before == 0 ? 1 : factor(epoch) / before;
  });
}

struct Cosine final : Rate::Rule {
  double t_max, eta_min;

  Cosine(int64_t most, double least) : t_max(static_cast<double>(most)), eta_min(least) {}
  double share(double epoch) const { return (1 + std::cos(std::numbers::pi * epoch / t_max)) / 2; }
  double at(double first, int64_t epoch) const override {
    return eta_min + (first - eta_min) * share(static_cast<double>(epoch));
  }
  double next(double first, double now, int64_t epoch, int64_t) const override {
    if (epoch == 0) return now;
    const auto before = static_cast<double>(epoch - 1);
    if (std::fmod(before - t_max, 2 * t_max) == 0) return now + (first - eta_min) * (1 - share(1));  // up from eta_min
    return share(before + 1) / share(before) * (now - eta_min) + eta_min;
  }
  // The way up begins at eta_min, whatever the start was.
  double from(double first, double start, int64_t epoch) const override {
    return at(static_cast<double>(epoch) <= t_max ? start : first, epoch);
  }
};

struct Swa final : Rate::Rule {
  double swa_lr;
  int64_t anneal_epochs;
  bool is_cosine;

  Swa(double lr, int64_t epochs, bool cosine) : swa_lr(lr), anneal_epochs(epochs), is_cosine(cosine) {}
  double share(int64_t epoch) const {
    const double part = anneal_epochs == 0 ? 1 : part_of(epoch, anneal_epochs);
    return is_cosine ? (1 - std::cos(std::numbers::pi * part)) / 2 : part;
  }
  double at(double first, int64_t epoch) const override {
    const double done = share(epoch);
    return swa_lr * done + first * (1 - done);
  }
  double next(double, double now, int64_t epoch, int64_t before) const override {
    if (epoch == 0) return at(now, 0);
    const double done = share(before);
    return at(done == 1 ? swa_lr : (now - done * swa_lr) / (1 - done), epoch);
  }
  double from(double, double start, int64_t epoch) const override { return at(start, epoch); }
  bool goes_on() const override { return true; }
};

struct Multiplicative final : Rate::Rule {
  struct Product {
    int64_t epoch = 0;
    double value = 1;
  };
  std::function<double(int64_t epoch)> factor;
  mutable Product last = {};

  explicit Multiplicative(std::function<double(int64_t epoch)> some) : factor(std::move(some)) {}
  double product(int64_t begin, int64_t end) const {
    double value = 1;
    for (int64_t epoch = begin; epoch < end; ++epoch) value *= factor(epoch);
    return value;
  }
  double at(double first, int64_t epoch) const override {
    Product now = epoch < last.epoch ? Product() : last;
    for (; now.epoch < epoch; ++now.epoch) now.value *= factor(now.epoch + 1);
    last = now;
    return first * now.value;
  }
  double next(double first, double now, int64_t epoch, int64_t before) const override {
    if (epoch == 0) return now;
    return epoch > before ? now * product(before + 1, epoch + 1) : at(first, epoch);
  }
  double from(double, double start, int64_t epoch) const override { return at(start, epoch); }
  bool goes_on() const override { return true; }
  double first_after(double before) const override { return before * factor(0); }  // as Python does
  std::shared_ptr<Rule> copy(bool) const override { return std::make_shared<Multiplicative>(factor); }
};

bool any_of(const std::vector<Rate>& rates, bool (Rate::Rule::*is)() const) {
  return std::any_of(rates.begin(), rates.end(), [&](const Rate& rate) { return (rate.rule().*is)(); });
}

std::optional<double> last_momentum(const std::vector<Rate>& rates, const auto& momentum_of) {
  for (size_t i = rates.size(); i-- > 0;)
    if (const auto momentum = momentum_of(rates[i].rule())) return momentum;
  return {};
}

// What a sequence and a chain have in common.
struct List : Rate::Rule {
  std::vector<Rate> rates;
  bool is_first;  // of the optimizer's schedules

  List(const std::vector<Rate>& some, bool first) : is_first(first) {
    for (const Rate& rate : some) rates.push_back(own(rate, is_first && rates.empty()));
  }
  // The first rate of each, and what the optimizer has as its first rate when all of them are made.
  struct Firsts {
    std::vector<double> of;
    double left;
  };
  Firsts firsts(double first) const {
    Firsts all{.of = {}, .left = first};
    for (const Rate& rate : rates)
      all.of.push_back(all.left = rate.rule().first_of_later(all.left, is_first && all.of.empty()));
    return all;
  }
  double first_of_later(double first, bool) const override { return firsts(first).left; }
  bool may_be_negative() const override { return any_of(rates, &Rate::Rule::may_be_negative); }
};

struct Sequence final : List {
  std::vector<int64_t> milestones;

  Sequence(const std::vector<Rate>& some, std::vector<int64_t> at, bool first)
      : List(some, first), milestones(std::move(at)) {}
  size_t index_at(int64_t epoch) const {
    return static_cast<size_t>(std::upper_bound(milestones.begin(), milestones.end(), epoch) - milestones.begin());
  }
  int64_t begin_of(size_t index) const { return index == 0 ? 0 : milestones[index - 1]; }

  double at(double first, int64_t epoch) const override {
    const Firsts all = firsts(first);
    const size_t index = index_at(epoch);
    const int64_t begin = begin_of(index);
    const Rate::Rule& rule = rates[index].rule();
    if (begin == 0) return rule.from(all.of[index], all.left, epoch);
    return rule.at(rule.goes_on() ? rule.first_after(at(first, begin - 1)) : all.of[index], epoch - begin);
  }
  double next(double first, double now, int64_t epoch, int64_t before) const override {
    const Firsts all = firsts(first);
    const size_t index = index_at(epoch);
    const int64_t begin = begin_of(index);
    const Rate::Rule& rule = rates[index].rule();
    if (epoch == 0) return at(first, 0);  // Python sets the first rate when it makes a sequence
    if (epoch == begin) return rule.at(rule.goes_on() ? rule.first_after(now) : all.of[index], 0);
    return rule.next(all.of[index], now, epoch - begin, before - begin);
  }
  std::optional<double> momentum(int64_t epoch) const override {
    const size_t index = index_at(epoch);
    return rates[index].rule().momentum(epoch - begin_of(index));
  }
  // Each sets its own when it is made; then the one that comes first does.
  std::optional<double> first_momentum() const override {
    if (const auto of_first = momentum(0)) return of_first;
    return last_momentum(rates, [](const Rate::Rule& rule) { return rule.first_momentum(); });
  }
  std::shared_ptr<Rule> copy(bool first) const override { return std::make_shared<Sequence>(rates, milestones, first); }
};

struct Chain final : List {
  // What a chain of steps has come to, by its first rate: there is one for each group with other options.
  struct Known {
    double first;
    int64_t epoch = -1;
    double rate = 0;
  };
  mutable std::vector<Known> known = {};

  using List::List;
  double through(size_t begin, const Firsts& all, double now, int64_t epoch) const {
    for (size_t i = begin; i < rates.size(); ++i) now = rates[i].rule().next(all.of[i], now, epoch, epoch - 1);
    return now;
  }
  double at(double first, int64_t epoch) const override {
    const Firsts all = firsts(first);
    for (size_t i = rates.size(); i-- > 0;)
      if (rates[i].rule().ignores_before()) return through(i, all, first, epoch);
    if (std::all_of(rates.begin(), rates.end(), [](const Rate& rate) { return rate.rule().is_factor(); })) {
      double product = first;
      for (const Rate& rate : rates) product = rate(product, epoch);
      return product;
    }
    auto place = std::find_if(known.begin(), known.end(), [&](const Known& one) { return one.first == first; });
    if (place == known.end()) place = known.insert(known.end(), {.first = first, .rate = first});
    Known now = place->epoch > epoch ? Known{.first = first, .rate = first} : *place;
    for (; now.epoch < epoch; ++now.epoch) now.rate = through(0, all, now.rate, now.epoch + 1);
    *place = now;
    return now.rate;
  }
  double next(double first, double now, int64_t epoch, int64_t) const override {
    return through(0, firsts(first), now, epoch);
  }
  bool ignores_before() const override { return any_of(rates, &Rate::Rule::ignores_before); }
  std::optional<double> momentum(int64_t epoch) const override {
    return last_momentum(rates, [&](const Rate::Rule& rule) { return rule.momentum(epoch); });
  }
  std::optional<double> first_momentum() const override {
    return last_momentum(rates, [](const Rate::Rule& rule) { return rule.first_momentum(); });
  }
  std::shared_ptr<Rule> copy(bool first) const override { return std::make_shared<Chain>(rates, first); }
};

}  // namespace

Rate::Rate(std::function<double(double first, int64_t epoch)> rate) {
  if (!rate) throw InvalidArgument("a schedule needs a function");
  Absolute absolute;
  absolute.rate = std::move(rate);
  rule_ = std::make_shared<Absolute>(std::move(absolute));
}

double Rate::operator()(double first, int64_t epoch) const { return rule_->at(first, epoch); }

Rate own(const Rate& rate, bool is_first) {
  if (auto copy = rate.rule().copy(is_first)) return Rate(std::move(copy));
  return rate;
}

Rate constant(double factor, int64_t total_iters) {
  if (!(factor >= 0 && factor <= 1)) throw InvalidArgument(text("factor: expected a number from 0 to 1, got ", factor));
  return by_factor([=](int64_t epoch) { return epoch < total_iters || total_iters <= 0 ? factor : 1; });  // as Python
}

Rate step(int64_t step_size, double gamma) {
  require_epochs("step_size", step_size, 1);
  return by_factor([=](int64_t epoch) { return std::pow(gamma, static_cast<double>(epoch / step_size)); },
                   [=](int64_t epoch) { return epoch % step_size == 0 ? gamma : 1; });
}

Rate multi_step(std::vector<int64_t> milestones, double gamma) {
  return by_factor(
      [=](int64_t epoch) {
        const auto passed =
            std::count_if(milestones.begin(), milestones.end(), [&](int64_t at) { return at <= epoch; });
        return std::pow(gamma, static_cast<double>(passed));
      },
      [=](int64_t epoch) {
        return std::pow(gamma, static_cast<double>(std::count(milestones.begin(), milestones.end(), epoch)));
      });
}

Rate exponential(double gamma) {
  return by_factor([=](int64_t epoch) { return std::pow(gamma, static_cast<double>(epoch)); },
                   [=](int64_t) { return gamma; });
}

Rate lambda(std::function<double(int64_t)> factor) {
  if (!factor) throw InvalidArgument("LambdaLR needs a function");
  return [factor = std::move(factor)](double first, int64_t epoch) { return first * factor(epoch); };
}

Rate multiplicative(std::function<double(int64_t)> factor) {
  if (!factor) throw InvalidArgument("MultiplicativeLR needs a function");
  return Rate(std::make_shared<Multiplicative>(std::move(factor)));
}

Rate cosine_annealing(int64_t t_max, double eta_min) {
  require_epochs("t_max", t_max, 1);
  return Rate(std::make_shared<Cosine>(t_max, eta_min));
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
    return Cosine(length, eta_min).at(first, at);
  };
}

Rate linear(double start_factor, double end_factor, int64_t total_iters) {
  if (!(start_factor > 0 && start_factor <= 1) || !(end_factor >= 0 && end_factor <= 1) || total_iters < 1)
    throw InvalidArgument(
        text("start_factor, end_factor and total_iters: expected a number above 0 and at most 1, one from 0 to 1, and "
             "1 or more, got ",
             start_factor, ", ", end_factor, " and ", total_iters));
  return by_factor(
      [=](int64_t epoch) { return start_factor + (end_factor - start_factor) * part_of(epoch, total_iters); });
}

Rate polynomial(int64_t total_iters, double power) {
  require_epochs("total_iters", total_iters, 1);
  return by_factor([=](int64_t epoch) { return std::pow(1 - part_of(epoch, total_iters), power); });
}

Rate swa(double swa_lr, int64_t anneal_epochs, bool cosine) {
  require_epochs("anneal_epochs", anneal_epochs, 0);
  return Rate(std::make_shared<Swa>(swa_lr, anneal_epochs, cosine));
}

Rate sequential(const std::vector<Rate>& rates, std::vector<int64_t> milestones) {
  if (rates.empty() || milestones.size() + 1 != rates.size())
    throw InvalidArgument(
        text("milestones: expected one less than there are rates (", rates.size(), "), got ", milestones.size()));
  if (!std::is_sorted(milestones.begin(), milestones.end()) || (!milestones.empty() && milestones.front() < 0))
    throw InvalidArgument("milestones must ascend, from 0 on");
  return Rate(std::make_shared<Sequence>(rates, std::move(milestones), /*first=*/true));
}

Rate chained(const std::vector<Rate>& rates) {
  if (rates.empty()) throw InvalidArgument("ChainedScheduler needs at least one rate");
  return Rate(std::make_shared<Chain>(rates, /*first=*/true));
}

}  // namespace muster::optim::rates
