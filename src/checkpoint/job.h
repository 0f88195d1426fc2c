// What saving and restoring have in common: who takes part, where the files are, what is in them.
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

struct Job {
  Folder folder;
  CollectiveOptions collective;  // for each collective: the group, how long others may take
  int rank = 0, size = 1;
  bool folder_is_known = false;  // else snapshots that are there already are somebody else's. Of rank 0
};

}  // namespace muster::checkpoint
