// Receives from any source, and receives that wait behind one of them.
//
// A receive from any source can get its message from two groups, that of this host and that of all ranks. Posted in
// both, it could get a message from each. So it is posted in neither: it looks into both and takes the message that it
// finds (Backend::take_message). It begins with the group in which the last message was not found, and in the host's
// group with the rank after the one that sent the last message. Later receives with its tag stay behind it, because it
// must get the message that they would take. So receives with one tag get messages in the order in which they were
// posted, as on every backend. Receives with other tags do not wait.
//
// The calling thread looks first. After that a thread of the queue looks: every 20 µs at first, then after a twentieth
// of the time for which nothing has come, but at most every 1 ms. It is started for the first receive that has to wait,
// and sleeps while no receive waits.
//
// What follows a receive (callbacks of its future) runs when the receive is no longer in the queue, so it may receive
// and wait for that. Meanwhile another thread of the queue looks. Such a thread is started when it is needed, and
// stays.
//
// Thread-safety: all members. `attempt` is called without a lock held; with kFirst, for receives with the same tag, by
// one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/base/deadline.h"

namespace muster::comm::hierarchical_backend {

class ReceiveQueue {
 public:
  enum class Turn {
    kFirst,  // take a message or post the receive
    kLate,   // its deadline has passed while it waited behind others: end it with TimeoutError
    kStop,   // the queue has been stopped: end it
  };
  // `over`: the receive has ended, and `then` is to be called. Only kFirst may leave it waiting, if nothing has come
  // yet. An error or a deadline that has passed ends it.
  struct Outcome {
    bool over = false;
    std::function<void()> then = {};
  };
  using Attempt = std::function<Outcome(Turn)>;  // it and `then` must not throw

  // `owner` returns what keeps this object alive. The thread holds it, because a callback of a receive may release the
  // last other reference to the owner.
  explicit ReceiveQueue(std::function<std::shared_ptr<void>()> owner) : owner_(std::move(owner)) {}
  ~ReceiveQueue() { stop(); }

  // Attempts the receive immediately if none with its tag waits. Otherwise, or if nothing has come, attempts it later,
  // after those before it, and ends it when its deadline has passed.
  void add(int tag, Deadline deadline, Attempt attempt);
  // Whether a receive with this tag has to go through add().
  bool has(int tag);
  // Ends receives that wait, and those that add() gets later. Called on a thread of the queue, it does not wait for
  // that thread.
  void stop();

 private:
  struct Receive {
    Deadline deadline;
    Attempt attempt;
  };
  struct Line {
    std::deque<Receive> receives;
    bool busy = false;  // a thread works on this line
  };

  // All are called with `lock` held, which they release at times. `looks`: on the thread that looks.
  //
  // Attempts the first receive of the line and, while they succeed, those after it. Returns whether one was over.
  bool advance(std::unique_lock<std::mutex>& lock, int tag, bool looks);
  // Ends the receives behind the first whose deadlines have passed.
  void end_late(std::unique_lock<std::mutex>& lock, int tag);
  // Of a receive that has left its line.
  void finish(std::unique_lock<std::mutex>& lock, Attempt attempt, std::function<void()> then, bool looks);
  void see_that_one_looks();
  void begin_to_look(std::unique_lock<std::mutex>& lock);
  void look(std::unique_lock<std::mutex>& lock);  // until the end

  const std::function<std::shared_ptr<void>()> owner_;
  std::mutex mutex_;
  std::condition_variable news_;  // for the thread that looks
  std::condition_variable turn_;  // for those that wait to look
  std::map<int, Line> lines_;     // by tag; none is empty
  bool stop_ = false;
  bool one_looks_ = false;
  int waiting_ = 0;  // threads that want to look
  std::vector<std::thread> threads_;
};

}  // namespace muster::comm::hierarchical_backend
