#include "rpc/kit/executor.h"

#include <sched.h>

#include <cstdlib>
#include <utility>

#include "base/cycles.h"
#include "base/thread.h"
#include "shm/spin.h"

namespace muster::rpc {
namespace {

using std::chrono::nanoseconds;

// The longest sleep, for one that other threads end.
constexpr nanoseconds kLong = std::chrono::hours(1);
// How long a waiting thread sleeps between polls when no other thread can poll.
constexpr nanoseconds kNap = std::chrono::milliseconds(50);
// Threads that may be parked besides the heir.
constexpr int kSpare = 4;

int64_t now_ns() { return nanoseconds(FastClock::now().time_since_epoch()).count(); }

class FunctionRunnable final : public Runnable {
 public:
  explicit FunctionRunnable(std::function<void()> function) : function_(std::move(function)) {}
  void run() noexcept override { function_(); }

 private:
  std::function<void()> function_;
};

}  // namespace

struct Executor::Worker {
  std::thread thread;
  std::atomic<int64_t> running_since{0};  // nanoseconds; 0: not in a handler
  std::atomic<bool> sleeps{false};        // as the leader
  std::atomic<bool> overtaken{false};     // it has lost the lead in a handler; note() writes it
  bool waits = false;                     // sleeps in wait(); with the lock
};

namespace {
thread_local const Executor* pool_of_this_thread = nullptr;
thread_local void* worker_of_this_thread = nullptr;
thread_local bool this_thread_polls = false;
}  // namespace

Executor::Executor(Driver& driver, Options options)
    : driver_(driver), options_(std::move(options)), spin_(options_.spin) {}

Executor::~Executor() { stop(); }

void Executor::start() {
  const std::lock_guard lock(mutex_);
  spawn();  // a leader
  spawn();  // and its heir
}

// With the lock.
void Executor::spawn() {
  auto worker = std::make_unique<Worker>();
  Worker& me = *worker;
  workers_.push_back(std::move(worker));
  ++starting_;
  const auto body = [this, &me] {
    pool_of_this_thread = this;
    worker_of_this_thread = &me;
    std::list<std::unique_ptr<Worker>> ended;
    {
      const std::lock_guard lock(mutex_);
      ended.swap(ended_);
    }
    for (auto& worker : ended) worker->thread.join();
    {
      const std::lock_guard lock(mutex_);
      --starting_;
      ++parked_;
    }
    if (options_.in_thread) {
      options_.in_thread([&] { main(me); });
    } else {
      main(me);
    }
  };
  try {
    me.thread = start_thread(options_.name, body);
  } catch (...) {
    --starting_;
    workers_.pop_back();
    throw;
  }
}

bool Executor::in_pool() const { return pool_of_this_thread == this; }
bool Executor::polls() { return this_thread_polls; }
bool Executor::polls_as_leader() const {
  if (!this_thread_polls || !in_pool()) return false;
  const auto& me = *static_cast<const Worker*>(worker_of_this_thread);
  return leads(me) && me.running_since.load(std::memory_order_relaxed) == 0;
}
bool Executor::busy() const { return unfinished_.load(std::memory_order_acquire) != 0; }
bool Executor::requests_come() const {
  return now_ns() - last_request_.load(std::memory_order_relaxed) < nanoseconds(kQuiet).count();
}
// With the lock.
void Executor::note(Worker& worker, bool overtaken, bool waits) {
  const auto is_slow = [&] { return worker.overtaken && !worker.waits ? 1 : 0; };
  const int before = is_slow();
  worker.overtaken = overtaken;
  worker.waits = waits;
  slow_.fetch_add(is_slow() - before, std::memory_order_relaxed);
}
bool Executor::is_crowded(const Worker* me) const {
  const int own = me && me->overtaken.load(std::memory_order_relaxed) ? 1 : 0;
  return slow_.load(std::memory_order_relaxed) - own >= options_.cores;
}
bool Executor::leads(const Worker& me) const { return leader_.load(std::memory_order_acquire) == &me; }

int Executor::threads() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(workers_.size());
}

bool Executor::post(std::function<void()> function) {
  return post(std::make_unique<FunctionRunnable>(std::move(function)));
}

bool Executor::post(std::unique_ptr<Runnable> runnable) {
  last_request_.store(now_ns(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    if (workers_.empty()) return false;
    unfinished_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(std::move(runnable));
    queued_.fetch_add(1, std::memory_order_seq_cst);
  }
  // If the leader posts while it polls (even as a guest), it finds the work after the poll. Every other thread has to
  // call, and so does a handler on the leader's own thread: nobody else looks before that handler ends, and the handler
  // may wait for this work.
  if (!this_thread_polls || !in_pool() || !leads(*static_cast<Worker*>(worker_of_this_thread))) call_leader();
  return true;
}

// There is something to do: for the leader, or for the heir if the leader is in a handler that nobody watches.
void Executor::call_leader() {
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    driver_.wake();
  } else {
    call_heir();
  }
}

void Executor::call_heir() {
  if (heir_sleeps_.load(std::memory_order_seq_cst)) driver_.wake_second();
}

void Executor::call_on_tick() {
  if (sleepers_.load(std::memory_order_seq_cst) != 0) driver_.wake();
  call_heir();
}

nanoseconds Executor::until_tick() const {
  const auto tick = driver_.next_tick();
  if (tick == Clock::time_point::max()) return kLong;
  return std::clamp(nanoseconds(tick - Clock::now()), nanoseconds(0), kLong);
}

// With the lock: whether a leader may run one more.
bool Executor::can_take() const {
  const int others = static_cast<int>(workers_.size()) - blocked_ - parked_ - starting_ - 1;  // other running threads
  return !queue_.empty() && others < options_.max_threads;
}

std::unique_ptr<Runnable> Executor::take() {
  if (queued_.load(std::memory_order_acquire) == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  if (!can_take()) return nullptr;
  if (parked_ + starting_ == 0) try {
      spawn();
    } catch (const std::exception&) {
      return nullptr;  // no thread can be started now
    }
  auto runnable = std::move(queue_.front());
  queue_.pop_front();
  queued_.fetch_sub(1, std::memory_order_relaxed);
  return runnable;
}

// A new thread counts as parked when it enters here.
void Executor::main(Worker& me) {
  while (follow(me)) {
    lead(me);
    {
      const std::lock_guard lock(mutex_);
      ++parked_;
      note(me, false, false);
    }
    // This thread led until it was stuck in a handler. Now that the handler has ended there may be room for another.
    if (queued_.load(std::memory_order_seq_cst) != 0) call_leader();
  }
}

// Parks until this thread is to lead (true) or to end (false).
bool Executor::follow(Worker& me) {
  std::unique_lock lock(mutex_);
  // Another parked thread becomes the heir, also if this thread was only woken to become the heir.
  const auto leave = [&] {
    --parked_;
    if (heir_ == &me) heir_ = nullptr;
    if (!heir_) parked_wake_.notify_one();
  };
  const auto end = [&] {
    leave();
    for (auto it = workers_.begin(); it != workers_.end(); ++it)
      if (it->get() == &me) {
        ended_.splice(ended_.end(), workers_, it);
        break;
      }
    stopped_.notify_all();
    return false;
  };
  for (;;) {
    if (stop_.load(std::memory_order_relaxed) && queue_.empty()) return end();
    Worker* leader = leader_.load(std::memory_order_acquire);
    const int64_t since = leader ? leader->running_since.load(std::memory_order_acquire) : 0;
    const bool stuck = since != 0 && now_ns() - since > nanoseconds(kSlow).count() &&
                       leader->running_since.load(std::memory_order_acquire) == since;
    if ((!leader || stuck) && leader_.compare_exchange_strong(leader, &me)) {
      if (leader) note(*leader, true, leader->waits);
      leave();
      return true;
    }
    if (parked_ > kSpare) return end();
    if (heir_ && heir_ != &me) {
      parked_wake_.wait(lock);
      continue;
    }
    heir_ = &me;
    if (!leader || !leader->sleeps.load(std::memory_order_seq_cst)) {
      heir_wake_.wait_for(lock, kTick);
      continue;
    }
    lock.unlock();
    // Either a leader that is awake sees heir_sleeps_, or this thread sees that the leader is awake.
    heir_sleeps_.store(true, std::memory_order_seq_cst);
    driver_.sleep_second(until_tick(), [&] {
      const std::lock_guard again(mutex_);
      const Worker* const now = leader_.load(std::memory_order_acquire);
      return !now || !now->sleeps.load(std::memory_order_seq_cst) || stop_.load(std::memory_order_relaxed);
    });
    heir_sleeps_.store(false, std::memory_order_seq_cst);
    lock.lock();
  }
}

void Executor::run(Worker& me, std::unique_ptr<Runnable> runnable) {
  me.running_since.store(now_ns(), std::memory_order_release);
  runnable->run();
  runnable.reset();
  me.running_since.store(0, std::memory_order_release);
  if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && options_.on_idle) options_.on_idle();
}

void Executor::lead(Worker& me) {
  auto idle_since = FastClock::now();
  while (leads(me)) {
    if (auto runnable = take()) {
      // Work that comes after this look wakes the heir by itself.
      if (heir_sleeps_.load(std::memory_order_seq_cst)) {
        driver_.announce_waiting();  // nobody else does so while the handler runs
        if (queued_.load(std::memory_order_seq_cst) != 0 || driver_.pending()) driver_.wake_second();
      }
      run(me, std::move(runnable));
      idle_since = FastClock::now();
      continue;
    }
    const bool any = poll();
    const auto now = FastClock::now();
    if (any) {
      idle_since = now;
      continue;
    }
    if (stop_.load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (!queue_.empty() && can_take()) continue;
      Worker* mine = &me;
      leader_.compare_exchange_strong(mine, nullptr);
      heir_wake_.notify_all();
      return;
    }
    if (!is_crowded() && (guests_.load(std::memory_order_acquire) == 0 || requests_come())) {
      if (now - idle_since < spin_) {
        shm::cpu_relax();
        continue;
      }
      if (now - idle_since < shm::kYield) {
        ::sched_yield();
        continue;
      }
    }
    me.sleeps.store(true, std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    bool work = false;
    if (queued_.load(std::memory_order_seq_cst) != 0) {
      const std::lock_guard lock(mutex_);
      work = can_take();
    }
    if (!work && leads(me)) driver_.sleep(until_tick());
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    me.sleeps.store(false, std::memory_order_seq_cst);
    // idle_since stays: after a sleep that brought nothing this thread sleeps again without spinning
  }
  driver_.announce_waiting();  // the new leader may sleep already
}

// Gives up the lead, if this thread has it, to the heir or to a new thread.
void Executor::hand_over(Worker& me) {
  const std::lock_guard lock(mutex_);
  Worker* mine = &me;
  if (!leader_.compare_exchange_strong(mine, nullptr)) return;
  if (parked_ + starting_ > 0) {
    heir_wake_.notify_one();
    call_heir();
  } else {
    try {
      spawn();
    } catch (const std::exception&) {
      leader_.store(&me);  // no thread can be started now: this one polls from time to time while it waits
    }
  }
}

// Polls, unless another thread does.
bool Executor::poll() {
  if (this_thread_polls || !polling_.try_lock()) return false;
  const std::lock_guard lock(polling_, std::adopt_lock);
  struct Polls {
    Polls() { this_thread_polls = true; }
    ~Polls() { this_thread_polls = false; }
  } polls;
  const bool any = driver_.poll();
  const auto now = FastClock::now();
  if (now >= driver_.next_tick()) driver_.tick(now);
  return any;
}

// Polls until done() or until it is time to sleep; returns whether done() holds.
bool Executor::poll_as_guest(const std::function<bool()>& done, Deadline deadline) {
  const auto begin = FastClock::now();
  const auto end = begin + std::max<nanoseconds>(spin_, shm::kYield);
  auto* const me = in_pool() ? static_cast<Worker*>(worker_of_this_thread) : nullptr;
  guests_.fetch_add(1, std::memory_order_acq_rel);
  bool hushed = false, is_done = false, called = false;
  const auto unhush = [&] {
    if (!std::exchange(hushed, false)) return;
    driver_.hush(false);
    poll();
    if (driver_.pending()) call_leader();
  };
  for (int i = 0;; ++i) {
    if ((is_done = done())) break;
    const auto now = FastClock::now();
    if (now >= end || now >= deadline.when() || is_crowded(me)) break;
    bool any = false;
    const bool leader_polls = requests_come() && !(me && leads(*me));
    if (leader_polls) {
      unhush();
    } else {
      if (!std::exchange(hushed, true)) driver_.hush(true);
      if (poll()) any = true;
    }
    if (queued_.load(std::memory_order_acquire) == 0) {
      called = false;
    } else if (!std::exchange(called, true)) {
      unhush();  // before the call, which must not be hushed
      if (me) hand_over(*me);
      call_leader();
    }
    if (any) continue;  // what it brought may be the answer
    if (now - begin < spin_) {
      shm::cpu_relax();
    } else {
      ::sched_yield();
    }
  }
  unhush();
  guests_.fetch_sub(1, std::memory_order_acq_rel);
  if (driver_.pending()) call_leader();
  if (queued_.load(std::memory_order_acquire) != 0) {
    if (me) hand_over(*me);
    call_leader();
  }
  return is_done;
}

bool Executor::wait(const std::function<bool()>& done, const std::function<void(nanoseconds)>& sleep,
                    Deadline deadline) {
  if (done() || poll_as_guest(done, deadline)) return true;
  auto* const me = in_pool() ? static_cast<Worker*>(worker_of_this_thread) : nullptr;
  if (me) {
    const std::lock_guard lock(mutex_);
    ++blocked_;
    note(*me, me->overtaken, true);
  }
  if (me) hand_over(*me);
  if (me && queued_.load(std::memory_order_seq_cst) != 0) call_leader();  // there is room for one more
  while (!done() && !deadline.passed()) {
    sleep(std::min(deadline.left(), me && leads(*me) ? kNap : kLong));
    poll();
    if (driver_.pending()) call_leader();
  }
  if (me) {
    const std::lock_guard lock(mutex_);
    --blocked_;
    note(*me, me->overtaken, false);
  }
  return done();
}

void Executor::stop(const std::function<void()>& late) {
  if (in_pool()) std::abort();  // this thread would wait for itself
  const auto patient_until = Clock::now() + kLate;
  bool is_late = false;
  std::list<std::unique_ptr<Worker>> ended;
  {
    std::unique_lock lock(mutex_);
    stop_.store(true, std::memory_order_release);
    while (!workers_.empty()) {
      if (!queue_.empty() && leader_.load() == nullptr && parked_ + starting_ == 0) spawn();
      heir_wake_.notify_all();
      parked_wake_.notify_all();
      lock.unlock();
      driver_.wake();
      driver_.wake_second();
      if (!is_late && Clock::now() >= patient_until) {
        is_late = true;
        late();
      }
      lock.lock();
      stopped_.wait_for(lock, std::chrono::milliseconds(1), [&] { return workers_.empty(); });
    }
    ended.swap(ended_);
  }
  for (auto& worker : ended) worker->thread.join();
}

}  // namespace muster::rpc
