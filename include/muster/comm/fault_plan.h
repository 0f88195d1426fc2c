// Injected faults, such as "kill rank 1 at its operation 5". They test what a program does after a failure; Muster's
// own tests use them.
//
//   muster::FaultPlan plan;
//   plan.add({.action = FaultAction::kKill, .rank = 1, .operation = 5});
//   WorldOptions options{.faults = plan};
//
// or, without a change to the program, MUSTER_FAULTS="kill:rank=1,operation=5;delay:rank=0,operation=9,ms=200".
//
// Backend shm injects all faults; gloo, mpi and hierarchical all but kCorrupt; fake, which has no phases between, those
// of kStart and kEnd; nccl none. The operations of hierarchical are made of steps: there kPosted and kMiddle are both
// after the first step inside the host. A backend that cannot inject a fault of a group throws Unavailable when the
// group is made. When a group ends, its faults that did nothing, because their operation or their rank did not exist,
// are warnings in the log.
//
// Operations are numbered per group from 0, in the order of issue. Only collectives of the group named by `group` count
// ("world" is the default group). Thread-safety: a value; immutable once given to a World.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

enum class FaultAction : uint8_t {
  kKill,   // SIGKILL to the rank's own process; a rank that is a thread drops out without a good-bye
  kStop,   // SIGSTOP to the rank's own process; a rank that is a thread stands still until the group has failed
  kDelay,  // waits for `delay` first
  // Flips a bit of this rank's contribution; the phase does not matter. Not of one above 4 KiB that peers read on the
  // heap, except in all_reduce and reduce.
  kCorrupt,
};

enum class FaultPhase : uint8_t {
  kStart,   // before this rank announces the operation
  kPosted,  // after it announced the operation, before it looks at the others
  kMiddle,  // after all have announced it, before the result is complete
  kEnd,     // after this rank's part is complete
};

struct Fault {
  FaultAction action = FaultAction::kKill;
  int rank = 0;
  uint64_t operation = 0;
  FaultPhase phase = FaultPhase::kStart;
  std::chrono::milliseconds delay{0};
  std::string group = "world";
};

class FaultPlan {
 public:
  void add(Fault fault) { faults_.push_back(std::move(fault)); }
  bool empty() const { return faults_.empty(); }
  const std::vector<Fault>& faults() const { return faults_; }

  // Parses the form of MUSTER_FAULTS above. Throws InvalidArgument, which quotes the offending piece, if `text` does
  // not have that form.
  static FaultPlan parse(std::string_view text);

 private:
  std::vector<Fault> faults_;
};

}  // namespace muster
