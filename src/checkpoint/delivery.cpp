#include "checkpoint/delivery.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "checkpoint/item_values.h"
#include "comm/api/broadcast_bytes.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::checkpoint {
namespace {

constexpr uint64_t kTogether = uint64_t{16} << 20;        // bytes of small entries that travel together
constexpr uint64_t kBetweenMeetings = uint64_t{1} << 30;  // bytes that travel before all ranks meet

// `saved`, `ranks`: how many ranks there were, and are.
void check_mode(const NamedItem& item, const Entry& entry, int saved, int ranks) {
  const bool per_rank = entry.rank != kShared;
  if (per_rank && saved != ranks)
    throw InvalidArgument(text("the snapshot was written by ", saved, " ranks, but this job has ", ranks,
                               ", and each rank has stored '", item.name, "'"),
                          text("Restore with ", saved, " ranks"));
  if (per_rank != item.per_rank)
    throw InvalidArgument(
        text("'", item.name, "' is ", per_rank ? "per rank" : "shared", " in the snapshot, and not here"),
        "Restore on the same placement of ranks on hosts, with the same .per_rank as when the snapshot was saved");
  if (entry.rank < kShared || entry.rank >= ranks)
    throw CorruptError(text("'", entry.full_name(), "' belongs to none of ", ranks, " ranks"), kSameMuster);
}

// Sorts an item's entries, and takes their values away.
void put_in_order(Entries& entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.order < b.order; });
  for (size_t i = 1; i < entries.size(); ++i)
    if (entries[i].order == entries[i - 1].order)
      throw CorruptError(text("two tensors have the place of '", entries[i].full_name(), "'"), kSameMuster);
  for (Entry& entry : entries) entry.tensor = without_values(entry.tensor);
}

}  // namespace

Delivery::Delivery(const SnapshotPlace& here, const Reading& reading, const Items& items)
    : here_(here), reading_(reading) {
  std::map<std::string, Target*> by_name;
  for (const NamedItem& item : items) by_name[item.name] = &targets_.emplace_back(Target{.item = &item});
  for (const auto& file : reading.files()) {
    auto& slots = slots_.emplace_back();
    for (const Entry& entry : file.container.entries()) {
      slots.push_back(slot_of(entry, by_name));
      if (slots.back().target) slots.back().target->entries.push_back(entry);
    }
  }
  std::map<const Target*, std::vector<Need>> needs;
  for (Target& target : targets_) {
    put_in_order(target.entries);
    const bool may_be_missing = target.item->name == kDefaultGenerator && reading.is_of_other_ranks();
    if (target.entries.empty() && !may_be_missing && !target.item->item->save().empty())
      throw InvalidArgument(text("the snapshot has no '", target.item->name, "'"), kSameProgram);
    needs[&target] = target.item->item->needs(target.entries);
  }
  for (size_t f = 0; f < slots_.size(); ++f)
    for (size_t i = 0; i < slots_[f].size(); ++i)
      find_need(reading.files()[f].container.entries()[i], needs, slots_[f][i]);
}

Delivery::Slot Delivery::slot_of(const Entry& entry, const std::map<std::string, Target*>& by_name) const {
  const auto found = by_name.find(entry.item);
  if (entry.item == kDefaultGenerator && (found == by_name.end() || reading_.is_of_other_ranks())) return {};
  if (found == by_name.end())
    throw InvalidArgument(text("the snapshot has a '", entry.item, "' that was not added"),
                          "Add it, or name another folder");
  Target* const target = found->second;
  check_mode(*target->item, entry, reading_.about().world_size, here_.size);
  const bool is_for_this_rank = entry.rank == kShared || entry.rank == here_.rank;
  return {.when = target->item->item->comes_in_parts(entry) ? When::kInParts : When::kInOnePiece,
          .to = entry.rank,  // kShared is kEveryRank
          .target = is_for_this_rank ? target : nullptr};
}

void Delivery::find_need(const Entry& entry, const std::map<const Target*, std::vector<Need>>& needs,
                         Slot& slot) const {
  if (!slot.target) return;
  const auto& entries = slot.target->entries;
  const auto at = std::lower_bound(entries.begin(), entries.end(), entry.order,
                                   [](const Entry& each, int64_t order) { return each.order < order; });
  slot.index = static_cast<size_t>(at - entries.begin());
  if (entry.rank != kShared) return;
  const Need& need = needs.at(slot.target)[slot.index];
  if (need.owner != kEveryRank) {
    const int place = here_.place_of(need.owner);  // it must take part
    if (need.is_only_owner) slot.to = place;
  }
  if (!need.here) slot.target = nullptr;
}

uint64_t Delivery::plan() const {
  std::string all;
  for (const auto& slots : slots_)
    for (const Slot& slot : slots) all += text(static_cast<int>(slot.when), ' ', slot.to, '\n');
  return checksum(all);
}

Problem Delivery::deliver(When when, const Take& take) {
  Problem problem;
  uint64_t moved = 0;
  for (size_t f = 0; f < slots_.size(); ++f) {
    const auto& slots = slots_[f];
    const auto& file = reading_.files()[f];
    const auto& extents = file.container.extents();
    for (size_t first = 0, last = 0; first < slots.size(); first = last) {
      last = first + 1;
      if (slots[first].when != when) continue;
      while (last < slots.size() && slots[last].when == when && slots[last].to == slots[first].to &&
             extents[last].end - extents[first].begin <= kTogether)
        ++last;
      const at::Tensor bytes = move(file, slots[first].to, extents[first].begin, extents[last - 1].end);
      moved += extents[last - 1].end - extents[first].begin;
      if (moved >= kBetweenMeetings) {  // so that no rank waits for the whole of what others get
        barrier(here_.collective);
        moved = 0;
      }
      if (!bytes.defined() || problem) continue;
      problem = problem_of([&] { hand_over(f, first, last, bytes, take); });
    }
  }
  return problem;
}

// Returns the bytes on the ranks that need them; undefined on others.
at::Tensor Delivery::move(const Reading::File& file, int to, uint64_t begin, uint64_t end) const {
  const auto count = static_cast<int64_t>(end - begin);
  at::Tensor mine;
  if (file.holder == here_.rank) mine = file.container.bytes().narrow(0, static_cast<int64_t>(begin), count);
  if (to == kEveryRank) return comm::broadcast_bytes(mine, count, file.holder, here_.collective);
  if (to == file.holder) return mine;
  if (here_.rank != file.holder && here_.rank != to) return {};
  return comm::pass_bytes(mine, count, file.holder, to, here_.collective);
}

void Delivery::hand_over(size_t file, size_t first, size_t last, const at::Tensor& bytes, const Take& take) const {
  const Container& container = reading_.files()[file].container;
  for (size_t i = first; i < last;) {
    Target* const target = slots_[file][i].target;
    Entries entries;
    std::vector<size_t> indices;
    for (; i < last && slots_[file][i].target == target; ++i) {
      if (!target) continue;
      entries.push_back(container.entry_in(bytes, container.extents()[first].begin, i));
      indices.push_back(slots_[file][i].index);
    }
    if (target) take(*target, std::move(entries), indices);
  }
}

}  // namespace muster::checkpoint
