// The parts of a World, for the layers that are built on it.
//
// Thread-safety: immutable.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/core/members.h"
#include "muster/comm/world.h"
#include "shm/arena.h"
#include "shm/peer_watch.h"

namespace muster {

struct World::Parts {
  WorldOptions options;
  Placement placement;
  std::string prefix;                 // of this World's keys in the store
  std::vector<comm::Member> members;  // by global rank
  int cores = 1;                      // that the ranks of this host may use together
  std::shared_ptr<shm::Arena> arena;  // the heap's
  std::shared_ptr<shm::PeerWatch> watch = std::make_shared<shm::PeerWatch>();
};

}  // namespace muster
