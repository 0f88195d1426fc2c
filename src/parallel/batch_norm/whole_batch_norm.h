// Batch normalization with the statistics of all ranks' batches together.
//
// Forward: each rank computes count, mean and variance of each channel of its batch, gathers those of all, and merges
// them in the order of ranks, in float64. So all ranks have the same statistics to the bit. Then it normalizes its own
// batch, as BatchNorm does in evaluation.
// Backward: each rank sums, per channel, the gradients, and their products with the normalized input. One all_reduce
// adds these sums, and one pass over the batch makes the gradient of the input of them. A backward() of which autograd
// makes a graph is composed of operators and collectives that have derivatives themselves.
//
// Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979;
// Ioffe, Szegedy, "Batch Normalization", 2015; torch.nn.SyncBatchNorm.
// Where a rank computes parts of its batch apart from each other (batch_part.h), the parts of all ranks take the place
// of the ranks' batches.
// Thread-safety: as collectives.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

#include "muster/comm/group.h"

namespace muster::parallel {

struct BatchNormCall {
  at::Tensor input;
  std::optional<at::Tensor> weight, bias, running_mean, running_var;  // also of undefined tensors: there is none
  double momentum = 0.1, eps = 1e-5;
};

// `group` is one of group_beside(), which ends with its World. In training, or without running statistics. Every rank
// of the group calls it, and later its backward(). Batches may have different sizes, and none. Errors: InvalidArgument,
// before anything is sent; c10::Error on every rank if all batches together have one value per channel; Mismatch if
// ranks have different numbers of channels; Aborted if the World has ended.
at::Tensor whole_batch_norm(const BatchNormCall& call, const std::weak_ptr<const Group>& group);

// Whether the net has a SyncBatchNorm, or a module that convert_sync_batchnorm() has synchronized.
bool has_synchronized_norm(torch::nn::Module& net);
// Buffers that are not made of the batches of all ranks of the group: those of BatchNorm and SyncBatchNorm that are not
// synchronized in it, and of InstanceNorm.
std::vector<at::Tensor> statistics_of_own_batches(torch::nn::Module& net, const Group& group);

// libtorch's own, of this rank's batch alone.
at::Tensor local_batch_norm(const BatchNormCall& call, bool training);

}  // namespace muster::parallel
