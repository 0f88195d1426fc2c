// The collectives as calls of one kind, for tests that disturb one of their ranks: kill it, stop it, let it disagree.
//
// Thread-safety: a call belongs to one rank's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "muster/comm/fault_plan.h"
#include "muster/comm/world.h"

namespace muster::test {

// The rank that is disturbed: the root of calls in which the root sends, and not the root of those in which it is sent
// something.
inline constexpr int kVictim = 1;

struct Call {
  const char* name;
  at::Tensor (*run)(World&, int64_t count);  // in the current World; returns what this rank has from it
};
extern const std::vector<Call> kCalls;  // all but barrier
extern const Call kBarrier;

inline constexpr std::pair<FaultPhase, const char*> kPhases[] = {{FaultPhase::kStart, "start"},
                                                                 {FaultPhase::kPosted, "posted"},
                                                                 {FaultPhase::kMiddle, "middle"},
                                                                 {FaultPhase::kEnd, "end"}};

at::Tensor mine(World& world, int64_t count);  // what this rank contributes

}  // namespace muster::test
