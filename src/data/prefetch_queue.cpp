#include "muster/data/prefetch_queue.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork_count.h"
#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::data {
namespace {

constexpr std::chrono::seconds kLong{5};  // for the end of an iteration

}  // namespace

struct PrefetchQueue::Impl {
  struct Slot {
    std::unique_ptr<PrefetchJob> job;  // null until it is fetched
  };

  const size_t workers, most;
  const std::chrono::milliseconds timeout;

  std::mutex mutex;
  std::condition_variable may_draw;  // for workers
  std::condition_variable changed;   // for the loop
  Draw draw;
  bool running = false, quitting = false;
  bool drawing = false;           // a worker is in draw()
  bool drawn_all = false;         // draw() has returned null or thrown
  std::exception_ptr draw_error;  // what it threw
  size_t busy = 0;                // workers in draw() or fetch()
  std::deque<Slot> slots;         // jobs drawn and not taken, in order
  size_t taken = 0;               // slots that next() has removed
  std::string late;               // what next() said when it gave up waiting; empty: it has not
  std::vector<std::thread> threads;
  int forks = 0;  // when the threads were started

  bool is_forked() const { return !threads.empty() && fork_count() != forks; }
  void require_threads() const {
    if (is_forked())
      throw InvalidArgument("PrefetchLoader: its threads are in the process that this one was forked from",
                            "Make the loader after fork()");
  }

  Impl(size_t n, size_t at_most, std::chrono::milliseconds limit) : workers(n), most(at_most), timeout(limit) {}

  static void fetch(PrefetchJob& job, size_t worker) {
    try {
      job.fetch(worker);
    } catch (...) {
      job.error = std::current_exception();
    }
  }

  // Draws a job, or notes why there are no more.
  std::unique_ptr<PrefetchJob> draw_one() {
    try {
      return draw();
    } catch (...) {
      draw_error = std::current_exception();
      return nullptr;
    }
  }

  void work(size_t worker) {
    std::unique_lock lock(mutex);
    for (;;) {
      may_draw.wait(lock, [&] { return quitting || (running && !drawing && !drawn_all && slots.size() < most); });
      if (quitting) return;
      drawing = true;
      ++busy;
      lock.unlock();
      auto job = draw_one();  // nobody else reads draw_error while `drawing`
      lock.lock();
      drawing = false;
      drawn_all = !job;
      const size_t number = taken + slots.size();
      if (job) {
        slots.emplace_back();
        may_draw.notify_one();
        lock.unlock();
        fetch(*job, worker);
        lock.lock();
        if (running) slots[number - taken].job = std::move(job);
      }
      if (job) {  // stopped meanwhile; the user's batch is destroyed without the lock
        lock.unlock();
        job.reset();
        lock.lock();
      }
      --busy;
      changed.notify_all();
    }
  }

  void stop() {
    std::deque<Slot> dropped;
    Draw done;
    {
      std::unique_lock lock(mutex);
      running = false;
      const auto is_idle = [&] { return busy == 0; };
      const auto patience = late.empty() ? Deadline::after(kLong) : Deadline::after(std::chrono::seconds(0));
      if (!patience.wait(changed, lock, is_idle)) {
        MUSTER_LOG(kWarning) << (late.empty() ? "PrefetchLoader" : late) << ": the end of this iteration waits for "
                             << busy << (busy == 1 ? " thread" : " threads")
                             << " in functions of the dataset or sampler, which cannot be interrupted";
        changed.wait(lock, is_idle);
      }
      late.clear();
      dropped.swap(slots);
      done.swap(draw);
      drawn_all = false;
      draw_error = nullptr;
    }
  }

  std::unique_ptr<PrefetchJob> next_here() {
    if (drawn_all) return nullptr;
    auto job = draw_one();
    drawn_all = !job;
    if (job) fetch(*job, 0);
    return job;
  }

  std::unique_ptr<PrefetchJob> next_of_workers() {
    std::unique_lock lock(mutex);
    const auto ready = [&] { return slots.empty() ? drawn_all : slots.front().job != nullptr; };
    const auto deadline = timeout.count() == 0 ? Deadline::never() : Deadline::after(timeout);
    if (!deadline.wait(changed, lock, ready)) {
      late = text("PrefetchLoader: batch ", taken, " of this iteration was not there after ", timeout.count(), " ms");
      throw TimeoutError(late, {}, "Find out why the dataset is slow, or raise PrefetchLoaderOptions::timeout");
    }
    late.clear();
    if (slots.empty()) return nullptr;
    auto job = std::move(slots.front().job);
    slots.pop_front();
    ++taken;
    may_draw.notify_one();
    return job;
  }
};

PrefetchQueue::PrefetchQueue(size_t workers, size_t most, std::chrono::milliseconds timeout)
    : impl_(std::make_unique<Impl>(workers, most, timeout)) {
  if (workers > 0 && most == 0) throw InvalidArgument("PrefetchLoader: prefetch_factor: expected 1 or more, got 0");
  if (timeout.count() < 0)
    throw InvalidArgument(text("PrefetchLoader: the timeout: expected 0 ms or more, got ", timeout.count(), " ms"),
                          "Use 0 for none");
}

PrefetchQueue::~PrefetchQueue() {
  if (impl_->is_forked()) {
    // The parent's threads hold its lock, or wait there; threads of this process may have their handles.
    (void)impl_.release();
    return;
  }
  impl_->stop();
  {
    const std::scoped_lock lock(impl_->mutex);
    impl_->quitting = true;
  }
  impl_->may_draw.notify_all();
  for (auto& thread : impl_->threads) thread.join();
}

void PrefetchQueue::start(Draw draw) {
  auto& impl = *impl_;
  impl.require_threads();
  impl.forks = fork_count();
  while (impl.threads.size() < impl.workers) {
    impl.threads.push_back(
        start_thread("muster-prefetch", [&impl, worker = impl.threads.size()] { impl.work(worker); }));
  }
  {
    const std::scoped_lock lock(impl.mutex);
    impl.draw = std::move(draw);
    impl.taken = 0;
    impl.running = true;
  }
  impl.may_draw.notify_one();
}

void PrefetchQueue::stop() {
  impl_->require_threads();
  impl_->stop();
}

std::unique_ptr<PrefetchJob> PrefetchQueue::next() {
  auto& impl = *impl_;
  impl.require_threads();
  auto job = impl.workers == 0 ? impl.next_here() : impl.next_of_workers();
  if (!job && impl.draw_error) std::rethrow_exception(impl.draw_error);
  return job;
}

}  // namespace muster::data
