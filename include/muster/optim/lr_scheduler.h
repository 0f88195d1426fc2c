// Schedules of the learning rate, for everything that has lr() and set_lr(): functional optimizers here, and
// DistributedOptimizer, where the new rate is that of the next step on all owners.
//
//   optim::CosineAnnealingLR schedule(adam, 100);     // from adam's present rate down to 0 in 100 epochs
//   for (…) { …; schedule.step(); }
//
// The rates are those of torch.optim.lr_scheduler: each is a function of the first rate and the epoch. So step(epoch)
// may take any epoch, and a training that is resumed calls schedule.step(epochs_done).
//
// Errors: InvalidArgument for options out of their range, and those of set_lr(). Thread-safety: none; the optimizer
// must outlive its schedule.
// Source: torch.optim.lr_scheduler.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace muster::optim {

// A schedule from any function of the first rate and the epoch.
class LRScheduler {
 public:
  using Rate = std::function<double(double first, int64_t epoch)>;

  template <typename O>
  LRScheduler(O& optimizer, Rate rate)
      : LRScheduler(
            optimizer.lr(), [&optimizer](double lr) { optimizer.set_lr(lr); }, std::move(rate)) {}

  void step() { step(epoch_ + 1); }
  void step(int64_t epoch);
  int64_t last_epoch() const { return epoch_; }
  double last_lr() const { return rate_(first_, epoch_); }

 private:
  LRScheduler(double first, std::function<void(double)> set, Rate rate);

  double first_;
  std::function<void(double)> set_;
  Rate rate_;
  int64_t epoch_ = 0;
};

namespace rates {
LRScheduler::Rate step(int64_t step_size, double gamma);
LRScheduler::Rate multi_step(std::vector<int64_t> milestones, double gamma);
LRScheduler::Rate exponential(double gamma);
LRScheduler::Rate lambda(std::function<double(int64_t)> factor);
LRScheduler::Rate cosine_annealing(int64_t t_max, double eta_min);
LRScheduler::Rate linear(double start_factor, double end_factor, int64_t total_iters);
}  // namespace rates

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
};
struct CosineAnnealingLR : LRScheduler {  // half a cosine down to eta_min in t_max epochs, and then up again
  template <typename O>
  CosineAnnealingLR(O& optimizer, int64_t t_max, double eta_min = 0)
      : LRScheduler(optimizer, rates::cosine_annealing(t_max, eta_min)) {}
};
struct LinearLR : LRScheduler {  // a warm-up: from start_factor to end_factor of the first rate
  template <typename O>
  LinearLR(O& optimizer, double start_factor = 1.0 / 3, double end_factor = 1, int64_t total_iters = 5)
      : LRScheduler(optimizer, rates::linear(start_factor, end_factor, total_iters)) {}
};

}  // namespace muster::optim
