// Reports how far the training is: `muster top` shows each rank's step and samples per second.
//
//   for (int64_t step = 0; …; ++step) {
//     …
//     muster::report_progress({.step = step + 1, .samples = (step + 1) * global_batch});
//   }
//
// The numbers go into the rank's black box (docs/blackbox.md), memory that other processes read. A report costs a
// reading of the clock and a few stores; it takes no lock and makes no system call. muster::Progress reports by itself:
// its advance() calls are the steps.
//
// Thread-safety: any thread may call it; the last report counts.
#pragma once

#include <cstdint>

namespace muster {

struct TrainingProgress {
  int64_t step = -1;     // steps done so far; negative: unchanged
  int64_t samples = -1;  // samples that the whole job has trained on so far; negative: unchanged
};

// Reports for the rank of the calling thread's World; does nothing if the thread has no World. Never throws.
void report_progress(const TrainingProgress& progress) noexcept;

}  // namespace muster
