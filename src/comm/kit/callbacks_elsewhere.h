// For a thread that must not run users' callbacks now, because it holds what they may need.
//
// Thread-safety: each object belongs to its thread.
#pragma once

#include "base/auto_reset.h"

namespace muster::comm {

inline thread_local bool callbacks_run_elsewhere = false;

// As long as it lives, messages that this thread moves, and that others have posted, have their callbacks called by
// threads of their backend. (If it can have no thread, by this one.)
class CallbacksElsewhere {
 private:
  const AutoReset<bool> set_{callbacks_run_elsewhere, true};
};

}  // namespace muster::comm
