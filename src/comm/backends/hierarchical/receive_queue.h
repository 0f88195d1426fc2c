// Receives that wait their turn because one from any source is among them, or before them.
//
// A receive from any source listens to two groups at once, that of this host and that of all ranks; neither may be
// asked to deliver before the other is known to have nothing. So it is posted nowhere: it looks into both, in turn, and
// takes what it finds (Backend::take_message), each time first where it did not find the last one, and there first
// after the rank that sent the last. Receives with its tag that come later stay behind it, since the message that they
// would take is its; so those of one tag get messages in the order in which they were posted, as on every backend.
// Other tags do not wait.
//
// The first look is the caller's. After that a thread looks, every 20 µs at first and then after a twentieth of the
// time that nothing came, at most 1 ms; it is there from the first receive that has to wait, and sleeps while none
// does.
//
// Thread-safety: all members. `attempt` is called without a lock, of receives with one tag by one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "muster/base/deadline.h"

namespace muster::comm::hierarchical_backend {

class ReceiveQueue {
 public:
  enum class Turn {
    kFirst,  // take a message or post the receive
    kLate,   // its deadline has passed behind others: end it with Timeout
    kStop,   // the queue has been stopped: end it
  };
  // Whether that receive is over. Only kFirst may leave it waiting, where nothing has come yet; with an error, or its
  // deadline passed, it ends it. Must not throw.
  using Attempt = std::function<bool(Turn)>;

  ~ReceiveQueue() { stop(); }

  // At once if it can; else later, and after those before it, but not after its deadline.
  void add(int tag, Deadline deadline, Attempt attempt);
  // Whether a receive with this tag has to go through add().
  bool has(int tag);
  void stop();  // what waits ends; later add() too

 private:
  struct Receive {
    Deadline deadline;
    Attempt attempt;
  };
  struct Line {
    std::deque<Receive> receives;
    bool busy = false;  // a thread is with the first of them
  };

  // Tries the first of the line and, while they succeed, those after it; with `lock`, which it gives up meanwhile.
  bool advance(std::unique_lock<std::mutex>& lock, int tag);
  // Ends those behind the first whose deadlines have passed.
  void end_late(std::unique_lock<std::mutex>& lock, int tag);
  void work();

  std::mutex mutex_;
  std::condition_variable news_;
  std::map<int, Line> lines_;  // by tag; none is empty
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace muster::comm::hierarchical_backend
