#include "comm/world/heaps.h"

#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"
#include "shm/arena.h"
#include "shm/exchange.h"

namespace muster::comm {

// This limits address space, not memory: each rank maps every rank's heap, so the sum of all heaps must stay below what
// processors can address.
size_t default_heap_capacity(int ranks) {
  constexpr size_t kAddressSpace = size_t{32} << 40;
  return std::max<size_t>(std::min(shm::memory_total(), kAddressSpace / static_cast<size_t>(ranks)), size_t{64} << 20);
}

std::vector<std::shared_ptr<shm::Mapping>> exchange_memory(Store& store, const std::string& prefix, int rank,
                                                           const std::vector<Member>& members, int memfd,
                                                           Deadline deadline, const std::vector<int>& shown) {
  std::vector<std::shared_ptr<shm::Mapping>> all(members.size());
  const int host = members[static_cast<size_t>(rank)].host;
  std::vector<size_t> here;  // the ranks of this host
  shm::KnownRanks known;
  int place = 0;  // of this rank among them
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].host != host) continue;
    if (static_cast<int>(r) == rank) place = static_cast<int>(here.size());
    here.push_back(r);
    known.pids.push_back(members[r].pid);
    known.shown.push_back(shown.empty() ? static_cast<int>(r) : shown[r]);
  }
  auto participants =
      shm::exchange(store, text(prefix, '/', host), place, static_cast<int>(here.size()), {memfd}, deadline, known);
  for (size_t i = 0; i < here.size(); ++i) {
    if (participants[i].fds.size() != 1)
      throw CorruptError(text("rank ", known.shown[i], " sent no memory"),
                         "Run the same version of Muster on all ranks");
    all[here[i]] = shm::map_memfd(participants[i].fds[0].get());
  }
  return all;
}

}  // namespace muster::comm
