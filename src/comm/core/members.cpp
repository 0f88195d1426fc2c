#include "comm/core/members.h"

#include <algorithm>

namespace muster::comm {

bool on_one_host(const std::vector<Member>& members) {
  return std::all_of(members.begin(), members.end(), [&](const Member& m) { return m.host == members[0].host; });
}

int cores_of_host(const std::vector<Member>& members, int rank) {
  std::vector<CpuSet> here;
  for (const Member& member : members)
    if (member.host == members[static_cast<size_t>(rank)].host) here.push_back(member.cpus);
  return cores_together(here);
}

}  // namespace muster::comm
