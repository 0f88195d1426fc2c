// Adam's update of many parameters in one pass over their memory, and its gradient in another.
//
//   mean'   = beta1 * mean + (1 - beta1) * g
//   square' = beta2 * square + (1 - beta2) * g²
//   update  = mean' / (1 - beta1^count) / (sqrt(square' / (1 - beta2^count) + eps_root) + eps)
//
// All parameters of a batch are one node of autograd's graph. Its gradient is computed by a kernel too, unless
// create_graph is set: then it is made of ordinary operators, so that derivatives of any order exist.
//
// Where the root is of 0, its derivative counts as 0 instead of infinity, as that of |x| does in PyTorch: a parameter
// that never had a gradient adds nothing to the meta-gradient. (TorchOpt: NaN without its accelerated operator.)
//
// Thread-safety: none; a batch is one thread's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace muster::optim {

struct AdamNumbers {
  double beta1, beta2, eps, eps_root;
};

// The root, whose derivative at 0 counts as 0.
at::Tensor sqrt_without_infinity(const at::Tensor& x);

struct AdamBatch {
  std::vector<at::Tensor> updates, means, squares;
  std::vector<double> counts;

  static bool takes(const at::Tensor& g, const at::Tensor& mean, const at::Tensor& square);
  void add(const at::Tensor& g, const at::Tensor& mean, const at::Tensor& square, double count);
  // Replaces the tensors of the batch by the results. `inplace`: in the same memory, if no gradient needs the old
  // values.
  void run(const AdamNumbers& of, bool inplace);
};

}  // namespace muster::optim
