// GradScaler: keeps gradients in float16 from becoming 0, and steps with infinite ones from being made.
//
//   muster::GradScaler scaler;
//   for (…) {
//     optimizer.zero_grad();
//     scaler.scale(loss_function(model(x), y)).backward();   // gradients are scale() times as large
//     scaler.unscale_(optimizer);                            // only to look at them or to clip them before the step
//     model.clip_grad_norm_(1.0);
//     scaler.step(optimizer);                                // unless a gradient of a rank is infinite or NaN
//     scaler.update();                                       // then the scale is smaller next time
//   }
//
// All ranks decide alike: unscale_() and step() ask whether any rank has found an infinity or a NaN, in one all_reduce
// of 4 bytes. So one class serves one process, DistributedDataParallel, and FullyShardedDataParallel, whose ranks have
// different gradients. Every rank calls it for the same optimizers in the same order. Without a World, and in a group
// of one rank, nothing is asked.
//
// bfloat16 has the range of float32, and needs no scaler.
//
// Snapshots: add it as an object that saves itself, shared: snapshot.add("scaler", scaler, {.per_rank = false}).
//
// Errors: InvalidArgument for options out of their range, and as said below; those of all_reduce. Thread-safety: none.
// Source: torch.amp.GradScaler, whose numbers it gives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <map>
#include <optional>

#include "muster/comm/group.h"

namespace muster {

struct GradScalerOptions {
  double init_scale = 65536;       // above 0
  double growth_factor = 2;        // above 1: of the scale, after growth_interval steps without infinities
  double backoff_factor = 0.5;     // between 0 and 1: of the scale, after a step with an infinity
  int64_t growth_interval = 2000;  // above 0
  bool enabled = true;             // false: scale() returns the loss, step() steps, and all else does nothing
  Group group;                     // default: all ranks
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  // The tensor times the scale; differentiable. The loss should be float32: in float16 it would be infinite.
  at::Tensor scale(const at::Tensor& loss) const;
  // Divides the gradients of the optimizer's parameters by the scale. InvalidArgument if they have been divided already
  // since the last update(), if step() was called, or if a parameter is in float16: its gradient would lose what the
  // scale has saved.
  void unscale_(torch::optim::Optimizer& optimizer);
  // unscale_(), if it was not called; then optimizer.step(), if all ranks' gradients are finite. Returns whether it
  // stepped. InvalidArgument if it was called already since the last update().
  bool step(torch::optim::Optimizer& optimizer);
  // At the end of each iteration: adapts the scale to what all optimizers of the iteration have found, or sets it.
  // InvalidArgument if there was none.
  void update();
  void update(double new_scale);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  // Iterations without an infinity since the scale changed.
  int64_t growth_tracker() const { return growth_tracker_; }
  bool is_enabled() const { return options_.enabled; }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Seen {
    bool found_infinity = false, has_stepped = false;
  };
  Seen& unscale(torch::optim::Optimizer& optimizer);

  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
  std::map<const torch::optim::Optimizer*, Seen> seen_;  // since the last update()
};

}  // namespace muster
