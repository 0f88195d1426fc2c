#include "comm/kit/fault_injector.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

constexpr std::chrono::nanoseconds kNap = std::chrono::milliseconds(5);
// A thread that is "stopped" goes on when all others must have given up, also if the group does not tell it so.
constexpr std::chrono::seconds kOthersTake{60};

}  // namespace

FaultInjector::FaultInjector(const FaultPlan& plan, const std::string& group, int rank, bool shares_process,
                             Hooks hooks)
    : shares_process_(shares_process), hooks_(std::move(hooks)) {
  for (const Fault& fault : plan.faults())
    if (fault.group == group && fault.rank == rank) faults_.push_back({fault});
}

FaultInjector::~FaultInjector() {
  for (const auto& [fault, done] : faults_) {
    if (done) continue;
    MUSTER_LOG(kWarning) << "the fault of the FaultPlan at operation " << fault.operation << " of rank " << fault.rank
                         << " in group '" << fault.group << "' did nothing, because that operation "
                         << (fault.action == FaultAction::kCorrupt ? "has no data, or " : "") << "was never reached";
  }
}

void FaultInjector::act(FaultPhase phase, uint64_t operation, Deadline deadline) const {
  for (const auto& [fault, done] : faults_) {
    if (done || fault.operation != operation || fault.phase != phase || fault.action == FaultAction::kCorrupt) continue;
    done = true;
    switch (fault.action) {
      case FaultAction::kKill:
        if (!shares_process_) ::kill(::getpid(), SIGKILL);
        hooks_.drop_out("killed by its FaultPlan");
        break;
      case FaultAction::kStop:
        if (!shares_process_) {
          ::raise(SIGSTOP);
          break;
        }
        stand_still(deadline.later(kOthersTake).left());
        hooks_.check();
        throw Aborted(text("rank ", fault.rank, " was stopped by its FaultPlan"));
      case FaultAction::kDelay:
        stand_still(fault.delay);
        break;
      case FaultAction::kCorrupt:
        break;  // see corrupt()
    }
  }
}

void FaultInjector::flip_a_bit(std::span<std::byte> contribution, uint64_t operation) const {
  for (const auto& [fault, done] : faults_)
    if (fault.action == FaultAction::kCorrupt && fault.operation == operation && !contribution.empty()) {
      done = true;
      contribution[0] ^= std::byte{0x80};
    }
}

// Blocks for `duration`, or until the group fails.
void FaultInjector::stand_still(std::chrono::nanoseconds duration) const {
  for (const auto until = Deadline::after(duration); !until.passed() && !hooks_.failed();)
    std::this_thread::sleep_for(std::min(kNap, until.left()));
}

}  // namespace muster::comm
