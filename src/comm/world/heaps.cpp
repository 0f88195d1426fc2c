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

std::vector<std::shared_ptr<shm::Mapping>> exchange_heaps(Store& store, const std::string& prefix, int rank,
                                                          const std::vector<Member>& members, const shm::Arena& heap,
                                                          Deadline deadline) {
  std::vector<std::shared_ptr<shm::Mapping>> heaps(members.size());
  const int host = members[static_cast<size_t>(rank)].host;
  std::vector<int> here;  // the ranks of this host
  std::vector<pid_t> pids;
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].host != host) continue;
    here.push_back(static_cast<int>(r));
    pids.push_back(members[r].pid);
  }
  const auto place = std::find(here.begin(), here.end(), rank) - here.begin();
  auto participants =
      shm::exchange(store, text(prefix, "/heaps/", host), static_cast<int>(place), static_cast<int>(here.size()),
                    {heap.fd()}, deadline, {.pids = pids, .shown = here});
  for (size_t i = 0; i < here.size(); ++i) {
    if (participants[i].fds.size() != 1)
      throw CorruptError("a rank sent no heap", "Run the same version of Muster on all ranks");
    heaps[static_cast<size_t>(here[i])] = shm::map_memfd(participants[i].fds[0].get());
  }
  return heaps;
}

}  // namespace muster::comm
