#include "transport/heart.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "base/thread.h"
#include "muster/base/deadline.h"

namespace muster::transport {

Heart::Heart(const Turns& turns, std::chrono::milliseconds every, std::chrono::milliseconds at_most,
             std::function<void()> beat)
    : turns_(turns), every_(every), at_most_(at_most), beat_(std::move(beat)) {
  thread_ = start_thread("muster-heart", [this] { run(); });
}

Heart::~Heart() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Heart::run() {
  uint64_t seen = 0;
  auto since = Clock::now();
  std::unique_lock lock(mutex_);
  while (!Deadline::after(every_).wait(changed_, lock, [this] { return stop_; })) {
    const uint64_t turn = turns_.count();
    if (turn != seen || !Turns::is_busy(turn)) {
      seen = turn;
      since = Clock::now();
    } else if (Clock::now() - since <= at_most_) {
      lock.unlock();
      try {
        beat_();
      } catch (const std::exception& error) {
        MUSTER_LOG(kError) << "transport: a heartbeat: " << error.what();
      }
      lock.lock();
    }
  }
}

}  // namespace muster::transport
