#include "launch/ranks/placement.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/cores.h"
#include "base/text.h"
#include "launch/kit/pipe.h"
#include "launch/ranks/environment.h"

namespace muster::launch {
namespace {

// How many of `ranks` each package gets. One rank after the other goes to the package where it gets most cores, so that
// the rank with the fewest cores has as many as possible. A package never gets more ranks than cores. This is D'Hondt's
// method.
std::vector<int> share_out(const std::vector<int>& sizes, int ranks) {
  std::vector<int> shares(sizes.size());
  for (int rank = 0; rank < ranks; ++rank) {
    size_t best = 0;
    for (size_t i = 1; i < sizes.size(); ++i)  // without division
      if (int64_t{sizes[i]} * (shares[best] + 1) > int64_t{sizes[best]} * (shares[i] + 1)) best = i;
    ++shares[best];
  }
  return shares;
}

// Blocks of [0, size) for `parts`, the larger ones first.
std::vector<std::pair<size_t, size_t>> blocks(size_t size, size_t parts) {
  std::vector<std::pair<size_t, size_t>> result;
  for (size_t part = 0, begin = 0; part < parts; ++part) {
    const size_t length = size / parts + (part < size % parts ? 1 : 0);
    result.emplace_back(begin, begin + length);
    begin += length;
  }
  return result;
}

RankPlacement placed(const std::vector<Core>& cores, size_t begin, size_t end) {
  RankPlacement rank{.cores = static_cast<int>(end - begin)};
  for (size_t i = begin; i < end; ++i)
    rank.processors.insert(rank.processors.end(), cores[i].processors.begin(), cores[i].processors.end());
  std::sort(rank.processors.begin(), rank.processors.end());
  return rank;
}

}  // namespace

std::vector<RankPlacement> spread(const std::vector<Core>& cores, int ranks) {
  std::vector<RankPlacement> placement;
  if (ranks < 1 || static_cast<size_t>(ranks) > cores.size()) return placement;
  std::vector<size_t> begins;  // of the packages
  for (size_t i = 0; i < cores.size(); ++i)
    if (i == 0 || cores[i].package != cores[i - 1].package) begins.push_back(i);
  const size_t packages = begins.size();
  begins.push_back(cores.size());
  if (static_cast<size_t>(ranks) < packages) {
    for (const auto& [first, last] : blocks(packages, static_cast<size_t>(ranks)))
      placement.push_back(placed(cores, begins[first], begins[last]));
    return placement;
  }
  std::vector<int> sizes;
  for (size_t i = 0; i < packages; ++i) sizes.push_back(static_cast<int>(begins[i + 1] - begins[i]));
  const auto shares = share_out(sizes, ranks);
  for (size_t i = 0; i < packages; ++i)
    for (const auto& [begin, end] : blocks(static_cast<size_t>(sizes[i]), static_cast<size_t>(shares[i])))
      placement.push_back(placed(cores, begins[i] + begin, begins[i] + end));
  return placement;
}

UniqueFd claim(const Core& core) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto name = text("muster-core-", core.processors.front());
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the leading zero makes it abstract
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) return {};
  return above_standard(std::move(socket));
}

CorePlacement place(int ranks, Pin pin) {
  const auto nobody = [](std::string why) { return CorePlacement{.why = std::move(why)}; };
  if (pin == Pin::kNone) return nobody("--pin none");
  const auto allowed = allowed_processors();
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (pin == Pin::kAuto && static_cast<long>(allowed.size()) >= online)
    return nobody("the machine is open to other work (--pin cores pins all the same)");
  if (ranks > usable_cores()) return nobody("there are more ranks than usable cores");
  auto cores = only(cores_of_machine(), allowed);
  if (cores.empty()) return nobody("hwloc is not here: apt-get install libhwloc15");
  if (static_cast<size_t>(ranks) > cores.size()) return nobody("there are more ranks than cores");

  CorePlacement placement;
  std::vector<Core> ours;
  for (const auto& core : cores)
    if (UniqueFd name = claim(core)) {
      ours.push_back(core);
      placement.names.push_back(std::move(name));
    }
  if (ours.size() < cores.size() && static_cast<size_t>(ranks) > ours.size())
    return nobody(text("another job is pinned to ", cores.size() - ours.size(), " of the ", cores.size(), " cores"));
  placement.ranks = spread(ours, ranks);
  placement.cores = static_cast<int>(ours.size());
  placement.threads = placement.cores;
  for (const auto& rank : placement.ranks) placement.threads = std::min(placement.threads, rank.cores);
  // A quota below the cores is shared by all: more threads than that would be throttled.
  placement.threads = std::max(1, std::min(placement.threads, usable_cores() / ranks));
  return placement;
}

}  // namespace muster::launch
