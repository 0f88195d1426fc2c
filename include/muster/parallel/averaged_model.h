// AveragedModel: averages of a model's parameters over its steps, which often predict better than the last parameters.
//
//   muster::AveragedModel ema(net, {.decay = 0.999});      // an exponential moving average
//   muster::AveragedModel swa(net);                         // the plain average: stochastic weight averaging
//   for (…) { …; optimizer.step(); ema.update(); }
//   {
//     const auto averaged = ema.in_use();                   // the module has the averages now
//     evaluate(net);
//   }                                                       // and its parameters again
//   muster::update_bn(net, [&] { for (auto& batch : loader) net->forward(batch.data); });
//
// The first update() copies. With DistributedDataParallel every rank has the same averages, and nothing is
// communicated. Each rank needs memory for one more copy of the parameters, and in_use() for another one; with
// `.in_float` those of 16 bits are averaged as floats.
//
// Buffers, such as the running statistics of batch norms, are those of the module at the last update(), or averages too
// with `.average_buffers`; integers always are the last ones. in_use() exchanges them as well. After a plain average,
// statistics do not fit the averaged parameters: update_bn() makes new ones.
//
// A Snapshot stores it: snapshot.add("ema", ema, {.per_rank = false}).
//
// Errors: InvalidArgument for a decay outside of [0, 1], for in_use() before the first update(), and for update()
// meanwhile; if the module has got other parameters since; for parameters of a FullyShardedDataParallel. Thread-safety:
// none; that of the module, which must outlive it.
// Source: torch.optim.swa_utils.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/comm/group.h"

namespace muster {

struct AveragedModelOptions {
  std::optional<double> decay;   // of the old average at each update(); none: all updates weigh the same
  bool average_buffers = false;  // of floats
  bool in_float = false;         // averages of float16 and bfloat16 are floats
};

class AveragedModel {
 public:
  explicit AveragedModel(torch::nn::Module& module, AveragedModelOptions options = {});
  template <std::derived_from<torch::nn::Module> Module>
  explicit AveragedModel(const std::shared_ptr<Module>& module, AveragedModelOptions options = {})
      : AveragedModel(*module, options) {}
  template <typename Contained>
  explicit AveragedModel(const torch::nn::ModuleHolder<Contained>& module, AveragedModelOptions options = {})
      : AveragedModel(*module.ptr(), options) {}
  AveragedModel(const AveragedModel&) = delete;
  AveragedModel& operator=(const AveragedModel&) = delete;
  ~AveragedModel();

  // After optimizer.step().
  void update();
  int64_t updates() const;

  // While the guard lives, the module has the averages. It must not be trained meanwhile.
  class [[nodiscard]] InUse {
   public:
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;
    ~InUse();

   private:
    friend class AveragedModel;
    explicit InUse(AveragedModel& of);
    AveragedModel& of_;
    std::vector<at::Tensor> own_;  // the module's values
  };
  InUse in_use() { return InUse(*this); }

  // The average of a parameter or buffer, by its name in the module. InvalidArgument if there is none.
  at::Tensor average(const std::string& name) const;
  // Copies the averages into the module, for good.
  void copy_to_module();

  void save(torch::serialize::OutputArchive& archive) const;
  // CorruptError if the archive does not hold averages; InvalidArgument if they are of another module.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

struct UpdateBnOptions {
  std::optional<Group> group;  // the statistics become the means of these ranks'; none: each rank's own
};
// Makes new running statistics of all batch norms in the module, from the batches that `forward_all` passes through it:
// the mean over batches. The module is in training mode meanwhile. Does nothing without batch norms.
void update_bn(torch::nn::Module& module, const std::function<void()>& forward_all,
               const UpdateBnOptions& options = {});

}  // namespace muster
