// PrefetchQueue: the threads of a PrefetchLoader, and the batches between them and the loop.
//
// A batch is a *job*. Each worker repeats: draw the next job (one worker at a time, so jobs have an order), fetch it
// (concurrently), put it into its slot. The loop takes the slots in the order in which they were drawn. At most `most`
// jobs are drawn and not yet taken; a worker that would exceed this sleeps.
//
//   stopped --start()--> running --stop()--> stopped
//
// While running, stop() lets each worker finish what it draws or fetches, waits for it, and throws away the jobs; if it
// waits for long, or if next() has waited for too long, a warning says so. What
// a fetch throws is kept in its job, and is the loop's when it takes this. What `draw` throws ends the drawing: the
// loop gets it after the jobs drawn before, at each further call of next().
//
// After fork() the child has no such threads: InvalidArgument, except from the destructor.
//
// Thread-safety: one thread calls the functions; `draw` and fetch() run in the workers, without a lock held. With no
// workers they run in next().
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>

namespace muster::data {

class PrefetchJob {
 public:
  virtual ~PrefetchJob() = default;
  // Called once, by worker number 0 … workers - 1. May throw anything.
  virtual void fetch(size_t worker) = 0;

  std::exception_ptr error;  // what fetch() threw
};

class PrefetchQueue {
 public:
  using Draw = std::function<std::unique_ptr<PrefetchJob>()>;  // null: there are no more

  // InvalidArgument if there are workers and most is 0, or timeout is negative.
  PrefetchQueue(size_t workers, size_t most, std::chrono::milliseconds timeout);
  ~PrefetchQueue();  // stop(), and ends the threads
  PrefetchQueue(const PrefetchQueue&) = delete;
  PrefetchQueue& operator=(const PrefetchQueue&) = delete;

  // Must be stopped. The first call starts the threads.
  void start(Draw draw);
  void stop();
  // Must be running. The next job in order, fetched or failed; null at the end. Throws what `draw` threw; TimeoutError
  // if the job has not been fetched in time, and the next call goes on waiting for it.
  std::unique_ptr<PrefetchJob> next();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster::data
