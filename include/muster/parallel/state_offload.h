// StateOffload: an optimizer's states in files instead of memory.
//
//   torch::optim::AdamW optimizer(net->parameters(), 1e-4);
//   muster::StateOffload offload(optimizer, {.folder = "/scratch"});    // before the first step
//   for (…) {
//     …
//     offload.step();                                                   // instead of optimizer.step()
//   }
//
// A state of min_bytes or more lies in a file that is mapped into memory. The kernel keeps of it what fits, writes back
// what changes, and drops it when memory is needed for something else; so a training that would not fit is one that
// waits for the disk in step(). Results are equal to the bit. The files have no names, and end with their tensors or
// with the process, however that ends.
//
// States of Adam, AdamW and RMSprop are made in files from the beginning, and a Snapshot restores them there. Those of
// SGD and Adagrad are in memory first, and move at the end of step(). Those of other optimizers stay in memory. With
// FullyShardedDataParallel each rank has states of what it owns; make the StateOffload after it.
//
// Memory limits: such pages count as those of a file. memory_plan() does not know of it; memory_of_host() leaves them
// out.
//
// Errors: Unavailable if a file cannot be made or the disk is full. Every state has its values then; from step(), the
// step has been made, and move() tries again. On a file system that copies on write, a disk that gets full later ends
// the process (SIGBUS). A child of fork() shares the states with its parent.
// Thread-safety: none; the optimizer's thread. The optimizer must outlive it. Source: the idea of ZeRO-Infinity
// (Rajbhandari et al., SC 2021), by the kernel's own means.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <filesystem>

namespace muster {

struct StateOffloadOptions {
  std::filesystem::path folder;                  // on a disk with room for the states
  std::size_t min_bytes = std::size_t{1} << 16;  // smaller tensors stay in memory
};

class StateOffload {
 public:
  StateOffload(torch::optim::Optimizer& optimizer, StateOffloadOptions options);

  // optimizer.step(), and moves what is in memory.
  void step();
  // Only the latter: if something else has called optimizer.step().
  void move();
  std::size_t bytes() const;  // of states in files

 private:
  bool is_large(const at::Tensor& tensor) const;

  torch::optim::Optimizer& optimizer_;
  const StateOffloadOptions options_;
};

}  // namespace muster
