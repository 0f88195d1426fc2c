// Signals that are blocked in this thread while an object lives.
//
// Thread-safety: an object belongs to one thread.
#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace muster {

// Blocks all signals: for starting threads, which inherit the mask.
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

// Blocks the signals that a failed write raises and that by default end the process: SIGPIPE, if the peer has closed
// the connection, and SIGXFSZ, if a file would become too large. The write then fails with EPIPE or EFBIG. A signal
// that was raised meanwhile is discarded, unless the caller itself had blocked it.
struct WriteSignalsBlocked {
  WriteSignalsBlocked() {
    sigset_t both;
    sigemptyset(&both);
    for (const int signal : kSignals) sigaddset(&both, signal);
    pthread_sigmask(SIG_BLOCK, &both, &before);
  }
  ~WriteSignalsBlocked() {
    for (const int signal : kSignals) {
      if (sigismember(&before, signal) == 1) continue;
      sigset_t one;
      sigemptyset(&one);
      sigaddset(&one, signal);
      const timespec now{};
      while (::sigtimedwait(&one, nullptr, &now) > 0) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  WriteSignalsBlocked(const WriteSignalsBlocked&) = delete;
  WriteSignalsBlocked& operator=(const WriteSignalsBlocked&) = delete;

  static constexpr int kSignals[] = {SIGPIPE, SIGXFSZ};
  sigset_t before;
};

}  // namespace muster
