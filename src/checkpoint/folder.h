// The folder of a training's snapshots, and the names in it:
//
//     step-500.snapshot.safetensors                        a snapshot: all of it, or the manifest of its shards
//     step-500.shard-1-of-4.9c41e07a.snapshot.safetensors  rank 1's part of one; the mark tells apart two of the same step
//     step-500.snapshot.safetensors.1f0c33aa.tmp           being written, or left by a process that was killed
//
// Files with other names are left alone. Thread-safety: const functions may run concurrently; the file system orders
// what they do.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"

namespace muster::checkpoint {

class Folder {
 public:
  explicit Folder(std::filesystem::path path);  // creates the folder; throws Unavailable

  // Locks the folder for this process, until the last of the process's Folders that have claimed it is destroyed: two
  // trainings that save in one folder would remove each other's snapshots. Rank 0 calls this. Throws Unavailable if
  // another process holds the lock for two more seconds (one that was killed a moment ago may still be dying). The lock
  // is flock(2)'s; on a file system without it nothing is protected.
  void claim();

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path snapshot(int64_t steps) const;
  std::filesystem::path shard(int64_t steps, int rank, int world_size, const std::string& mark) const;

  std::vector<int64_t> snapshots() const;  // their steps, the newest first; throws Unavailable
  void remove_snapshot(int64_t steps) const noexcept;

  // Remove the shards and the temporary files that only `rank` of `world_size` could be writing. Rank 0 also removes
  // those of ranks that no longer exist, and the temporary files of snapshots. Shards in `keep`, and those of steps in
  // `keep_steps`, stay.
  void remove_shards(int rank, int world_size, const std::set<std::string>& keep,
                     const std::set<int64_t>& keep_steps) const noexcept;
  void remove_temporaries(int rank, int world_size) const noexcept;

 private:
  std::filesystem::path path_;
  std::shared_ptr<UniqueFd> lock_;
};

}  // namespace muster::checkpoint
