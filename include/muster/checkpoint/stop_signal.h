// StopSignal: turns SIGTERM into a request to stop, which the program obeys at its next boundary.
//
//   int main() {
//     muster::StopSignal stop;         // from here on, a SIGTERM alone does not end the process
//     auto world = muster::init();
//     …                                // data, models: a signal that comes now takes effect at the first boundary
//     muster::Snapshot snapshot(…);    // its step() and stop_here() save and return true; or elastic::run()
//   }
//
// A Snapshot and elastic::run() each have a StopSignal, so a training needs none while they exist. Another one, made
// first, covers the time before, between and after them.
//
// The first StopSignal of a process installs a handler, which only counts signals, and the last one restores the
// previous handler. All StopSignals that exist at the same time (ranks that are threads, several Snapshots) see the
// same signal. A signal does not count for StopSignals that are made when all earlier ones are gone: it was a request
// to end the earlier training, not the next one in the same process.
//
// A program that has a StopSignal must stop when requested: `muster run` kills processes that have not ended
// --stop-grace (5 s) after the signal.
//
// If other code installs a handler meanwhile, that handler stays, and has to pass the request on.
//
// Signals belong to the process, and so does this state (docs/architecture.md, "State of the process").
//
// Thread-safety: all functions.
#pragma once

#include <cstdint>

namespace muster {

class StopSignal {
 public:
  StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  ~StopSignal();

  // Whether this process was asked to stop. Other ranks may learn of it at other times; step() and stop_here() of a
  // Snapshot make the ranks agree.
  bool requested() const noexcept;

 private:
  uint64_t before_;  // number of signals when the first of the present StopSignals was made
};

}  // namespace muster
