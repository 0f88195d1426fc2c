// A snapshot consists of named tensors. Everything else (numbers, strings, lists) is stored as tensors, each with a
// kind that tells what it was.
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

// The rank of an entry that belongs to all ranks.
inline constexpr int kShared = -1;
inline constexpr int kEveryRank = -1;
inline constexpr int kIfPerRank = -2;

struct Entry {
  std::string item;  // the name that the user gave it: "model"
  std::string name;  // within the item: "conv1.weight"
  std::string kind;  // what the tensor stands for: "tensor", "parameter", "number", or a kind from archive.h
  int rank = kShared;
  int64_t order = 0;  // its position among its item's entries
  at::Tensor tensor;  // on the CPU, contiguous
  // The rank of the World that stores the tensor, if no other can; or kIfPerRank: it is stored only in an item that
  // each rank stores.
  int only = kEveryRank;
  bool in_place = false;  // when it is loaded: the tensor is the memory that Item::memory_for() gave

  // "model/conv1.weight", "rank 1/sampler/index": for messages.
  std::string full_name() const {
    std::string all = rank == kShared ? item : text("rank ", rank, "/", item);
    if (!name.empty()) all += "/" + name;
    return all;
  }
};

using Entries = std::vector<Entry>;

}  // namespace muster::checkpoint
