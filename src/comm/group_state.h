// What a Group handle refers to.
#pragma once

#include "comm/backend.h"
#include "muster/comm/group.h"

namespace muster {

struct Group::State {
  int rank = -1;                              // in the group, -1: not a member
  std::vector<int> ranks;                     // global
  c10::intrusive_ptr<comm::Backend> backend;  // null where not a member
};

}  // namespace muster
