// Remote calls in the profiler: an event per call, per wait for one, and per handler, each in its thread.
//
// Thread-safety: values.
#pragma once

#include <ATen/record_function.h>

#include "base/text.h"

namespace muster::rpc {

// "muster:rpc …", as long as the object lives, if a profiler is active in this thread or in all. The words are made
// only then.
class ProfilerEvent {
 public:
  template <typename... Words>
  explicit ProfilerEvent(const Words&... words) : event_(at::RecordScope::USER_SCOPE) {
    if (event_.isActive()) [[unlikely]]
      event_.before(text("muster:rpc ", words...));
  }

 private:
  at::RecordFunction event_;
};

}  // namespace muster::rpc
