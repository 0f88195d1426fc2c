// What a snapshot is made of: named tensors. All else (numbers, strings, lists) becomes tensors of a kind.
//
// Thread-safety: values; copies share the tensor's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"

namespace muster::checkpoint {

// A tensor that belongs to all ranks.
inline constexpr int kShared = -1;

struct Entry {
  std::string item;  // as the user called it: "model"
  std::string name;  // within the item: "conv1.weight"
  std::string kind;  // what it stands for: "tensor", or as archive.h has it
  int rank = kShared;
  int64_t order = 0;  // of its item's entries
  at::Tensor tensor;  // on the CPU, contiguous

  // "model/conv1.weight", "rank 1/sampler/index": for messages.
  std::string full_name() const {
    std::string all = rank == kShared ? item : text("rank ", rank, "/", item);
    if (!name.empty()) all += "/" + name;
    return all;
  }
};

using Entries = std::vector<Entry>;

}  // namespace muster::checkpoint
