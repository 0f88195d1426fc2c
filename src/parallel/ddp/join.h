// Ranks with different numbers of batches: those that have no more take part in the collectives of the others.
//
// Before each collective of forward() and of backward(), all ranks of the group meet. Ranks with data say what they do
// next; the others learn it, and do the same without data. Ranks with data must all do the same.
//
// Several replicas may be joined. A backward() may go through all of them, so each averages when it has ended: a rank
// without data could not follow if their buckets came in turns.
//
// A rank whose join() ends with an error of its own says so in one last meeting, to which the others come with their
// next forward() or backward(). So no rank waits for it in vain.
//
// Errors, on all ranks: Mismatch if they do not, or have other JoinOptions; InvalidArgument if a rank has no more data,
// and throw_on_early_termination is set or the backward() is one with create_graph; Aborted if a rank has failed, but
// not on that rank. There are no further meetings. Thread-safety: one thread.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "muster/comm/group.h"
#include "muster/parallel/ddp.h"

namespace muster::ddp {

class Meetings {
 public:
  enum class Event : uint8_t { kNoData, kForward, kBackward, kBackwardWithGraph, kFailed };
  // What a rank does next, and with which of the joined replicas.
  struct Step {
    Event event = Event::kNoData;
    int replica = 0;
    bool more = false;  // a backward() that another replica is in, too, and that has not averaged there
    bool operator==(const Step&) const = default;
  };
  struct Meeting {
    Step step;                // kNoData: no rank has any
    std::vector<int> active;  // ranks with data
  };

  Meetings(Group group, JoinOptions options) : group_(std::move(group)), options_(std::move(options)) {}
  Meeting meet(const Step& mine);                      // collective; throws the same again if it has thrown
  bool are_over() const { return error_ != nullptr; }  // the other ranks have the same error
  const JoinOptions& options() const { return options_; }
  // The first rank that had data in the last meeting with any; 0 before.
  int last_active() const { return last_active_; }

 private:
  Meeting meet_once(const Step& mine);

  const Group group_;
  const JoinOptions options_;
  int last_active_ = 0;
  std::exception_ptr error_;
};

}  // namespace muster::ddp
