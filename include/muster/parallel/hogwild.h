// Hogwild: the ranks of one host train one copy of a model. Nobody waits for the others, or only for those that are far
// behind.
//
//   muster::Hogwild hogwild(net, {.max_staleness = 4});
//   torch::optim::SGD optimizer(net->parameters(), 0.01);
//   for (…) {
//     optimizer.zero_grad();
//     loss_function(net->forward(x), y).backward();
//     optimizer.step();        // changes the parameters of all ranks
//     hogwild.step();          // waits while this rank is more than 4 steps ahead of the slowest
//   }
//   hogwild.leave();           // the others do not wait for this rank any more
//   muster::barrier();         // now all ranks see the same parameters
//
// The constructor moves parameters and buffers to memory that all ranks share, whether they are processes or threads;
// the tensors of the module stay the same objects. From then on a rank reads what others write at the same time,
// without a lock: a step may be computed with some new and some old numbers, and of two steps that change a number at
// the same time one may be lost. So results differ from run to run. For models whose steps change few numbers (sparse
// gradients), and for small learning rates, this does no harm, and ranks of different speed all work all the time. Each
// rank has its own optimizer with its own states. Do not use DistributedDataParallel besides.
//
// Bounded staleness: with max_staleness = s, step() returns when every rank that has not left has made at least as many
// steps as this one, less s. So the numbers that a rank reads have all steps of the others but the last s or fewer.
// With 0 all ranks make their steps together, in any order.
//
// autograd notices an in-place change by this rank only, not one by others. Running statistics of batch norms are
// shared, too; with share_buffers = false each rank keeps its own buffers.
//
// Errors: InvalidArgument if ranks are on several hosts, or if a tensor is not a dense CPU tensor, shares its memory
// with another one, or belongs to a FullyShardedDataParallel; Mismatch if ranks have different modules; Unavailable if
// the host has too little memory. step(): PeerLost if a rank for which this one would wait has died; TimeoutError,
// which names the ranks that are behind. The step counts all the same. World::abort() does not end the wait.
// Memory: the model once per host. It is there until the last rank's tensors have gone.
// Thread-safety: one thread per rank. Source: Recht, Re, Wright, Niu, "Hogwild!: A Lock-Free Approach to Parallelizing
// Stochastic Gradient Descent", NIPS 2011; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
// Parameter Server", NIPS 2013; torch.nn.Module.share_memory().
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "muster/comm/group.h"

namespace muster {

struct HogwildOptions {
  Group group;                           // default: all ranks; on one host
  std::optional<int64_t> max_staleness;  // 0 or more steps; none: no rank waits
  bool share_buffers = true;             // false: each rank's own
  std::chrono::milliseconds timeout{0};  // of step(); 0: the World's
};

class Hogwild {
 public:
  // Collective. All ranks get rank 0's values.
  explicit Hogwild(torch::nn::Module& module, HogwildOptions options = {});
  template <std::derived_from<torch::nn::Module> Module>
  explicit Hogwild(const std::shared_ptr<Module>& module, HogwildOptions options = {})
      : Hogwild(*module, std::move(options)) {}
  template <typename Contained>
  explicit Hogwild(const torch::nn::ModuleHolder<Contained>& module, HogwildOptions options = {})
      : Hogwild(*module.ptr(), std::move(options)) {}
  Hogwild(const Hogwild&) = delete;
  Hogwild& operator=(const Hogwild&) = delete;
  ~Hogwild();  // leave()

  // After each step of this rank's optimizer. InvalidArgument after leave().
  void step();
  // This rank makes no more steps.
  void leave();
  // That a rank of the group has made.
  int64_t steps(int rank) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
