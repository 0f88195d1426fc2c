// The folder of a training's snapshots, and the names in it:
//
//     step-500.snapshot                        a snapshot: the whole of it, or the manifest of its shards
//     step-500.shard-1-of-4.9c41e07a.snapshot  rank 1's part of one; the last letters tell apart two of the same step
//     step-500.snapshot.1f0c33aa.tmp           being written, or left by somebody who was killed
//
// Other names are left alone. Thread-safety: const after construction; files are the file system's.
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
  explicit Folder(std::filesystem::path path);  // makes it; Unavailable

  // Takes the folder for this process, as long as one of its Folders that did lives: two trainings that save in one
  // folder would remove each other's snapshots. For rank 0. Unavailable where another process has it and keeps it for
  // two seconds (one that was killed a moment ago may still be dying). By flock(2); a file system without that has no
  // such protection.
  void claim();

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path snapshot(int64_t steps) const;
  std::filesystem::path shard(int64_t steps, int rank, int world_size, const std::string& mark) const;

  std::vector<int64_t> snapshots() const;  // their steps, the newest first; Unavailable
  void remove_snapshot(int64_t steps) const noexcept;

  // The shards and temporary files that `rank` of `world_size` may remove, because only it could be writing them. Rank
  // 0 has also those of ranks that are no more, and of snapshots. Shards in `keep`, and of steps in `keep_steps`, stay.
  void remove_shards(int rank, int world_size, const std::set<std::string>& keep,
                     const std::set<int64_t>& keep_steps) const noexcept;
  void remove_temporaries(int rank, int world_size) const noexcept;

 private:
  std::filesystem::path path_;
  std::shared_ptr<UniqueFd> lock_;
};

}  // namespace muster::checkpoint
