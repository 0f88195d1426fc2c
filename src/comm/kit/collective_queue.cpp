#include "comm/kit/collective_queue.h"

#include <exception>
#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"

namespace muster::comm {

namespace {
thread_local Deadline patience = Deadline::never();
}  // namespace

Deadline CollectiveQueue::patience_of_this_thread() { return patience; }

void CollectiveQueue::submit(Job job, After after) {
  {
    const std::lock_guard lock(mutex_);
    if (!stop_) return add({.job = std::move(job), .after = std::move(after)}, /*runs_on_a_thread=*/true);
  }
  bool more = false;
  run([&](bool) { more = job(false); });
  job = nullptr;
  if (more) after();
}

void CollectiveQueue::add(Queued job, bool runs_on_a_thread) {
  if (runs_on_a_thread) have_free_thread();
  jobs_.push_back(std::move(job));
  want();
  wake_.notify_one();
}

void CollectiveQueue::have_free_thread() {
  if (free_threads_ > 0) return;
  threads_.push_back(start_thread(name_, [this, alive = weak_from_this().lock()] { work(); }));
  ++free_threads_;
}

void CollectiveQueue::run_in_turn(const std::function<void(bool by_waiter)>& job, Deadline deadline,
                                  const std::function<void()>& late, std::chrono::nanoseconds slack) {
  std::atomic<bool> begun = false, finished = false;
  {
    const std::lock_guard lock(mutex_);
    add({.job =
             [&](bool by_waiter) {
               begun = true;
               job(by_waiter);
               finished = true;
               return false;
             },
         .after = nullptr,
         .owner = &begun},
        /*runs_on_a_thread=*/false);
  }
  const auto has_run = [&] { return finished.load(); };
  drive(has_run, deadline);
  if (!begun && late) late();
  drive(has_run, deadline.later(slack));
  if (finished) return;
  if (take_back(&begun))
    throw TimeoutError(text("the group's collective before this one has not ended, ",
                            std::chrono::duration_cast<std::chrono::seconds>(slack).count(),
                            " s after this one's deadline"));
  drive(has_run);  // it runs: on another thread, or it has its own deadline
}

bool CollectiveQueue::take_back(const void* owner) {
  const std::lock_guard lock(mutex_);
  const bool was_queued = std::erase_if(jobs_, [&](const Queued& each) { return each.owner == owner; }) > 0;
  if (idle_but_wanted()) release();
  return was_queued;
}

void CollectiveQueue::await_turn(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  ++waiters_;
  want();
  if (busy() && deadline.is_never())
    turn_.wait(lock);
  else if (busy())
    turn_.wait_until(lock, deadline.when());
  --waiters_;
}

void CollectiveQueue::drive(const std::function<bool()>& done, Deadline deadline) {
  struct Patience {  // drives nest: a job of one group may use another group's queue
    explicit Patience(Deadline deadline) : before(std::exchange(patience, deadline)) {}
    ~Patience() { patience = before; }
    const Deadline before;
  } const mine(deadline);
  std::unique_lock lock(mutex_);
  while (!done()) {
    if (busy()) {
      if (deadline.passed()) break;
      await_turn(lock, deadline);
    } else if (!jobs_.empty()) {
      run_first(lock, true);
    } else {
      break;
    }
  }
  if (idle_but_wanted()) release();
}

void CollectiveQueue::stop() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  want();
  wake_.notify_all();
  while (!threads_.empty()) {  // until they end, they may start others
    auto threads = std::exchange(threads_, {});
    lock.unlock();
    for (auto& thread : threads) join_or_detach(thread);
    lock.lock();
  }
  while (busy()) await_turn(lock);
  if (idle_but_wanted()) release();
}

void CollectiveQueue::run_first(std::unique_lock<std::mutex>& lock, bool by_waiter) {
  Queued first = std::move(jobs_.front());
  jobs_.pop_front();
  state_.fetch_or(kBusy, std::memory_order_acquire);  // it is wanted, so no other thread takes it without the lock
  lock.unlock();
  const bool more = first.job(by_waiter);
  first.job = nullptr;  // without the lock: it releases what the job holds
  lock.lock();
  release();
  if (!more) {
    lock.unlock();
    first.after = nullptr;
    lock.lock();
    return;
  }
  if (!by_waiter) {
    --free_threads_;
    try {
      if (!jobs_.empty()) have_free_thread();
    } catch (const std::exception&) {  // no more threads can be had: the jobs wait until `after` is over
    }
  }
  lock.unlock();
  first.after();
  first.after = nullptr;
  lock.lock();
  if (!by_waiter) ++free_threads_;
}

void CollectiveQueue::give_back_to_others() {
  const std::lock_guard lock(mutex_);
  release();
}

void CollectiveQueue::release() {
  const bool wanted = waiters_ > 0 || !jobs_.empty();
  state_.store(wanted ? kWanted : 0, std::memory_order_release);
  if (waiters_ > 0) turn_.notify_all();
  if (stop_) {
    wake_.notify_all();
  } else if (!jobs_.empty()) {
    wake_.notify_one();
  }
}

void CollectiveQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] {
      if (stop_)
        want();  // a thread may have taken the queue without the lock; now it wakes this one when it gives it back
      return !busy() && (!jobs_.empty() || stop_);
    });
    if (jobs_.empty()) break;
    run_first(lock, false);
  }
  --free_threads_;
  if (idle_but_wanted()) release();
}

}  // namespace muster::comm
