// Opens and verifies the files of one snapshot. Each file has a holder, a rank that has opened it. The other ranks
// learn what is in it. If all ranks are on one host, and each finds the same files in its folder, all open them: then
// each verifies a part of every file, and reads what it needs by itself. In folders of the hosts' own, of which several
// may have a shard, its holder verifies it; if it is damaged, a rank with another copy becomes the holder.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "checkpoint/container.h"
#include "checkpoint/problem.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

// Opens shard `index` of the snapshot that the manifest is about. CorruptError, too, if it is another's.
Container open_shard(const std::filesystem::path& folder, const About& manifest, size_t index);

class Reading {
 public:
  struct File {
    int holder = 0;
    Container container;  // on other ranks a directory, unless all have opened the files
  };

  Reading(const SnapshotPlace& here, int64_t steps) : here_(here), steps_(steps) {}

  // Collective. Rank 0 opens the only file, or the manifest (in folders of the hosts' own, the first ranks of the hosts
  // look for one); then rank r opens the shards of ranks r, r + size and so on, and all ranks look for those that it
  // does not have, or has only damaged. Returns why the snapshot is refused; the same on all ranks. Throws a problem
  // that an older one would have, too.
  Problem open_and_verify();

  const About& about() const { return about_; }
  bool is_of_other_ranks() const { return about_.world_size != here_.size; }  // of another number of them
  const std::vector<File>& files() const { return files_; }
  bool all_have_all() const { return all_have_all_; }  // whether each rank has opened each file

 private:
  struct Offer;
  std::vector<std::map<size_t, Offer>> offer_shards(std::vector<std::optional<Container>>& mine,
                                                    const std::function<bool(size_t)>& wanted) const;
  Problem open_one_of(const std::vector<Offer>& manifests);
  Problem open_shards();
  std::map<size_t, Problem> damaged_of(const std::vector<std::optional<Container>>& mine,
                                       const std::vector<std::optional<size_t>>& holders,
                                       std::set<size_t>& verified) const;
  void open_others();
  Problem verify() const;

  const SnapshotPlace& here_;
  const int64_t steps_;
  About about_;
  std::vector<File> files_;
  bool all_have_all_ = false;
};

}  // namespace muster::checkpoint
