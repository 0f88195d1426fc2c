// PostLocalSgdOptimizer: any optimizer of torch::optim, after whose steps a ModelAverager averages the parameters.
//
//   muster::PostLocalSgdOptimizer<torch::optim::SGD> optimizer(
//       net->parameters(), torch::optim::SGDOptions(0.1), {.periods = {{4, {}}}, .warmup_steps = 100});
//   ddp.register_comm_hook(muster::comm_hooks::PostLocalSgd({.subgroup = my_host, .start_local_sgd_iter = 100}));
//
// It is an optimizer of its class in all else. Its states are each rank's own, so a muster::Snapshot stores them per
// rank. So is the model between two averages: snapshot.add("model", net, {.per_rank = true}). Its archive is one of the
// class, with the number of the step besides; load() of an archive without that begins at step 0.
//
// Errors, thread-safety: as ModelAverager; a step() that throws averages first. Source: torch's PostLocalSGDOptimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <exception>
#include <utility>
#include <vector>

#include "muster/parallel/model_averager.h"

namespace muster {

template <std::derived_from<torch::optim::Optimizer> Inner>
class PostLocalSgdOptimizer final : public Inner, public AveragesModel {
 public:
  // As `Inner(parameters, defaults)`, and so for groups of parameters.
  template <typename Options>
  PostLocalSgdOptimizer(std::vector<at::Tensor> parameters, Options defaults, ModelAveragerOptions averaging)
      : Inner(std::move(parameters), std::move(defaults)), averager_(std::move(averaging)) {}
  template <typename Options>
  PostLocalSgdOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                        ModelAveragerOptions averaging)
      : Inner(groups, std::move(defaults)), averager_(std::move(averaging)) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    std::exception_ptr failure;
    try {
      loss = Inner::step(std::move(closure));
    } catch (...) {
      failure = std::current_exception();  // the other ranks would wait for this one's average
    }
    std::vector<at::Tensor> parameters;
    for (const auto& group : this->param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.requires_grad()) parameters.push_back(parameter);
    averager_.average_parameters(parameters);
    if (failure) std::rethrow_exception(failure);
    return loss;
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    Inner::save(archive);
    torch::serialize::OutputArchive averager(archive.compilation_unit());
    averager_.save(averager);
    archive.write("averager", averager);
  }
  void load(torch::serialize::InputArchive& archive) override {
    Inner::load(archive);
    torch::serialize::InputArchive averager;
    averager_ = ModelAverager(averager_.options());
    if (archive.try_read("averager", averager)) averager_.load(averager);
  }

  const ModelAverager& averager() const { return averager_; }

 private:
  ModelAverager averager_;
};

}  // namespace muster
