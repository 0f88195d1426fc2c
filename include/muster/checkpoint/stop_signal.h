// SIGTERM as a wish that a program grants at its next boundary.
//
//   int main() {
//     muster::StopSignal stop;         // from here on, whatever the program does: no SIGTERM ends it by itself
//     auto world = muster::init();
//     …                                // data, models: a wish from this time waits for the first boundary
//     muster::Snapshot snapshot(…);    // whose step() and stop_here() save and say so; or elastic::run()
//   }
//
// A Snapshot and elastic::run() have one of their own, so a training needs none for the time in which they live. One
// more, made first, covers what comes before, between and after them.
//
// The first StopSignal of a process installs a handler, which does nothing but count, and the last one puts back what
// was there. All that live at the same time (ranks that are threads, several Snapshots) see the same signal. A signal
// from before the first of them does not count for the next ones: who has ended a training and begins another in the
// same process was not asked to end that.
//
// Who takes the signal as a wish must grant it: `muster run` kills what has not ended --stop-grace (5 s) after it.
//
// A handler that somebody else installs meanwhile stays: then the wish is theirs to pass on.
//
// Signals belong to the process, and so does this state (docs/architecture.md, "State of the process").
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>

namespace muster {

class StopSignal {
 public:
  StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  ~StopSignal();

  // Whether this process was asked. Other ranks may learn of it at other times: step() and stop_here() of a Snapshot
  // agree.
  bool requested() const noexcept;

 private:
  uint64_t before_;  // signals when the first of those that live now was made
};

}  // namespace muster
