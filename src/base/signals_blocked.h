// All signals blocked in this thread while it lives: for starting threads, which inherit that.
//
// Thread-safety: belongs to one thread.
#pragma once

#include <pthread.h>

#include <csignal>

namespace muster {

struct SignalsBlocked {
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  sigset_t before;
};

}  // namespace muster
