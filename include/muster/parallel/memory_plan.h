// The memory that a training needs, before it is tried; and the memory that it has.
//
//   const auto plan = muster::memory_plan(*net, world, [&] { return loss_of(net->forward(x)); });
//   std::cout << plan.table();
//   …                                                         // FullyShardedDataParallel, an optimizer, some steps
//   std::cout << plan.table(muster::memory_of_host(world));   // after a forward(): with what there is now
//
//                            each rank   this host, 2 ranks
//     parameters                49 MiB               97 MiB
//     gradients                 49 MiB               98 MiB
//     optimizer states          97 MiB              194 MiB
//     communication              8 MiB               16 MiB
//     activations              131 MiB              261 MiB
//     program                   61 MiB              123 MiB
//     planned                  395 MiB              790 MiB
//     measured                                      802 MiB, 1.6 % more
//
// A rule of thumb for Adam: with everything in float32, parameters, gradients and states are 16 bytes per parameter. In
// mixed precision they are 16 as well: 2 and 2 in 16 bits, and 12 for the states with a float32 copy.
//
// The plan has what a step keeps. A step needs more for a moment: the results of operators that backward does not need,
// what an optimizer's kernel allocates, gradients on their way to their owners. And the C library keeps freed memory
// for later, as much as a sixth of all in the models of docs/fsdp.md. So a limit of memory should leave a fifth to
// spare.
//
// Thread-safety: all functions; memory_plan() and memory_of_host() are collective: every rank of the World calls them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "muster/comm/world.h"
#include "muster/parallel/fsdp.h"

namespace muster {

struct MemoryPlanOptions {
  bool fully_sharded = true;  // FullyShardedDataParallel over all ranks; false: DistributedDataParallel
  double states = 2;          // how many tensors of a parameter's size the optimizer keeps: Adam 2, SGD with momentum 1
  FsdpOptions fsdp = {};      // the strategy and the units; the group is that of all ranks
};

struct MemoryPlan {
  struct Row {
    std::string what;
    std::size_t rank = 0, host = 0;  // bytes: of a rank, on average; of all ranks of this host together
  };
  // Parameters, their copies (mixed precision), gradients, optimizer states, communication (gradients on their way to
  // their owners, on one host or with kFullShard), gathered units (kFullShard), activations, program. In
  // DistributedDataParallel, communication needs no memory of its own: gradients are reduced where they lie.
  //
  // On one host, `communication` has one large gradient of each size and rank, unless the rank owns all of this size.
  // There are more while a rank is behind the others, and their memory stays for later steps. A backward() that adds to
  // averages needs as much again as `gradients`; zeros that zero_grad() has left do not count as such.
  std::vector<Row> rows;
  int ranks = 1;  // of this host

  std::size_t rank() const;  // sums
  std::size_t host() const;
  // As above, without the last line if `measured` (bytes of this host) is 0.
  std::string table(std::size_t measured = 0) const;
};

// `program` is what the processes of this host have then, without the module's parameters. So call it when the module
// has been made, before or after FullyShardedDataParallel, and before the first step.
//
// Calls forward(), unless it is null, and counts as activations what the graph of its result keeps for backward: each
// storage once, and none that lives on without the graph, as parameters do. It takes them to be the same on each rank.
// In mixed precision let it compute in about the same dtypes (Autocast), because the plan is made of the module itself.
// The call has the effects that it always has: it draws random numbers, for example. If it throws, it must throw on
// every rank. InvalidArgument if a parameter is not dense, or with a forward() over parameters that kFullShard has
// spread (call it before); Unavailable in a Python process.
MemoryPlan memory_plan(const torch::nn::Module& module, const World& world, const std::function<at::Tensor()>& forward,
                       const MemoryPlanOptions& options = {});

// The memory that all processes of this host's ranks have now, in bytes: their own pages, and those that they share,
// once. It gives back first what the C library keeps of freed memory. Pages of files (programs, libraries, mapped data)
// do not count, because the kernel can drop them, nor do pages in the swap. Unavailable if the kernel does not tell
// (/proc/self/smaps_rollup; an old kernel does not tell files apart, and counts them).
std::size_t memory_of_host(const World& world);

}  // namespace muster
