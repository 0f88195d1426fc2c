// Schedules of the learning rate: those of torch.optim.lr_scheduler.
//
//   optim::OneCycleLR schedule(sgd, {.max_lr = 0.4, .total_steps = epochs * steps_per_epoch});
//   for (…) { …; sgd.step(); schedule.step(); }
//
// They take a torch::optim::Optimizer (libtorch's, or those of optimizers.h), and set the rates of all its groups; and
// everything that has lr() and set_lr(): functional optimizers, and DistributedOptimizer, where the new rate is that of
// the next step on all owners.
//
// A rate is a function of the group's first rate, which it has when the schedule is made, and of the epoch. An *epoch*
// is what you count: epochs, steps, or samples. step() goes on by one; step(epoch) may take any epoch. So count what
// does not depend on the number of ranks, such as the samples of all ranks, and the schedule does not depend on it
// either:
//
//   optim::CosineAnnealingLR schedule(sgd, total_samples);
//   …
//   schedule.step(samples_seen);   // of all ranks
//
// Rates are composed as functions, before they are given an optimizer: five epochs of warm-up, then half a cosine.
//
//   optim::SequentialLR schedule(sgd, {optim::rates::linear(0.1, 1, 5), optim::rates::cosine_annealing(95, 0)}, {5});
//
// In a chain, LambdaLR, OneCycleLR, CyclicLR and warm restarts ignore the rates before them, as in Python, and so does
// any function of yours. In a sequence, SWALR and MultiplicativeLR go on from the rate before. Differences from Python:
// there, all OneCycleLR of one optimizer have the max_lr and the momentum of the one that was made last, those of a
// CyclicLR made later, and all SWALR the last one's swa_lr. A sequence or a chain within a sequence begins as it does
// alone; Python has it only as the first, and takes one step more.
//
// step() goes on from the rate that the optimizer has, as in Python, so a ReduceLROnPlateau may reduce what a warm-up
// has reached, and SWALR anneals from where the schedule before it ended. step(epoch) sets the rate of that epoch, but
// for SWALR and MultiplicativeLR, which have none without the rate before. Python's schedules of one optimizer share its
// first rate; here each takes the one that it finds, so make a sequence or a chain of them.
//
// save() and load() store the epoch, the first rates and the optimizer's rates; a Snapshot takes a schedule. Or call
// step(epochs_done).
//
// Errors: InvalidArgument for options out of their range, and those of set_lr(). Thread-safety: none; the optimizer
// must outlive its schedule, and must not get new groups. Source: torch.optim.lr_scheduler,
// torch.optim.swa_utils.SWALR.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::optim {

// The rates of an optimizer, one for each group.
struct ScheduledRates {
  std::function<std::vector<double>()> get;
  std::function<void(const std::vector<double>&)> set;
  std::function<bool(double)> set_momentum;  // of all groups: momentum, or the first of betas. False if there is none
  // false: a rate below 0, which a linear OneCycleLR has after its last step, is set as 0.
  bool may_be_negative = true;
};
ScheduledRates rates_of(torch::optim::Optimizer& optimizer);
template <typename O>
ScheduledRates rates_of(O& optimizer) {
  if constexpr (std::derived_from<O, torch::optim::Optimizer>) {
    return rates_of(static_cast<torch::optim::Optimizer&>(optimizer));
  } else {
    return {.get = [&optimizer] { return std::vector<double>{optimizer.lr()}; },
            .set = [&optimizer](const std::vector<double>& lrs) { optimizer.set_lr(lrs.at(0)); },
            .set_momentum = [](double) { return false; },
            .may_be_negative = false};
  }
}

namespace rates {
// A rate as a function of the group's first rate and the epoch: one of those below, or any function of yours.
class Rate {
 public:
  template <typename F>
  requires(std::is_invocable_r_v<double, const F&, double, int64_t> && !std::is_same_v<F, Rate>) Rate(F rate)
      : Rate(std::function<double(double first, int64_t epoch)>(std::move(rate))) {}
  Rate(std::function<double(double first, int64_t epoch)> rate);

  double operator()(double first, int64_t epoch) const;

  struct Rule;  // how it goes on from another rate, and what it makes of the momentum
  explicit Rate(std::shared_ptr<const Rule> rule) : rule_(std::move(rule)) {}
  const Rule& rule() const { return *rule_; }

 private:
  std::shared_ptr<const Rule> rule_;
};
}  // namespace rates

// A schedule from any function of the first rate and the epoch.
class LRScheduler {
 public:
  using Rate = rates::Rate;

  template <typename O>
  LRScheduler(O& optimizer, Rate rate) : LRScheduler(rates_of(optimizer), {std::move(rate)}) {}

  void step() { go_to(epoch_ + 1, /*from_now=*/true); }
  void step(int64_t epoch) { go_to(epoch, /*from_now=*/false); }
  int64_t last_epoch() const { return epoch_; }
  double last_lr() const { return groups_.front().last; }  // of the first group
  std::vector<double> last_lrs() const;

  void save(torch::serialize::OutputArchive& archive) const;
  // CorruptError if the archive does not hold a schedule; InvalidArgument if that has another number of groups.
  void load(torch::serialize::InputArchive& archive);

 protected:
  // `rates`: one for each group, or one for all.
  LRScheduler(ScheduledRates of, std::vector<Rate> rates);
  // The rates of groups with other parameters.
  template <typename Parameter, typename MakeRate>
  static std::vector<Rate> for_groups(const std::vector<Parameter>& of_groups, const MakeRate& make) {
    std::vector<Rate> rates;
    for (const Parameter& one : of_groups) rates.push_back(make(one));
    return rates;
  }

 private:
  struct Group {
    double first;
    double last = 0;      // what the schedule has set
    double seen = 0;      // what the optimizer made of it
    bool is_off = false;  // the rate is not that of `first` and the epoch, since someone has changed it
  };
  void go_to(int64_t epoch, bool from_now);
  void set(std::vector<Group> groups, int64_t epoch, std::optional<double> momentum);

  ScheduledRates of_;
  std::vector<Rate> rates_;
  std::vector<Group> groups_;
  int64_t epoch_ = 0;
};

struct OneCycleLROptions {
  double max_lr = 0;            // of all groups
  std::vector<double> max_lrs;  // or of each
  int64_t total_steps = 0;      // 1 or more; step() may not be called more often
  double pct_start = 0.3;       // of the steps: while the rate rises
  bool cosine = true;           // false: linear
  bool cycle_momentum = true;   // momentum, or the first of betas, falls while the rate rises
  double base_momentum = 0.85, max_momentum = 0.95;
  double div_factor = 25;         // the first rate is max_lr / div_factor
  double final_div_factor = 1e4;  // the last rate is the first / final_div_factor
  bool three_phase = false;       // fall as the rate has risen, then to the last rate
};

struct CyclicLROptions {
  double base_lr = 0, max_lr = 0;         // of all groups
  std::vector<double> base_lrs, max_lrs;  // or of each
  int64_t step_size_up = 2000;
  std::optional<int64_t> step_size_down;  // default: step_size_up
  enum class Mode { kTriangular, kTriangular2, kExpRange } mode = Mode::kTriangular;
  double gamma = 1;  // of kExpRange
  // Instead of a mode: by what the height of the wave is multiplied. It is a function of the number of the cycle, from
  // 1, or with scale_by_step of the number of steps.
  std::function<double(double)> scale_fn = {};
  bool scale_by_step = false;
  bool cycle_momentum = true;
  double base_momentum = 0.8, max_momentum = 0.9;
};

namespace rates {
Rate constant(double factor, int64_t total_iters);
Rate step(int64_t step_size, double gamma);
Rate multi_step(std::vector<int64_t> milestones, double gamma);
Rate exponential(double gamma);
Rate lambda(std::function<double(int64_t)> factor);
Rate multiplicative(std::function<double(int64_t)> factor);  // of the rate before
Rate cosine_annealing(int64_t t_max, double eta_min);
Rate cosine_annealing_warm_restarts(int64_t t_0, int64_t t_mult, double eta_min);
Rate linear(double start_factor, double end_factor, int64_t total_iters);
Rate polynomial(int64_t total_iters, double power);
Rate swa(double swa_lr, int64_t anneal_epochs, bool cosine);
Rate one_cycle(const OneCycleLROptions& options);  // of all groups
Rate cyclic(const CyclicLROptions& options);       // the same
// The first rate up to the first milestone, the next one from there on, from its own epoch 0, and so on.
Rate sequential(const std::vector<Rate>& rates, std::vector<int64_t> milestones);
// Each goes on from what those before it have made of the rate, at each epoch.
Rate chained(const std::vector<Rate>& rates);
}  // namespace rates

struct ConstantLR : LRScheduler {  // a smaller rate for the first total_iters epochs
  template <typename O>
  explicit ConstantLR(O& optimizer, double factor = 1.0 / 3, int64_t total_iters = 5)
      : LRScheduler(optimizer, rates::constant(factor, total_iters)) {}
};
struct StepLR : LRScheduler {  // multiplies by gamma every step_size epochs
  template <typename O>
  StepLR(O& optimizer, int64_t step_size, double gamma = 0.1) : LRScheduler(optimizer, rates::step(step_size, gamma)) {}
};
struct MultiStepLR : LRScheduler {  // multiplies by gamma at each of these epochs
  template <typename O>
  MultiStepLR(O& optimizer, std::vector<int64_t> milestones, double gamma = 0.1)
      : LRScheduler(optimizer, rates::multi_step(std::move(milestones), gamma)) {}
};
struct ExponentialLR : LRScheduler {
  template <typename O>
  ExponentialLR(O& optimizer, double gamma) : LRScheduler(optimizer, rates::exponential(gamma)) {}
};
struct LambdaLR : LRScheduler {  // the first rate times factor(epoch)
  template <typename O>
  LambdaLR(O& optimizer, std::function<double(int64_t)> factor)
      : LRScheduler(optimizer, rates::lambda(std::move(factor))) {}
  template <typename O>  // of each group
  LambdaLR(O& optimizer, const std::vector<std::function<double(int64_t)>>& factors)
      : LRScheduler(rates_of(optimizer), for_groups(factors, rates::lambda)) {}
};
// The rate before times factor(epoch), which is called for every epoch: for each sample if you count samples.
struct MultiplicativeLR : LRScheduler {
  template <typename O>
  MultiplicativeLR(O& optimizer, std::function<double(int64_t)> factor)
      : LRScheduler(optimizer, rates::multiplicative(std::move(factor))) {}
  template <typename O>  // of each group
  MultiplicativeLR(O& optimizer, const std::vector<std::function<double(int64_t)>>& factors)
      : LRScheduler(rates_of(optimizer), for_groups(factors, rates::multiplicative)) {}
};
struct CosineAnnealingLR : LRScheduler {  // half a cosine down to eta_min in t_max epochs, and then up again
  template <typename O>
  CosineAnnealingLR(O& optimizer, int64_t t_max, double eta_min = 0)
      : LRScheduler(optimizer, rates::cosine_annealing(t_max, eta_min)) {}
};
// Half a cosine down to eta_min in t_0 epochs, then again from the first rate in t_0 * t_mult, and so on.
struct CosineAnnealingWarmRestarts : LRScheduler {
  template <typename O>
  CosineAnnealingWarmRestarts(O& optimizer, int64_t t_0, int64_t t_mult = 1, double eta_min = 0)
      : LRScheduler(optimizer, rates::cosine_annealing_warm_restarts(t_0, t_mult, eta_min)) {}
};
struct LinearLR : LRScheduler {  // a warm-up: from start_factor to end_factor of the first rate
  template <typename O>
  explicit LinearLR(O& optimizer, double start_factor = 1.0 / 3, double end_factor = 1, int64_t total_iters = 5)
      : LRScheduler(optimizer, rates::linear(start_factor, end_factor, total_iters)) {}
};
struct PolynomialLR : LRScheduler {  // down to 0 in total_iters epochs
  template <typename O>
  explicit PolynomialLR(O& optimizer, int64_t total_iters = 5, double power = 1)
      : LRScheduler(optimizer, rates::polynomial(total_iters, power)) {}
};
struct SWALR : LRScheduler {  // from the first rate to swa_lr in anneal_epochs, for AveragedModel
  template <typename O>
  SWALR(O& optimizer, double swa_lr, int64_t anneal_epochs = 10, bool cosine = true)
      : LRScheduler(optimizer, rates::swa(swa_lr, anneal_epochs, cosine)) {}
  template <typename O>  // of each group
  SWALR(O& optimizer, const std::vector<double>& swa_lrs, int64_t anneal_epochs = 10, bool cosine = true)
      : LRScheduler(rates_of(optimizer),
                    for_groups(swa_lrs, [=](double lr) { return rates::swa(lr, anneal_epochs, cosine); })) {}
};
struct SequentialLR : LRScheduler {
  template <typename O>
  SequentialLR(O& optimizer, const std::vector<Rate>& rates, std::vector<int64_t> milestones)
      : LRScheduler(optimizer, rates::sequential(rates, std::move(milestones))) {}
};
struct ChainedScheduler : LRScheduler {
  template <typename O>
  ChainedScheduler(O& optimizer, const std::vector<Rate>& rates) : LRScheduler(optimizer, rates::chained(rates)) {}
};

class OneCycleLR : public LRScheduler {
 public:
  template <typename O>
  OneCycleLR(O& optimizer, const OneCycleLROptions& options) : OneCycleLR(rates_of(optimizer), options) {}

 private:
  OneCycleLR(const ScheduledRates& of, const OneCycleLROptions& options);
};

class CyclicLR : public LRScheduler {
 public:
  template <typename O>
  CyclicLR(O& optimizer, const CyclicLROptions& options) : CyclicLR(rates_of(optimizer), options) {}

 private:
  CyclicLR(const ScheduledRates& of, const CyclicLROptions& options);
};

struct ReduceLROnPlateauOptions {
  bool maximize = false;  // whether a larger metric is better
  double factor = 0.1;
  int64_t patience = 10;          // epochs without improvement that are waited out
  double threshold = 1e-4;        // by which a metric must be better
  bool relative = true;           // threshold is a part of the best metric; false: a difference
  int64_t cooldown = 0;           // epochs after a reduction that do not count
  double min_lr = 0, eps = 1e-8;  // smaller changes are not made
  std::vector<double> min_lrs;    // instead of min_lr: of each group
};
// Reduces the rate when a metric has stopped to improve. Give all ranks the same metric.
class ReduceLROnPlateau {
 public:
  template <typename O>
  explicit ReduceLROnPlateau(O& optimizer, const ReduceLROnPlateauOptions& options = {})
      : ReduceLROnPlateau(rates_of(optimizer), options) {}

  void step(double metric);
  double best() const { return best_; }
  std::vector<double> last_lrs() const { return of_.get(); }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);  // CorruptError if the archive does not hold one

 private:
  ReduceLROnPlateau(ScheduledRates of, const ReduceLROnPlateauOptions& options);
  bool is_better(double metric) const;

  ScheduledRates of_;
  ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_epochs_ = 0, cooldown_left_ = 0;
};

}  // namespace muster::optim
