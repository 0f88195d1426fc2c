#include "checkpoint/delivery.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/text.h"
#include "checkpoint/item_values.h"
#include "comm/api/broadcast_bytes.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::checkpoint {
namespace {

constexpr uint64_t kAlone = uint64_t{256} << 10;        // bytes of an entry that comes by itself
constexpr uint64_t kTogether = uint64_t{4} << 20;       // of smaller ones that come together, and of one message
constexpr int64_t kBetweenMeetings = int64_t{1} << 30;  // bytes that come before all ranks meet

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

std::string listed(const std::set<std::string>& names) {
  constexpr size_t kFew = 20;
  std::vector<std::string> some;
  for (const std::string& name : names)
    if (some.size() < kFew) some.push_back(name);
  return text(join(some), names.size() > kFew ? text(" and ", names.size() - kFew, " more") : "");
}

Delivery::Delivery(const SnapshotPlace& here, const Reading& reading, const Items& items, bool strict)
    : here_(here),
      reading_(reading),
      strict_(strict),
      scratch_(at::empty({static_cast<int64_t>(kTogether)}, at::kByte)) {
  std::map<std::string, Target*> by_name;
  for (const NamedItem& item : items) {
    Target& target = targets_.emplace_back(Target{.item = &item});
    if (!strict) target.accepts = item.item->accepts();
    by_name[item.name] = &target;
  }
  for (const auto& file : reading.files()) {
    auto& slots = slots_.emplace_back();
    for (const Entry& entry : file.container.entries()) {
      slots.push_back(slot_of(entry, by_name));
      if (slots.back().target) slots.back().target->entries.push_back(entry);
    }
  }
  find_missing();
  std::map<const Target*, std::vector<Need>> needs;
  for (Target& target : targets_) {
    put_in_order(target.entries);
    needs[&target] = target.item->item->needs(target.entries);
  }
  for (size_t f = 0; f < slots_.size(); ++f)
    for (size_t i = 0; i < slots_[f].size(); ++i)
      find_need(reading.files()[f].container.entries()[i], needs, slots_[f][i]);
}

// Finds what was added and is not in the snapshot.
void Delivery::find_missing() {
  bool any = false;
  for (const Target& target : targets_) {
    const std::string& name = target.item->name;
    const Item& item = *target.item->item;
    any = any || (!target.entries.empty() && (name != kDefaultGenerator || targets_.size() == 1));
    if (strict_) {
      const bool may_be_missing = name == kDefaultGenerator && reading_.is_of_other_ranks();
      if (target.entries.empty() && !may_be_missing && !target.item->item->save().empty())
        only_here_.insert(text("'", name, "'"));
    } else if (target.is_refused && target.entries.empty()) {
      throw InvalidArgument(text("'", name, "' has nothing of what is in the snapshot by that name"),
                            "Use the names that it was saved with, or leave the item out");
    } else if (target.entries.empty()) {
      only_here_.insert(text("'", name, "'"));
    } else {
      for (const std::string& each : item.lacking(target.entries)) only_here_.insert(text(name, '/', each));
    }
  }
  if (strict_ && !(only_saved_.empty() && only_here_.empty())) {
    std::vector<std::string> sides;
    if (!only_here_.empty()) sides.push_back(text("has no ", listed(only_here_)));
    if (!only_saved_.empty()) sides.push_back(text("has ", listed(only_saved_), ", which the program did not add"));
    throw InvalidArgument(text("the snapshot ", join(sides, "; it ")),
                          "Give the same items as when it was saved, or set .strict = false");
  }
  if (!strict_ && !any && !targets_.empty())
    throw InvalidArgument(text("the snapshot has nothing of what was added",
                               only_saved_.empty() ? "" : text(", but ", listed(only_saved_))),
                          "add() what it has, by the same names");
}

Delivery::Slot Delivery::slot_of(const Entry& entry, const std::map<std::string, Target*>& by_name) {
  const auto found = by_name.find(entry.item);
  if (entry.item == kDefaultGenerator && (found == by_name.end() || reading_.is_of_other_ranks())) return {};
  if (found == by_name.end()) {
    only_saved_.insert(text("'", entry.item, "'"));
    return {};
  }
  Target* target = found->second;
  check_mode(*target->item, entry, reading_.about().world_size, here_.size);
  const Item& item = *target->item->item;
  const Slot for_others{.when = item.comes_in_parts(entry) ? When::kInParts : When::kInOnePiece,
                        .to = entry.rank};  // kShared is kEveryRank
  if (entry.rank != kShared && entry.rank != here_.rank) return for_others;
  if (!strict_ && !target->accepts(entry)) {
    only_saved_.insert(text(entry.item, '/', entry.name));
    target->is_refused = true;
    return entry.rank == kShared ? Slot{} : for_others;  // the ranks' parts of an item may differ
  }
  Slot slot = for_others;
  slot.target = target;
  return slot;
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

Delivery::Run Delivery::run_at(size_t file, size_t first) const {
  const auto& slots = slots_[file];
  const auto& extents = reading_.files()[file].container.extents();
  const auto bytes_to = [&](size_t last) { return extents[last - 1].end - extents[first].begin; };
  const auto is_large = [&](size_t i) { return extents[i].end - extents[i].begin >= kAlone; };
  size_t last = first + 1;
  if (!is_large(first))
    while (last < slots.size() && slots[last].when == slots[first].when && slots[last].to == slots[first].to &&
           !is_large(last) && bytes_to(last + 1) <= kTogether)
      ++last;
  return {file, first, last, static_cast<int64_t>(bytes_to(last))};
}

// Whether this rank gets or sends any of it.
bool Delivery::takes_part(const Run& run) const {
  const auto& slots = slots_[run.file];
  if (reading_.all_have_all())
    return std::any_of(slots.begin() + static_cast<std::ptrdiff_t>(run.first),
                       slots.begin() + static_cast<std::ptrdiff_t>(run.last),
                       [](const Slot& slot) { return slot.target != nullptr; });
  const int to = slots[run.first].to;
  return to == kEveryRank || to == here_.rank || reading_.files()[run.file].holder == here_.rank;
}

at::Tensor Delivery::memory_for(const Run& run, at::Tensor& own) {
  const Slot& slot = slots_[run.file][run.first];
  if (slot.when == When::kInOnePiece) return at::empty({run.bytes}, at::kByte);
  if (slot.target && run.last == run.first + 1)
    own = slot.target->item->item->memory_for(reading_.files()[run.file].container.entries()[run.first]);
  if (own.defined()) return at::from_blob(own.mutable_data_ptr(), {run.bytes}, at::kByte);
  if (scratch_.numel() < run.bytes) {
    scratch_.reset();
    scratch_ = at::empty({static_cast<int64_t>(kTogether)}, at::kByte);  // if there is not more memory
    scratch_ = at::empty({run.bytes}, at::kByte);
  }
  return scratch_.narrow(0, 0, run.bytes);
}

Problem Delivery::deliver(When when, const Take& take) {
  Problem problem;
  int64_t moved = 0;
  for (size_t f = 0; f < slots_.size(); ++f) {
    for (size_t next = 0; next < slots_[f].size();) {
      const Run run = run_at(f, next);
      next = run.last;
      if (slots_[f][run.first].when != when) continue;
      moved += run.bytes;
      if (moved >= kBetweenMeetings) {  // so that no rank waits for the whole of what others get
        barrier(here_.collective);
        moved = 0;
      }
      if (!takes_part(run) || (problem && reading_.all_have_all())) continue;
      at::Tensor own, bytes = scratch_;
      if (!problem) problem = problem_of([&] { bytes = memory_for(run, own); });
      if (problem && reading_.all_have_all()) continue;
      const Problem of_move = move(run, problem ? scratch_ : bytes);
      if (problem) continue;
      problem = of_move;
      if (!problem) problem = problem_of([&] { hand_over(run, own, bytes, take); });
    }
  }
  return problem;
}

// Collective for the ranks that take part, whatever goes wrong with the file or with a rank's memory.
Problem Delivery::move(const Run& run, const at::Tensor& bytes) const {
  const Reading::File& file = reading_.files()[run.file];
  Problem problem;
  if ((reading_.all_have_all() || file.holder == here_.rank) && bytes.numel() >= run.bytes)
    problem = problem_of([&] { file.container.read(run.first, run.last, bytes.mutable_data_ptr()); });
  const int to = slots_[run.file][run.first].to;
  if (reading_.all_have_all() || to == file.holder) return problem;
  const int64_t together = kTogether;
  for (int64_t at = 0; at < run.bytes; at += together) {
    const int64_t count = std::min(together, run.bytes - at);
    const at::Tensor piece = bytes.narrow(0, bytes.numel() >= run.bytes ? at : 0, count);
    if (to == kEveryRank)
      comm::broadcast_bytes(piece, file.holder, here_.collective);
    else
      comm::pass_bytes(piece, file.holder, to, here_.collective);
  }
  return problem;
}

// `own`: the item's own memory with the only entry, if it has some.
void Delivery::hand_over(const Run& run, const at::Tensor& own, const at::Tensor& bytes, const Take& take) const {
  const Container& container = reading_.files()[run.file].container;
  const auto& slots = slots_[run.file];
  for (size_t i = run.first; i < run.last;) {
    Target* const target = slots[i].target;
    Entries entries;
    std::vector<size_t> indices;
    for (; i < run.last && slots[i].target == target; ++i) {
      if (!target) continue;
      if (own.defined()) {
        entries.push_back(container.entries()[i]);
        entries.back().tensor = own;
        entries.back().in_place = true;
      } else {
        entries.push_back(container.entry_in(bytes, run.first, i));
      }
      indices.push_back(slots[i].index);
    }
    if (target) take(*target, std::move(entries), indices);
  }
}

}  // namespace muster::checkpoint
