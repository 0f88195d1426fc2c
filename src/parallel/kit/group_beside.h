// A second group of the same ranks, for small blocking collectives that must not wait behind asynchronous ones.
//
// The World of the calling thread makes it once per group, and keeps it until the World ends, or until a new one is
// made after the group has ended. Whoever outlives the World keeps a weak_ptr.
//
// Thread-safety: one thread per World.
#pragma once

#include <memory>

#include "muster/comm/group.h"

namespace muster::parallel {

// Every rank of `group` calls it. Aborted if this thread has no World; InvalidArgument if this rank is not a member.
std::shared_ptr<const Group> group_beside(const Group& group);
// The one that group_beside() has made, or null. No other rank needs to call it.
std::shared_ptr<const Group> existing_group_beside(const Group& group);

}  // namespace muster::parallel
