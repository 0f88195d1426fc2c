// Remote calls in the profiler: an event per call, per wait for one, and per handler, each in its thread.
//
// Thread-safety: values.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <utility>

#include "base/text.h"

namespace muster::rpc {

// "muster:rpc …", as long as the object lives, if a profiler is active in this thread or in all. The words are made
// only then.
class ProfilerEvent {
 public:
  template <typename... Words>
  explicit ProfilerEvent(const Words&... words) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[unlikely]]
      event_.emplace(std::move(*callbacks)).before(text("muster:rpc ", words...));
  }

 private:
  std::optional<at::RecordFunction> event_;  // which takes longer to make and destroy than a call may cost here
};

}  // namespace muster::rpc
