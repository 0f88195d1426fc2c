// What saving and restoring have in common: where they go on (the folder of the files, or each host's own, and this
// rank among those that take part), and the items in the files.
//
// Thread-safety: values; choose_per_rank() is collective.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/items.h"
#include "checkpoint/problem.h"
#include "muster/comm/collectives.h"

namespace muster::checkpoint {

// The item of torch's default CPU generator. Unlike others, it may be missing on one side: each rank has its own, and
// another number of ranks can go on without.
inline constexpr const char* kDefaultGenerator = "default generator";

struct NamedItem {
  std::string name;
  std::optional<bool> wanted;  // per rank or not, if the user has said it
  std::unique_ptr<Item> item;
  bool per_rank = false;
};
using Items = std::vector<NamedItem>;

struct SnapshotPlace {
  Folder folder;
  CollectiveOptions collective;  // of each collective: the group, and how long other ranks may take
  int rank = 0, size = 1;        // in that group
  // Set when restore() or save() has looked into the folder. Until then rank 0's save() refuses a folder that already
  // has snapshots, because they may be another training's.
  bool folder_is_known = false;
  bool only_reads = false;  // nothing will be saved, so others may read in the folder, too
  bool has_newer = false;   // there are newer snapshots than the one that restore() was to take: save() refuses, too
  // The steps of snapshots that restore() has refused. A later save removes damaged ones. It leaves alone those that
  // may be intact: their format is another one, or something that can pass has kept a rank from reading them.
  std::set<int64_t> damaged = {}, unreadable = {};
  std::shared_ptr<Remover> remover = std::make_shared<Remover>();
  std::vector<std::filesystem::path> shard_folders = {};  // where the ranks' files are; empty: in `folder`

  // If each host has a folder of its own: the hosts' ranks in the group. Then the first rank of each host does there
  // what rank 0 does in a folder of all. `replicas`: on how many other hosts each shard is, too; fewer if there are
  // fewer hosts.
  std::vector<std::vector<int>> hosts = {};
  int replicas = 0;
  bool is_of_hosts() const { return !hosts.empty(); }
  bool leads() const;  // whether this rank takes care of the folder
  int cares_for() const { return is_of_hosts() ? Folder::kAnyRank : rank; }  // for old_shards()
  std::vector<int> keepers_of(int rank) const;  // the ranks that have replicas of its shard

  // The rank in the group; InvalidArgument if it is not a member.
  int place_of(int rank_of_world) const;
};

// Collective, before save() and restore(): sets per_rank of all items. Returns what went wrong, the same on all ranks:
// they have added different items, or different parts of one that is to be stored once.
Problem choose_per_rank(const SnapshotPlace& here, Items& items, bool saves);

}  // namespace muster::checkpoint
