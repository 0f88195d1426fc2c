#include "muster/rpc/future.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "shm/futex.h"

namespace muster::rpc::detail {

// The continuations that became due in this thread. One runs at a time, and those that it makes due run after it, so
// that a long chain of futures does not grow the stack.
class ContinuationQueue {
 public:
  static ContinuationQueue& here() noexcept {
    thread_local constinit ContinuationQueue queue;
    return queue;
  }
  void run(Continuation* due) noexcept {
    due->next_ = nullptr;
    if (last_) {
      last_->next_ = due;
    } else {
      first_ = due;
    }
    last_ = due;
    if (!running_) {
      running_ = true;
      run_next_ones();
      running_ = false;
    }
  }
  // Also called from within a continuation that is about to wait: what it waits for may be due here.
  void run_next_ones() noexcept {
    while (first_) {
      Continuation* const due = first_;
      first_ = due->next_;
      if (!first_) last_ = nullptr;
      due->run();
    }
  }

 private:
  Continuation* first_ = nullptr;
  Continuation* last_ = nullptr;
  bool running_ = false;
};

void FutureState::publish() noexcept {
  if (word_.fetch_or(kReady, std::memory_order_acq_rel) & kSleepers) shm::futex_wake_all(word_);
  Continuation* newest = continuations_.exchange(closed(), std::memory_order_acq_rel);
  Continuation* next = nullptr;
  while (newest) {  // reverse the list: they run in the order in which they were added
    Continuation* const older = newest->next_;
    newest->next_ = next;
    next = newest;
    newest = older;
  }
  while (next) {
    Continuation* const due = std::exchange(next, next->next_);
    if (waits_) {
      waits_->run([due] { due->run(); });
    } else {
      ContinuationQueue::here().run(due);
    }
  }
}

bool FutureState::add(Continuation& then) noexcept {
  Continuation* newest = continuations_.load(std::memory_order_acquire);
  do {
    if (newest == closed()) return false;
    then.next_ = newest;
  } while (!continuations_.compare_exchange_weak(newest, &then, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

namespace {
Waits*& waits_of_thread() noexcept {
  thread_local Waits* waits = nullptr;
  return waits;
}
}  // namespace

WaitsOfThread::WaitsOfThread(Waits* waits) noexcept : before_(std::exchange(waits_of_thread(), waits)) {}
WaitsOfThread::~WaitsOfThread() { waits_of_thread() = before_; }

bool FutureState::wait(Deadline deadline) {
  if (done()) return true;
  ContinuationQueue::here().run_next_ones();
  if (done()) return true;
  Waits* const waits = waits_ ? waits_ : waits_of_thread();
  return waits ? waits->wait(*this, deadline) : sleep(deadline);
}

bool FutureState::sleep(Deadline deadline) {
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(1);  // a limit that every kernel accepts
  uint32_t word = word_.load(std::memory_order_acquire);
  while (!(word & kReady)) {
    if (!(word & kSleepers)) {
      if (!word_.compare_exchange_weak(word, word | kSleepers, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      word |= kSleepers;
    }
    const auto left = deadline.left();
    if (left == std::chrono::nanoseconds::zero()) return false;
    shm::futex_wait(word_, word, std::min(left, kLongest));
    word = word_.load(std::memory_order_acquire);
  }
  return true;
}

bool FutureState::cancel() {
  if (!claim()) return false;
  set_error(std::make_exception_ptr(Aborted("the future was cancelled")));
  publish();
  if (waits_) waits_->cancel(*this);
  return true;
}

namespace {
std::shared_ptr<void>& call_of_thread() noexcept {
  thread_local std::shared_ptr<void> call;
  return call;
}
}  // namespace

const std::shared_ptr<void>& current_call() noexcept { return call_of_thread(); }

CallContext CallContext::here() { return {.call = call_of_thread(), .grad_mode = c10::GradMode::is_enabled()}; }

CallContext::Scope::Scope(CallContext context) noexcept
    : before_{.call = std::exchange(call_of_thread(), std::move(context.call)),
              .grad_mode = c10::GradMode::is_enabled()} {
  if (before_.grad_mode != context.grad_mode) c10::GradMode::set_enabled(context.grad_mode);
}
CallContext::Scope::~Scope() {
  call_of_thread() = std::move(before_.call);
  if (c10::GradMode::is_enabled() != before_.grad_mode) c10::GradMode::set_enabled(before_.grad_mode);
}

void throw_empty_future() {
  throw InvalidArgument("this future is empty",
                        "Take one from a call or a Promise; one that get() moved from is empty");
}
void throw_no_futures() { throw InvalidArgument("when_any of no futures would never be complete"); }

}  // namespace muster::rpc::detail
