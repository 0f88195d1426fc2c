// Reads and verifies the files of one snapshot, each on one rank. The other ranks learn what is in them.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "checkpoint/container.h"
#include "checkpoint/problem.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

// Shard `index` of the snapshot that the manifest is about, verified. CorruptError, too, if it is another's.
Container read_shard(const std::filesystem::path& folder, const About& manifest, size_t index);
// Only its outline().
Container outline_of_shard(const std::filesystem::path& folder, const About& manifest, size_t index);

class Reading {
 public:
  struct File {
    int holder = 0;       // the rank that has read it
    Container container;  // elsewhere only a directory
  };

  Reading(const SnapshotPlace& here, int64_t steps) : here_(here), steps_(steps) {}

  // Collective. Rank 0 reads the only file, or the manifest; then rank r reads the shards of ranks r, r + size and so on.
  // Returns why the snapshot is refused; the same on all ranks. Throws a problem that an older one would have, too.
  Problem read();

  const About& about() const { return about_; }
  bool is_of_other_ranks() const { return about_.world_size != here_.size; }  // of another number of them
  const std::vector<File>& files() const { return files_; }

 private:
  Problem read_shards();

  const SnapshotPlace& here_;
  const int64_t steps_;
  About about_;
  std::vector<File> files_;
};

}  // namespace muster::checkpoint
