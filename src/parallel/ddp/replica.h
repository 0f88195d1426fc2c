// What the parts of a DistributedDataParallel share: replica.cpp (forward and backward), join.cpp and shards.cpp.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/comm/group.h"
#include "muster/parallel/ddp.h"
#include "parallel/ddp/divergence.h"
#include "parallel/ddp/join.h"
#include "parallel/ddp/logging.h"
#include "parallel/ddp/private_copies.h"
#include "parallel/ddp/shards.h"
#include "parallel/gradients/gradient_reducer.h"
#include "parallel/modules/parameter_watch.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {

struct Replica::Impl {
  std::shared_ptr<torch::nn::Module> module;
  DdpOptions options;
  Group group;  // resolved
  std::vector<parallel::NamedTensor> buffers;
  std::vector<parallel::NamedTensor> everything;  // parameters and buffers
  std::vector<at::Tensor> trainable;
  std::optional<parallel::GradientReducer> gradients;
  std::optional<Shards> shards;
  // Within join():
  std::shared_ptr<Meetings> meetings;
  std::vector<Impl*> joined;  // this one, and others
  int place_in_join = 0;      // among these
  std::function<void()> after_backward;

  StepTimes times;
  std::optional<DivergenceWatch> watch;
  std::optional<parallel::ParameterWatch> parameter_watch;
  std::unique_ptr<PrivateCopies> copies;  // in mixed precision

  void check_parameters() {
    if (!module->is_training() || !at::GradMode::is_enabled()) return;
    parameter_watch->check_averaged();
    parameter_watch->check_for_new(*module);
  }
  bool broadcasts() const { return options.broadcast_buffers && module->is_training() && !buffers.empty(); }
  // Those that stay equal on all ranks although DDP does not make them so; undefined where they need not.
  std::vector<parallel::NamedTensor> equal_buffers() const;
  Meetings::Meeting meet(Meetings::Event mine);
  void follow(std::exception_ptr& failure);
  // What fn() computes in mixed precision, if that is chosen.
  at::Tensor with_copies(const std::function<at::Tensor()>& fn) const;
  // InvalidArgument, which says that it does not go with `of`.
  void require_no_synchronized_norm(const char* of) const;
};

}  // namespace muster::ddp
