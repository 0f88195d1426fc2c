#include "checkpoint/snapshot_place.h"

#include <algorithm>

#include "base/text.h"
#include "checkpoint/container.h"
#include "muster/base/error.h"
#include "muster/comm/objects.h"

namespace muster::checkpoint {
namespace {

constexpr int kOpen = -1;
struct Choice {
  std::string name;
  int wanted = kOpen;  // as NamedItem's
  bool may_differ = false;
  uint64_t sum = 0;  // of Item::what_is_equal()
  MSGPACK_DEFINE(name, wanted, may_differ, sum);
};

}  // namespace

int SnapshotPlace::place_of(int rank_of_world) const {
  const auto& ranks = collective.group.ranks();
  const auto at = std::find(ranks.begin(), ranks.end(), rank_of_world);
  if (at == ranks.end())
    throw InvalidArgument(
        text("rank ", rank_of_world, " owns parameters that are to be in the snapshot, and it does not take part"),
        "Use a group that has all ranks of the FullyShardedDataParallel");
  return static_cast<int>(at - ranks.begin());
}

bool SnapshotPlace::leads() const {
  return is_of_hosts() ? std::any_of(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks[0] == rank; })
                       : rank == 0;
}

// Those at the same place on the next hosts.
std::vector<int> SnapshotPlace::keepers_of(int of) const {
  std::vector<int> keepers;
  for (size_t host = 0; host < hosts.size(); ++host) {
    const auto at = std::find(hosts[host].begin(), hosts[host].end(), of);
    if (at == hosts[host].end()) continue;
    const auto place = static_cast<size_t>(at - hosts[host].begin());
    for (size_t step = 1; step < hosts.size() && step <= static_cast<size_t>(replicas); ++step) {
      const auto& next = hosts[(host + step) % hosts.size()];
      keepers.push_back(next[place % next.size()]);
    }
  }
  return keepers;
}

Problem choose_per_rank(const SnapshotPlace& here, Items& items, bool saves) {
  std::vector<Choice> mine;
  for (const auto& [name, wanted, item, per_rank] : items)
    mine.push_back(
        {name, wanted ? static_cast<int>(*wanted) : kOpen, item->may_differ(), checksum(item->what_is_equal(saves))});
  const auto all = all_gather_object(mine, here.collective);
  for (size_t r = 1; r < all.size(); ++r)
    if (!std::equal(all[r].begin(), all[r].end(), all[0].begin(), all[0].end(),
                    [](const Choice& a, const Choice& b) { return a.name == b.name && a.wanted == b.wanted; }))
      return {static_cast<int>(ErrorCode::kMismatch),
              text("rank ", r, " and rank 0 have added different things to the snapshot"),
              "Add the same names in the same order, with the same .per_rank"};
  for (size_t i = 0; i < items.size(); ++i) {
    const auto any = [&](const auto& is) {
      return std::any_of(all.begin(), all.end(), [&](const std::vector<Choice>& of_rank) { return is(of_rank[i]); });
    };
    const bool differs = any([&](const Choice& each) { return each.sum != mine[i].sum; });
    const bool may_differ = any([](const Choice& each) { return each.may_differ; });
    NamedItem& item = items[i];
    item.per_rank = item.wanted.value_or(differs && may_differ);
    if (differs && !item.per_rank)
      return {static_cast<int>(ErrorCode::kInvalidArgument),
              text("'", item.name, "' would be stored once, but each rank has another part of it"),
              "Call forward() after torch::load() into a sharded model, or add it with .per_rank = true"};
  }
  return {};
}

}  // namespace muster::checkpoint
