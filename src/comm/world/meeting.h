// The ranks of a group tell each other through the store which host and which process each of them is, when a World or
// a group begins.
//
// Thread-safety: all functions.
#pragma once

#include <string>
#include <vector>

#include "comm/core/members.h"
#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::comm {

// The identity of this host: the kernel's boot id and the network namespace, in which ranks can hand shared memory to
// each other. MUSTER_HOST overrides it; tests and containers use that to make several hosts of one.
std::string host_identity();

// Every rank calls it, with its host's identity. Returns the members by rank. TimeoutError names ranks that did not
// come.
std::vector<Member> meet_members(Store& store, const std::string& prefix, int rank, int size, const std::string& host,
                                 Deadline deadline);

// Removes from the store what the ranks told each other there. One rank calls it, when all have returned from
// meet_members(). A store that does not answer keeps it.
void forget_members(Store& store, const std::string& prefix, int size);

// Reads the list of all ranks that rank 0 leaves in the store, `said`, on rank `rank` of `size`. CorruptError, unless
// it is one; Mismatch and TimeoutError, if it says what rank 0 found wrong.
std::vector<Member> read_members(const std::string& said, int rank, int size);

}  // namespace muster::comm
