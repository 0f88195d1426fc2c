// BlackBox: the last 4,096 operations of one rank, in shared memory that outlives the rank.
//
//   box = open_black_box(rank, world_size)
//   const int world = box->group("world");
//   const auto ticket = box->begin({.group = world, .operation = 1, .bytes = 4096, .sequence = 12});
//   …                                  the operation
//   box->end(ticket, BlackBoxState::kDone);
//
// Who owns the memory: under `muster run` and spawn(), the launcher makes one memfd per rank before it starts the rank,
// keeps it, and passes its number to the rank in MUSTER_BLACK_BOX; so it survives whatever happens to the rank.
// Elsewhere a rank makes its own, which ends with the process. Either can be found and read while it lives, through the
// links /proc/<pid>/fd/… → /memfd:muster-black-box; there is no registry, and nothing to leak. black_box_reader.h reads
// it.
//
// Besides the operations, it holds the progress of the training, if the program reports it: `muster top` shows that.
//
// Cost: two readings of the clock and three atomic operations on the rank's own memory, for begin() and end() together.
// No lock, no system call, no allocation. An entry is lost if 4,096 others begin during it, whether or not it is still
// under way.
//
// Thread-safety: all methods, from any thread, but start() and end() of one ticket must not run concurrently. Two
// BlackBoxes of one memfd (the second World of a process) may be used like one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "muster/base/error.h"
#include "shm/mapping.h"

namespace muster::shm {

inline constexpr const char* kBlackBoxName = "muster-black-box";      // of the memfd
inline constexpr const char* kBlackBoxVariable = "MUSTER_BLACK_BOX";  // the number of a descriptor
inline constexpr uint64_t kNoSequence = ~uint64_t{0};                 // not a collective: no place in the order
inline constexpr int kMoreGroups = 254, kNoGroup = 255;

enum class BlackBoxState : uint8_t {
  kPosted = 1,  // waits for its turn
  kRunning,
  kDone,
  kFailed,
  kTimedOut,
  kPeerLost,
  kAborted,
};
BlackBoxState state_of(const Error& error);

struct BlackBoxEntry {
  int group = kNoGroup;   // from BlackBox::group()
  uint8_t operation = 0;  // an index into set_names()
  uint8_t dtype = 0;      // the same
  uint64_t bytes = 0;
  uint64_t sequence = kNoSequence;  // the collective's number in its group, equal on all ranks of the group
  int peer = -1;                    // root, or the other side of a message; by rank in the group
  uint64_t tag = 0;
  BlackBoxState state = BlackBoxState::kRunning;  // or kPosted
};

class BlackBox {
 public:
  // The box in `fd`, which must come from create_black_box() and may be closed afterwards. CorruptError if it does not.
  static std::shared_ptr<BlackBox> open(int fd);

  // The names of the codes; the first 32 operations and 64 dtypes are kept. Every call must pass the same names.
  void set_names(std::span<const std::string_view> operations, std::span<const std::string_view> dtypes);

  // A number for entries of this group; a new one each time. `ranks`: its members by their ranks in the World, if
  // known, to distinguish groups of the same name. `meeting`: a number that its ranks have in common, and with no other
  // group of that name, if they know one: a rank that comes later than others has not been in all groups. After 64
  // groups, a group gets the number of one with the same name and members, or kMoreGroups.
  int group(std::string_view name, std::span<const int> ranks = {}, uint64_t meeting = 0);

  // Adds an entry that begins now. `now`: the time by monotonic_ns(), if the caller knows it; 0: read the clock.
  // Returns the entry's ticket.
  uint64_t begin(const BlackBoxEntry& entry, uint64_t now = 0) noexcept;
  // Adds an entry that has ended, at `ended`, with entry.state.
  void add(const BlackBoxEntry& entry, uint64_t began, uint64_t ended) noexcept { write(entry, began, began, ended); }
  // A posted operation runs from now on. `sequence`: its number, if that is known only now.
  void start(uint64_t ticket, uint64_t sequence = kNoSequence) noexcept;
  void end(uint64_t ticket, BlackBoxState state, uint64_t now = 0) noexcept;

  // Reports the progress of the training: steps done, and samples that the whole job has trained on. A value that is
  // not given stays as it was. Costs a reading of the clock and a few stores.
  void report(std::optional<uint64_t> step, std::optional<uint64_t> samples) noexcept;

  std::span<const std::byte> segment() const { return {mapping_->data(), mapping_->size()}; }

 private:
  friend std::shared_ptr<BlackBox> open_black_box(int rank, int world_size, bool thread_rank);
  friend void renumber_black_box(int fd, int rank, int world_size);
  explicit BlackBox(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
  uint64_t write(const BlackBoxEntry& entry, uint64_t posted, uint64_t began, uint64_t ended) noexcept;

  const std::shared_ptr<Mapping> mapping_;
  UniqueFd own_;  // keeps this rank's own box open, so that it can be found under /proc
};

// A memfd for one rank's box, with its header: for the launcher, or a rank without one.
UniqueFd create_black_box(int rank, int world_size, std::string_view job_id);

// For a rank that stays while others come and go: sets its place in the next World. BlackBoxes that are already open
// stay usable.
void renumber_black_box(int fd, int rank, int world_size);

// This rank's box: the launcher's, if MUSTER_BLACK_BOX names one for this rank that no other process has taken; else
// its own. A rank that is a thread always has its own. InvalidArgument if the variable is not a number, Unavailable if
// there is no memory or descriptor.
std::shared_ptr<BlackBox> open_black_box(int rank, int world_size, bool thread_rank = false);

uint64_t monotonic_ns();

}  // namespace muster::shm
