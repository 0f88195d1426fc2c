// Injects the faults of a FaultPlan into the collectives of one group on this rank (muster/comm/fault_plan.h).
//
// QueuedBackend calls at() before and after each collective. A backend calls it in the phases between, which only the
// backend knows.
//
// Thread-safety: at() and corrupt() on the thread that executes the collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/comm/fault_plan.h"

namespace muster::comm {

class FaultInjector {
 public:
  struct Hooks {
    std::function<bool()> failed;  // whether the group has failed on this rank
    std::function<void()> check;   // throws the group's failure if it has failed
    // Leaves the group as a process that ends does, and throws. `cause`: for the peers.
    std::function<void(const std::string& cause)> drop_out;
  };

  // Keeps the faults of this rank in this group. `shares_process`: another rank of the group is a thread of this
  // process, so a fault must not concern the whole process.
  FaultInjector(const FaultPlan& plan, const std::string& group, int rank, bool shares_process, Hooks hooks);
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;
  ~FaultInjector();  // logs which faults did nothing

  bool any() const { return !faults_.empty(); }
  // `operation`: its number in the group, from 0. `deadline`: of the operation. Throws if the rank drops out.
  // A fault acts once.
  void at(FaultPhase phase, uint64_t operation, Deadline deadline) const {
    if (any()) [[unlikely]]
      act(phase, operation, deadline);
  }
  // Flips a bit if a fault wants that of the operation; an operation has several contributions if it goes in turns.
  void corrupt(std::span<std::byte> contribution, uint64_t operation) const {
    if (any()) [[unlikely]]
      flip_a_bit(contribution, operation);
  }

 private:
  void act(FaultPhase phase, uint64_t operation, Deadline deadline) const;
  void flip_a_bit(std::span<std::byte> contribution, uint64_t operation) const;
  void stand_still(std::chrono::nanoseconds duration) const;

  struct Planned {
    Fault fault;
    mutable bool done = false;  // only the thread that executes a collective uses it
  };
  std::vector<Planned> faults_;
  bool shares_process_ = false;
  Hooks hooks_;
};

}  // namespace muster::comm
