// Heart: heartbeats while the transport's thread is busy.
//
// A transport's thread sends heartbeats between its turns. One turn may last: the receiver decodes a message of
// gigabytes, copies it to a device that has much to do, or the kernel has to find the memory for it. Meanwhile this
// worker is alive, and another thread, the heart, says so.
//
//   transport's thread   Turns::Rest around the place where it sleeps; Turns::another() before each message
//   heart                looks every `every`; if the same turn still lasts, calls beat()
//
// A thread that never comes back from a turn is not alive: the heart is still after `at_most` of one turn. A stopped
// process has no heart either.
//
// Thread-safety: Turns by the transport's thread; Heart by its owner. beat() runs in the heart's thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace muster::transport {

inline constexpr std::chrono::seconds kLongestTurn{60};

// Counts what a thread does: odd while it is in a turn, even while it rests.
class Turns {
 public:
  class Rest {
   public:
    explicit Rest(Turns& turns) : turns_(turns) { turns_.next(); }
    ~Rest() { turns_.next(); }
    Rest(const Rest&) = delete;
    Rest& operator=(const Rest&) = delete;

   private:
    Turns& turns_;
  };

  void another() { count_.store(count() + 2, std::memory_order_relaxed); }  // a new turn without a rest

  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  static bool is_busy(uint64_t count) { return count % 2 == 1; }

 private:
  void next() { count_.store(count() + 1, std::memory_order_relaxed); }

  std::atomic<uint64_t> count_{1};
};

class Heart {
 public:
  Heart(const Turns& turns, std::chrono::milliseconds every, std::chrono::milliseconds at_most,
        std::function<void()> beat);
  ~Heart();  // waits for a beat() that runs
  Heart(const Heart&) = delete;
  Heart& operator=(const Heart&) = delete;

 private:
  void run();

  const Turns& turns_;
  const std::chrono::milliseconds every_, at_most_;
  const std::function<void()> beat_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace muster::transport
