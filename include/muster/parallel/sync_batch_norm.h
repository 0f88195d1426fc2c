// SyncBatchNorm: batch normalization with the mean and variance of all ranks' batches together.
//
//   auto net = std::make_shared<Net>();               // with nn::BatchNorm2d as members, in nn::Sequential, anywhere
//   muster::convert_sync_batchnorm(net);
//   muster::DistributedDataParallel ddp(net);
//
// convert_sync_batchnorm() synchronizes every nn::BatchNorm1d, 2d and 3d among the registered modules of a net, and
// what derives from them, in place: modules, holders, parameters and buffers stay the same objects. C++ modules call
// each other through their member variables, so modules put in their place would never be called. From the first call
// on, Muster's kernel stands behind libtorch's operator aten::batch_norm. It knows the tensors of converted modules;
// for all others it calls libtorch's kernel (docs/data_parallel.md). SyncBatchNorm is the same as a module of its own.
//
// Input: floating point, of size [N, C, …] with two dimensions or more (a BatchNorm2d still takes four only). N and
// what follows C may differ between ranks; N may be 0. Parameters and running statistics: of the input's dtype, or
// float32 for bfloat16 and float16. Names of parameters and buffers, and so saved files, are those of nn::BatchNorm2d.
//
// Results: output, gradient of the input and running statistics are those of BatchNorm over the ranks' batches one
// after another, as far as rounding allows; running statistics are equal to the bit on all ranks. Gradients of weight
// and bias are those of this rank's part, which DistributedDataParallel and FullyShardedDataParallel average. Gradients
// of any order. In training mode, and without running statistics in eval() mode too, forward() has one small
// collective, and backward() one if the input requires grad (a backward() with create_graph has some more). Otherwise
// there is none.
//
// All ranks of the group call forward() and backward() of the same layers in the same order; a rank without data calls
// them with an empty batch. The collectives run in a group of their own, so they never wait behind gradients. It is
// made once per group and World, and all layers share it.
//
// After conversion:
//   - clone() makes an ordinary BatchNorm: convert the clone. So does everything that gives the module other tensors
//     instead of other values, such as recover_state_dict() (muster/optim/meta.h) of copies with parameters and
//     buffers. to(), torch::load(), a Snapshot, optimizers, DistributedDataParallel and FullyShardedDataParallel may
//     come before or after the conversion.
//   - A rank whose own batch has exactly one value per channel gets "Expected more than 1 value per channel" from
//     libtorch's header, before Muster is asked. Avoid such a batch, or use SyncBatchNorm, which knows no such limit.
//   - A module without running statistics has an empty, unregistered tensor as running_mean, by which it is known.
//
// Errors: of construction and conversion: Aborted if this thread has no World; InvalidArgument if this rank is not in
// the group, or if the module is synchronized in another group already; Mismatch if ranks convert different modules. Of
// forward(): InvalidArgument for a wrong number of dimensions or channels, another dtype, or tensors on the device
// meta; c10::Error on all ranks if all batches together have one value per channel; Aborted if the World of the
// conversion has ended; those of all_gather.
// Thread-safety: one thread, as an nn::Module; while the first convert_sync_batchnorm() of a process runs, no other
// thread may run a batch norm. Source: torch.nn.SyncBatchNorm and its convert_sync_batchnorm().
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <iosfwd>
#include <memory>
#include <vector>

#include "muster/comm/group.h"
#include "muster/optim/tensor_members.h"

namespace muster {

// Its clones are synchronized, too.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions>,
                          public optim::TensorMembers {
 public:
  // SyncBatchNorm(64), or SyncBatchNorm(torch::nn::BatchNormOptions(64).affine(false), group). Every rank of the group
  // calls it.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Group& group = {});

  at::Tensor forward(const at::Tensor& input);

  void pretty_print(std::ostream& stream) const override;
  std::vector<at::Tensor*> tensor_members() override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::weak_ptr<const Group> group_;
};
TORCH_MODULE(SyncBatchNorm);

// Returns how many modules it has found. Every rank of the group calls it. To call it again is harmless.
size_t convert_sync_batchnorm(torch::nn::Module& net, const Group& group = {});
template <typename ModuleType>
size_t convert_sync_batchnorm(const std::shared_ptr<ModuleType>& net, const Group& group = {}) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*net), group);
}
template <typename ModuleType>
size_t convert_sync_batchnorm(const torch::nn::ModuleHolder<ModuleType>& net, const Group& group = {}) {
  return convert_sync_batchnorm(net.ptr(), group);
}

}  // namespace muster
