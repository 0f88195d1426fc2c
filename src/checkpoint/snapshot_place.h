// What saving and restoring have in common: where they go on (the folder of the files, and this rank among those that
// take part), and the items in the files.
//
// Thread-safety: values.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/items.h"
#include "muster/comm/collectives.h"

namespace muster::checkpoint {

struct NamedItem {
  std::string name;
  bool per_rank = false;
  std::unique_ptr<Item> item;
};
using Items = std::vector<NamedItem>;

struct SnapshotPlace {
  Folder folder;
  CollectiveOptions collective;  // of each collective: the group, and how long other ranks may take
  int rank = 0, size = 1;        // in that group
  // Set when restore() or save() has looked into the folder. Until then rank 0's save() refuses a folder that already
  // has snapshots, because they may be another training's.
  bool folder_is_known = false;
};

}  // namespace muster::checkpoint
