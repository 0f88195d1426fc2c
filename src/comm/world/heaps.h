// The heaps of the ranks of one host: each rank has its own, and maps all others.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/members.h"
#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster {
class Heap;
}
namespace muster::shm {
class Arena;
class Mapping;
}  // namespace muster::shm

namespace muster::comm {

std::shared_ptr<Heap> make_heap(std::shared_ptr<shm::Arena> arena);

// The capacity of a heap whose user gave none, in a job of `ranks` ranks.
size_t default_heap_capacity(int ranks);

// Every member of a group calls it, with its own heap. Returns the heaps by rank; null for ranks of other hosts.
// Errors: those of shm::exchange().
std::vector<std::shared_ptr<shm::Mapping>> exchange_heaps(Store& store, const std::string& prefix, int rank,
                                                          const std::vector<Member>& members, const shm::Arena& heap,
                                                          Deadline deadline);

}  // namespace muster::comm
