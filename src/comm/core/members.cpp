#include "comm/core/members.h"

#include <algorithm>

namespace muster::comm {

bool on_one_host(const std::vector<Member>& members) {
  return std::all_of(members.begin(), members.end(), [&](const Member& m) { return m.host == members[0].host; });
}

std::vector<std::vector<int>> by_host(const std::vector<Member>& members) {
  std::vector<std::vector<int>> hosts;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto same = std::find_if(hosts.begin(), hosts.end(), [&](const std::vector<int>& host) {
      return members[static_cast<size_t>(host[0])].host == members[i].host;
    });
    (same != hosts.end() ? *same : hosts.emplace_back()).push_back(static_cast<int>(i));
  }
  return hosts;
}

int ranks_of_host(const std::vector<Member>& members, int rank) {
  const int host = members[static_cast<size_t>(rank)].host;
  return static_cast<int>(
      std::count_if(members.begin(), members.end(), [&](const Member& member) { return member.host == host; }));
}

int cores_of_host(const std::vector<Member>& members, int rank) {
  std::vector<CpuSet> here;
  for (const Member& member : members)
    if (member.host == members[static_cast<size_t>(rank)].host) here.push_back(member.cpus);
  return cores_together(here);
}

}  // namespace muster::comm
