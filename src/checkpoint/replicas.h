// Copies of shards on other hosts: each rank sends its shard to the ranks that keep replicas of it.
//
// Thread-safety: none; collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <vector>

#include "checkpoint/container.h"
#include "checkpoint/problem.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

class Replicas {
 public:
  explicit Replicas(const SnapshotPlace& here);  // takes the memory that send() needs

  // All at the same time. `shards`: by rank. Adds what this rank has written. Returns what went wrong here.
  Problem send(const std::vector<Shard>& shards, std::vector<std::filesystem::path>& written) const;

 private:
  struct Edge {
    int from = 0, to = 0;
    at::Tensor memory;  // for a piece
  };

  const SnapshotPlace& here_;
  std::vector<Edge> edges_;  // that this rank sends or gets
};

}  // namespace muster::checkpoint
