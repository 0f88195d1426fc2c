// ModelAverager: averages parameters over ranks every some steps, for training that does not average gradients in each.
//
//   muster::ModelAverager averager({.periods = {{4, my_host}, {16, {}}}, .warmup_steps = 100});
//   …
//   optimizer.step();
//   averager.average_parameters(net->parameters());     // every 4th step in the host, every 16th over all ranks
//
// Local SGD, with DistributedDataParallel and comm_hooks::PostLocalSgd or without. After a step whose number (of calls,
// from 0) is at least warmup_steps and a multiple of some periods, it averages among the ranks of the largest of them.
// All ranks must call it with the same parameters in the same order; with momentum, optimizer states stay each rank's
// own.
//
// Errors: InvalidArgument for no period, one below 1, or a group without this rank; those of all_reduce. Memory: a copy
// of the parameters of one dtype. Thread-safety: one thread. Source: torch's HierarchicalModelAverager, and its
// PeriodicModelAverager where warmup_steps is a multiple of the period.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <map>
#include <vector>

#include "muster/comm/group.h"

namespace muster {

struct ModelAveragerOptions {
  std::map<int64_t, Group> periods;  // by number of steps; a default Group: all ranks
  int64_t warmup_steps = 0;
};

class ModelAverager {
 public:
  explicit ModelAverager(ModelAveragerOptions options);
  // Returns whether it averaged.
  bool average_parameters(const std::vector<at::Tensor>& parameters);

  int64_t step() const { return step_; }
  const ModelAveragerOptions& options() const { return options_; }
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  ModelAveragerOptions options_;
  int64_t step_ = 0;
};

// An optimizer that averages the model every some steps. Between averages each rank has a model and states of its own.
class AveragesModel {
 public:
  virtual ~AveragesModel() = default;

 protected:
  AveragesModel() = default;
};

}  // namespace muster
