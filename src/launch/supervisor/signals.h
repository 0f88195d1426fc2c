// The launcher's signals while it launches: blocked, and read from a descriptor beside all others.
//
// SIGPIPE and SIGXFSZ are always blocked: if a reader of the output goes away, or a file may not grow, write(2) fails
// and the launcher lives on. With `forward`, the signals that the launcher passes on to the ranks are blocked, too, and
// SIGCHLD. SIGHUP stays ignored if it was ignored, as nohup(1) requires.
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
  // Signals that have come and that nobody has taken come too late to end this process.
  ~Signals() { take(); }

  const sigset_t& original_mask() const { return of_writes_.before; }
  int fd() const { return fd_.get(); }  // readable when take() has something; -1 without `forward`
  std::vector<int> take();

 private:
  WriteSignalsBlocked of_writes_;  // its destructor restores the whole mask
  UniqueFd fd_;
};

}  // namespace muster::launch
