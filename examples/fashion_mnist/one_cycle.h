// The learning rate of each step: it rises linearly over the first fifth of the training, then falls to zero along a
// cosine. Source: Smith and Topin, "Super-Convergence", 2018.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <numbers>
#include <vector>

class OneCycle : public torch::optim::LRScheduler {
 public:
  // Sets the first step's rate; step() after each optimizer step sets the next one's.
  OneCycle(torch::optim::Optimizer& optimizer, double highest, int64_t steps)
      : LRScheduler(optimizer), highest_(highest), steps_(static_cast<double>(steps)) {
    step();
  }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("step", torch::IValue(int64_t{step_count_}));
  }
  void load(torch::serialize::InputArchive& archive) {
    torch::IValue step;
    archive.read("step", step);
    step_count_ = static_cast<unsigned>(step.toInt());
  }

 protected:
  std::vector<double> get_lrs() override {
    constexpr double kRise = 0.2;
    const double way = (step_count_ + 0.5) / steps_;
    const double height =
        way < kRise ? way / kRise : (1 + std::cos(std::numbers::pi * std::min((way - kRise) / (1 - kRise), 1.0))) / 2;
    return std::vector<double>(get_current_lrs().size(), highest_ * height);
  }

 private:
  double highest_, steps_;
};
