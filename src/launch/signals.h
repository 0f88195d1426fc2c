// The launcher's signals while it launches: blocked, and read from a descriptor beside all others.
//
// SIGPIPE and SIGXFSZ are always blocked (a reader of our output that goes away, or a file that may not grow, is an
// error of write(2), not our death). With
// `forward`, so are the signals that the launcher passes on to the ranks, and SIGCHLD. SIGHUP stays ignored where it
// was, as nohup(1) wants it.
//
// Thread-safety: none. Threads started meanwhile inherit the mask, as they must; ranks get original_mask() back.
#pragma once

#include <signal.h>

#include <vector>

#include "base/fd.h"
#include "base/signals_blocked.h"

namespace muster::launch {

class Signals {
 public:
  explicit Signals(bool forward);
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  const sigset_t& original_mask() const { return of_writes_.before; }
  int fd() const { return fd_.get(); }  // readable when take() has something; -1 without `forward`
  std::vector<int> take();

 private:
  WriteSignalsBlocked of_writes_;  // its end restores the whole mask
  UniqueFd fd_;
};

}  // namespace muster::launch
