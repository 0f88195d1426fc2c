// Sums in .grad whose bits do not depend on the order in which gradients come from other workers: each part is added in
// the place of its path (path.h).
//
// A worker that serves others uses it if the program asks libtorch for deterministic algorithms
// (at::globalContext().setDeterministicAlgorithms). Otherwise libtorch adds each part to .grad as it comes.
//
// Nobody knows which part is the last, and .grad is a plain tensor that must be right after each part. So the parts are
// kept, and each that comes makes the sum anew, into the same tensor: .grad before the first part, plus all parts in
// the order of their paths. If anybody else has set or changed .grad meanwhile, as zero_grad() and a local backward()
// do, the sum begins anew with what is there. The first part is not kept apart, but is .grad itself, until a second one
// comes: a leaf that gets one part in each step costs nothing.
//
// Thread-safety: all methods. The mutex of a leaf's node is held while its sum is made, as libtorch does.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "autograd/graph/node.h"
#include "autograd/graph/path.h"
#include "autograd/graph/sweep.h"

namespace muster::autograd {

class OrderedSums {
 public:
  // Whether add() may do what the leaf's node does: nobody has hooks that the engine calls after the node.
  static bool can_add_to(torch::autograd::AccumulateGrad& leaf);

  // Adds the gradient to the leaf's .grad, in the place of (path, position). Not differentiable. Runs the hook that
  // waits for .grad (register_post_accumulate_grad_hook), if there is one.
  void add(const Path& path, size_t position, torch::autograd::AccumulateGrad& leaf, Tensor gradient);

 private:
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  struct Sum {
    explicit Sum(const Tensor& leaf) : leaf(leaf.getIntrusivePtr()) {}
    // The rest is protected by the mutex of the leaf's node.
    bool is(const Tensor& now) const;  // .grad, as add() has left it

    const Weak leaf;  // nothing else gets its address
    Weak grad{c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>()};
    uint32_t version = 0;
    Tensor before;  // undefined: there was no .grad
    Parts parts;    // an undefined one is .grad itself
  };
  std::shared_ptr<Sum> sum_of_leaf(const Tensor& leaf);

  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, std::shared_ptr<Sum>> sums_;
  Sweep sweep_;
};

}  // namespace muster::autograd
