// Brings what is in a snapshot's files to the ranks that need it. If all ranks have the files open, each reads for
// itself. Otherwise a file's holder reads, and sends. Large tensors come into the memory where they are to stay, if
// that is contiguous and on the CPU; others into memory that is used again for the next ones.
//
// Thread-safety: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/items.h"
#include "checkpoint/reading.h"
#include "checkpoint/snapshot_place.h"

namespace muster::checkpoint {

// An item, with what the snapshot has for it on this rank.
struct Target {
  const NamedItem* item = nullptr;
  std::function<bool(const Entry&)> accepts = {};  // Item::accepts(), if not all of the snapshot has to fit
  bool is_refused = false;                         // accepts() has refused an entry
  Entries entries;  // in order; their tensors are on the device "meta" until the values come
};

// Names for a message: at most a few of them.
std::string listed(const std::set<std::string>& names);

enum class When { kInOnePiece, kInParts, kNever };  // as Item::comes_in_parts() says

class Delivery {
 public:
  // Not collective. If it is `strict`, throws InvalidArgument, which names what differs, if the snapshot
  // has other items than were added. Otherwise, if it has none of them, and what only one side has is left out.
  Delivery(const SnapshotPlace& here, const Reading& reading, const Items& items, bool strict);
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  std::deque<Target>& targets() { return targets_; }  // in the items' order
  // Names of items, and of what is in them, that only the snapshot or only this rank has.
  const std::set<std::string>& only_saved() const { return only_saved_; }
  const std::set<std::string>& only_here() const { return only_here_; }
  // A number that is the same on all ranks if they agree who gets what.
  uint64_t plan() const;

  // Collective: moves the values of the entries that come then. `take` gets those that this rank needs, some at a time,
  // with their indices among the target's entries. What comes in parts is gone after that, unless it lies in the item's
  // own memory (Item::memory_for()). Returns what went wrong, when all have been moved.
  using Take = std::function<void(Target&, Entries&&, const std::vector<size_t>& indices)>;
  Problem deliver(When when, const Take& take);

 private:
  // Who gets an entry of a file.
  struct Slot {
    When when = When::kNever;
    int to = kEveryRank;       // a rank in the group, if no other needs it
    Target* target = nullptr;  // null if this rank does not need it
    size_t index = 0;          // among the target's entries
  };

  Slot slot_of(const Entry& entry, const std::map<std::string, Target*>& by_name);
  void find_missing();
  void find_need(const Entry& entry, const std::map<const Target*, std::vector<Need>>& needs, Slot& slot) const;
  // Entries of a file that come together: from `first` to before `last`.
  struct Run {
    size_t file = 0, first = 0, last = 0;
    int64_t bytes = 0;
  };
  Run run_at(size_t file, size_t first) const;
  bool takes_part(const Run& run) const;
  // Where the bytes of a run come. `own`: if that is the item's own memory, the tensor in it.
  at::Tensor memory_for(const Run& run, at::Tensor& own);
  // `bytes` may be smaller than the run: then they are overwritten again and again.
  Problem move(const Run& run, const at::Tensor& bytes) const;
  void hand_over(const Run& run, const at::Tensor& own, const at::Tensor& bytes, const Take& take) const;

  const SnapshotPlace& here_;
  const Reading& reading_;
  const bool strict_;
  std::set<std::string> only_saved_, only_here_;
  std::deque<Target> targets_;
  std::vector<std::vector<Slot>> slots_;  // by file and entry
  at::Tensor scratch_;                    // memory for what cannot come into the item's own; at least kTogether bytes
};

}  // namespace muster::checkpoint
