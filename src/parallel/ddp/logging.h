// Measures the steps of a DistributedDataParallel, for DdpLoggingData.
//
// Thread-safety: one thread, as a DistributedDataParallel.
#pragma once

#include <cstdint>

#include "muster/base/deadline.h"
#include "muster/parallel/ddp_logging.h"
#include "parallel/gradients/gradient_reducer.h"

namespace muster::ddp {

class StepTimes {
 public:
  void begin_forward() { forward_began_ = Clock::now(); }
  void end_forward() { forward_ended_ = Clock::now(); }
  // When a backward() has averaged. Does not count it if no forward() was before it, or if a time is unset.
  void end_step(const parallel::BackwardTimes& backward);

  void write(DdpLoggingData& data) const;

 private:
  Clock::time_point forward_began_, forward_ended_;  // of the last forward(); unset if a step has counted it
  int64_t steps_ = 0;
  DdpLoggingData::Times last_, sum_;
};

}  // namespace muster::ddp
