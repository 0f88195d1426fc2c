// The folder of a training's snapshots, and the names in it:
//
//     step-500.snapshot.safetensors                        a snapshot: all of it, or the manifest of its shards
//     step-500.shard-1-of-4.9c41e07a.snapshot.safetensors  rank 1's part of one; the mark tells two of a step apart
//     step-500.snapshot.safetensors.1f0c33aa.tmp           being written, or left by a process that was killed
//
// A shard may be a link to a file of the same name in another folder. Files with other names are left alone, and in
// other folders all to which no link leads. Thread-safety: const functions may run concurrently; the file system orders
// what they do.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace muster::checkpoint {

class Folder {
 public:
  explicit Folder(std::filesystem::path path);  // creates the folder; throws Unavailable

  // Locks the folder for this process, until the last of the process's Folders that have claimed it is destroyed: two
  // trainings that save in one folder would remove each other's snapshots. Processes that only read may have it
  // together. Rank 0 calls this. Throws Unavailable if another process holds the lock for two more seconds (one that
  // was killed a moment ago may still be dying). The lock is flock(2)'s, on NFS that of a file ".lock" in the folder; a
  // warning says if the file system has none.
  enum class Use { kReads, kSaves };
  void claim(Use use = Use::kSaves);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path snapshot(int64_t steps) const;
  std::filesystem::path shard(int64_t steps, int rank, int world_size, const std::string& mark) const;
  // Makes a link to the file of the same name in another folder, and that folder; returns that file. The link comes
  // first: what is left of a process that is killed later can be found.
  static std::filesystem::path link_shard(const std::filesystem::path& shard, const std::filesystem::path& other);

  std::vector<int64_t> snapshots() const;  // their steps, the newest first; throws Unavailable
  int64_t newest_shard() const;            // its steps; 0: there is none
  void remove_snapshot(int64_t steps) const noexcept;
  // Renames it, so that it is none any more, and returns the file, which is still to be removed.
  std::filesystem::path set_aside(int64_t steps) const;

  // The shards that only `rank` of `world_size` could be writing. Rank 0 also gets those of ranks that no longer exist;
  // kAnyRank gets all. Shards in `keep`, and those of steps in `keep_steps`, are not among them. Before a link comes
  // the file to which it leads.
  static constexpr int kAnyRank = -1;
  std::vector<std::filesystem::path> old_shards(int rank, int world_size, const std::set<std::string>& keep,
                                                const std::set<int64_t>& keep_steps) const;
  // Removes the temporary files of the same ranks; rank 0 and kAnyRank also those of snapshots. Not those that another
  // Folder of this process is writing.
  void remove_temporaries(int rank, int world_size) const noexcept;

 private:
  std::filesystem::path path_;
  struct Lock;
  std::shared_ptr<Lock> lock_;
  bool has_warned_ = false;  // that there is no lock
};

// Removes files on a thread of its own: ext4 takes up to a fifth of a second for a file of 256 MB. What cannot be
// removed costs disk space and nothing else. Thread-safety: all methods.
class Remover {
 public:
  Remover() = default;
  Remover(const Remover&) = delete;
  Remover& operator=(const Remover&) = delete;
  ~Remover() { wait(); }
  void remove(std::vector<std::filesystem::path> files) noexcept;  // after those of the last call
  void wait() noexcept;

 private:
  std::mutex mutex_;
  std::thread thread_;
};

}  // namespace muster::checkpoint
