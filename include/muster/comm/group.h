// Groups of ranks that communicate together.
//
// A Group is a small value: a shared handle to one rank's membership. The World's default group has every rank;
// new_group() makes others. Collectives of one group run in the order in which they are called and must be called in
// the same order on all its ranks; different groups are independent of each other.
//
// Ranks given to operations (src, dst, root) are ranks *in the group*, 0 to size()-1; global_rank() translates.
//
// Thread-safety: several threads may copy and use a handle concurrently. The order of two collectives that two threads
// issue without synchronising is not defined, and the ranks would disagree about it.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Backend;
}

namespace muster {

// Where a function was called; a Mismatch names it on both sides. Leave it out.
using Site = std::source_location;

inline constexpr int kAnySource = -1;  // the source of a receive that takes the message that comes first

class Group;
class World;
namespace comm {
class Backend;
Backend& backend_of(const Group& group);
}  // namespace comm

// Numbered as c10d::ReduceOp. PREMUL_SUM: each rank's tensor times its factor, summed.
enum class ReduceOp : uint8_t { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM };
std::string_view to_string(ReduceOp op);

// What a group has done so far on this rank.
struct CommStats {
  uint64_t operations = 0;             // collectives and messages completed
  uint64_t bytes = 0;                  // payload of this rank in them
  std::chrono::nanoseconds blocked{};  // time that callers spent waiting in blocking operations or in Work::wait()
};

// How often a rank was the last to come to a collective of its group, and how long all other ranks waited for it alone.
struct Straggler {
  int rank = 0;  // in the group
  uint64_t times_last = 0;
  std::chrono::nanoseconds late{};
};

struct GroupOptions {
  std::string backend;                   // as WorldOptions::backend; empty: the World's
  std::chrono::milliseconds timeout{0};  // of the group's start, and of operations without their own; 0: the World's
  std::string name;                      // in messages, the black box and a FaultPlan; empty: "group 3"
  // Failures of the group, with PeerLost::rank() and TimeoutError::missing(), number the ranks as the group that was
  // split, or, of World::new_group(), as the World. For a library whose users do not know the group. `nccl` ignores it.
  bool parents_ranks = false;
};

class Group {
 public:
  Group();  // stands for "the default group of the calling thread's World" wherever a Group is taken
  Group(const Group&);
  Group(Group&&) noexcept;
  Group& operator=(const Group&);
  Group& operator=(Group&&) noexcept;
  ~Group();

  // All methods throw Aborted on a default-constructed handle in a thread without a World.
  int rank() const;  // this rank in the group, or -1 if it is not a member
  int size() const;
  int global_rank(int group_rank) const;  // InvalidArgument outside 0..size()-1
  const std::vector<int>& ranks() const;  // global ranks of the members, in group order
  bool is_member() const { return rank() >= 0; }

  // Splits this group into groups of the members that give the same color, in the order of their keys and, where these
  // are equal, of their ranks in this group. Every member must call it. A member whose color is negative gets a handle
  // with is_member() == false. It ends as a group of World::new_group() does. Source: MPI_Comm_split.
  Group split(int color, int key = 0, const GroupOptions& options = {}, const Site& site = Site::current()) const;

  std::string_view backend_name() const;  // "shm", …
  CommStats stats() const;
  // By rank, of all collectives so far; a backend over a wire leaves out the last one, and nccl those of CUDA tensors
  // (docs/backends.md). Empty for a backend that cannot tell.
  std::vector<Straggler> stragglers() const;
  // One sentence that names the rank (or host) that holds up the others: it comes last to at least two thirds of the
  // collectives, and costs at least `at_least` and a twentieth of the time since the group was made. "" if there is
  // none. When a group ends, its rank 0 logs the sentence if a second or more was lost.
  std::string straggler_report(std::chrono::nanoseconds at_least = {}) const;

  // The backend itself, for code that uses c10d. It throws Muster's errors; process_group.h has one that throws c10d's.
  // InvalidArgument if this rank is not a member.
  c10::intrusive_ptr<c10d::Backend> c10d_backend() const;

  // This group; or, of a default-constructed handle, the present default group of this thread's World. For objects that
  // outlive the call or move to other threads.
  Group resolved() const;

 private:
  struct State;
  friend class World;
  friend class LingeringGroups;
  friend comm::Backend& comm::backend_of(const Group& group);

  explicit Group(std::shared_ptr<State> state);
  const State& state() const;
  std::shared_ptr<State> state_;
};

}  // namespace muster
