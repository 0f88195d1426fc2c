#include "checkpoint/snapshot_place.h"

#include <algorithm>

#include "base/text.h"
#include "checkpoint/container.h"
#include "muster/base/error.h"
#include "muster/comm/objects.h"

namespace muster::checkpoint {

int SnapshotPlace::place_of(int rank_of_world) const {
  const auto& ranks = collective.group.ranks();
  const auto at = std::find(ranks.begin(), ranks.end(), rank_of_world);
  if (at == ranks.end())
    throw InvalidArgument(
        text("rank ", rank_of_world, " owns parameters that are to be in the snapshot, and it does not take part"),
        "Use a group that has all ranks of the FullyShardedDataParallel");
  return static_cast<int>(at - ranks.begin());
}

Problem choose_per_rank(const SnapshotPlace& here, Items& items) {
  std::vector<uint64_t> mine;
  for (const auto& each : items) mine.push_back(checksum(each.item->what_is_equal()));
  const auto all = all_gather_object(mine, here.collective);
  for (size_t i = 0; i < items.size(); ++i) {
    const bool equal = std::all_of(all.begin(), all.end(), [&](const std::vector<uint64_t>& of_rank) {
      return of_rank.size() <= i || of_rank[i] == mine[i];  // ranks that have added other things are told later
    });
    NamedItem& item = items[i];
    item.per_rank = item.wanted.value_or(!equal);
    if (!item.per_rank && !equal)
      return {static_cast<int>(ErrorCode::kInvalidArgument),
              text("'", item.name, "' would be stored once, but each rank has another part of it"),
              "Add it without .per_rank"};
  }
  return {};
}

}  // namespace muster::checkpoint
