// Memory that the ranks of one host share: each rank has its own, a heap for example, and maps all others.
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

// Every member of a group calls it, with a memfd of its own. Returns the memory of all, by rank; null for ranks of
// other hosts. `shown`: the ranks' numbers in messages, if they are others. Errors: those of shm::exchange().
std::vector<std::shared_ptr<shm::Mapping>> exchange_memory(Store& store, const std::string& prefix, int rank,
                                                           const std::vector<Member>& members, int memfd,
                                                           Deadline deadline, const std::vector<int>& shown = {});

}  // namespace muster::comm
