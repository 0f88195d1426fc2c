// The threads that move messages for which nobody waits, and that run callbacks (messages.h).
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "comm/backends/shm/messages.h"

namespace muster::comm::shm_backend {
namespace {

constexpr size_t kMostThreads = 64;  // of which all but one are in callbacks
constexpr std::chrono::microseconds kLull{20}, kLongestLull{320};
constexpr int kLullsWithoutMessages = 50;

}  // namespace

// The first one's here. Those of the others, too, if no other thread takes them meanwhile.
void Messages::run_callbacks(Completed messages, std::unique_lock<std::mutex>& lock) {
  if (messages.empty()) return;
  std::move(messages.begin() + 1, messages.end(), std::back_inserter(callbacks_));
  try {
    let_work();
  } catch (const std::exception&) {  // no thread can start: what is pending waits for the callbacks
  }
  for (auto next = std::move(messages.front()); next; next = take_callbacks()) {
    ++in_callbacks_;
    if (pending()) work_.notify_all();  // this thread does not move it now
    lock.unlock();
    next->on_complete(*next, Message::Call::kCallbacks);
    next = nullptr;  // without the lock: this may release objects of the user
    lock.lock();
    --in_callbacks_;
  }
}

std::shared_ptr<Message> Messages::take_callbacks() {
  if (callbacks_.empty()) return nullptr;
  auto message = std::move(callbacks_.front());
  callbacks_.pop_front();
  return message;
}

// Sees to it that a thread moves what is pending, though nobody may wait for it, and runs callbacks.
void Messages::let_work() {
  if (callbacks_.empty() && (moving_ || stop_ || !pending())) return;
  if (idle_ > 0) return work_.notify_one();
  if (threads_.size() >= kMostThreads) return;  // one of them comes to it when its callbacks are over
  try {
    threads_.push_back(start_thread("muster-messages", [this, alive = owner_()] { work(); }));
  } catch (const std::exception&) {
    if (threads_.empty()) throw;
  }
}

void Messages::work() {
  std::unique_lock lock(mutex_);
  bool goes_on = false;  // it has moved messages, and no other thread does
  for (;;) {
    ++idle_;
    work_.wait(lock, [&] { return stop_ || !callbacks_.empty() || (needs_mover() && !moving_); });
    --idle_;
    Completed with_callbacks;
    if (auto message = take_callbacks()) {
      with_callbacks.push_back(std::move(message));
    } else if (stop_) {
      return;  // what was pending has failed
    } else {
      moving_ = true;
      const uint64_t before = awaited_;
      if (goes_on || await_lull(lock)) {
        lock.unlock();
        with_callbacks = move_some();
        lock.lock();
        goes_on = awaited_ == before && !somebody_moves();
      }
      moving_ = false;
    }
    run_callbacks(std::move(with_callbacks), lock);
  }
}

// Most threads that issue a message wait for it soon, and then move all that is pending themselves. A second thread
// that also does costs them a processor, the lock and wake-ups. So the mover looks every now and then, and takes over
// when no thread has moved anything since its last look. If one waits for long, the mover sleeps until that one goes
// on. Returns false if there is nothing to do for it. With the lock, and releases it meanwhile.
bool Messages::await_lull(std::unique_lock<std::mutex>& lock) {
  std::chrono::microseconds lull = kLull;
  uint64_t seen = awaited_;
  bool one_waits = false;  // the same thread as at the last look, for long
  for (int idle = 0; idle < kLullsWithoutMessages && !stop_ && callbacks_.empty();) {
    if (one_waits) {
      defers_ = true;  // before the look at somebody_moves(): ~Awaiting() notifies, or this thread sees it
      work_.wait_for(lock, kNap, [&] { return stop_ || !callbacks_.empty() || !somebody_moves(); });
      defers_ = false;
      lull = kLull;
    } else {
      lock.unlock();
      std::this_thread::sleep_for(lull);
      lock.lock();
      lull = std::min(2 * lull, kLongestLull);
    }
    const bool is_quiet = awaited_ == std::exchange(seen, awaited_.load());
    if (pending() && is_quiet && !somebody_moves()) return true;
    one_waits = is_quiet && somebody_moves() && lull == kLongestLull;
    idle = needs_mover() ? 0 : idle + 1;
  }
  return false;
}

// Until some messages are complete, none is pending, or a thread that waits moves them. Returns those whose callbacks
// are to be called.
Messages::Completed Messages::move_some() {
  Completed completed;
  const auto another_moves = [this, seen = awaited_.load()] { return somebody_moves() || awaited_ != seen; };
  while (completed.empty() && !another_moves()) {
    if (move(completed)) continue;
    // Another thread may complete all that is pending before this one sleeps. Then no peer rings for it.
    channel_.control(channel_.rank()).inbox.sleep(kNap, [&] {
      return move(completed, true) || nothing_pending() || another_moves();
    });
    if (nothing_pending()) break;
  }
  return tell(completed);
}

void Messages::stop() {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (pending())
      fail_all(completed, std::make_exception_ptr(Aborted(text("group '", channel_.name(), "' is closing"))));
  }
  report(completed);
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    threads.swap(threads_);
    work_.notify_all();
  }
  const bool in_callback = std::any_of(threads.begin(), threads.end(), [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  });
  for (std::thread& thread : threads) in_callback ? thread.detach() : thread.join();
}

}  // namespace muster::comm::shm_backend
