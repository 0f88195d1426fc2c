// How far the training is, told to whoever watches: `muster top` shows each rank's step and samples a second.
//
//   for (int64_t step = 0; …; ++step) {
//     …
//     muster::report_progress({.step = step + 1, .samples = (step + 1) * global_batch});
//   }
//
// The numbers go into the rank's black box (docs/blackbox.md), memory that other processes read: a reading of the clock
// and a few stores, no lock, no system call. muster::Progress reports by itself: its advance() calls are the steps.
//
// Thread-safety: from any threads; the last report counts.
#pragma once

#include <cstdint>

namespace muster {

struct TrainingProgress {
  int64_t step = -1;     // steps done so far; negative: as it was
  int64_t samples = -1;  // samples that the whole job has trained on so far; negative: as it was
};

// For the rank that is the calling thread's World; without one nothing happens. Never throws.
void report_progress(const TrainingProgress& progress) noexcept;

}  // namespace muster
