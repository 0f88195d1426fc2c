// Finds the first step in which ranks that are to have the same model do not.
//
// Every so many backward() calls each rank hashes the bytes of its parameters, of their gradients, and of buffers that
// are to be equal, and compares the hashes with those of all ranks: 16 bytes per parameter travel, and 8 per buffer.
// Equal hashes of 64 bits of different tensors are as good as impossible.
//
// Thread-safety: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {

class DivergenceWatch {
 public:
  DivergenceWatch(std::vector<parallel::NamedTensor> parameters, int64_t every, Group group)
      : parameters_(std::move(parameters)), every_(every), group_(std::move(group)) {}

  // After each backward() that averages, on all ranks. `is_complete`: whether this rank has all of its gradients; if
  // not, they are not compared. `buffers`: gives as many on all ranks; undefined where they need not be equal. Mismatch
  // on all ranks, which names the first tensor that differs, the ranks and the call.
  void after_backward(bool is_complete, const std::function<std::vector<parallel::NamedTensor>()>& buffers);

 private:
  const std::vector<parallel::NamedTensor> parameters_;
  const int64_t every_;
  const Group group_;
  int64_t calls_ = 0;
};

}  // namespace muster::ddp
