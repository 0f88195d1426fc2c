// The connections that a client keeps but does not need at the moment.
//
// They are in a fixed array of atomics rather than under a mutex, each with the process that opened it. So a child of
// fork(2) finds no mutex that another thread held, and closes its copies of the parent's connections instead of using
// them.
//
// Thread-safety: all functions.
#pragma once

#include <array>
#include <atomic>
#include <memory>

namespace muster::store {

// T::is_mine(): whether this process opened it, not its parent.
template <typename T>
class Idle {
 public:
  Idle() = default;
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;
  ~Idle() {
    while (take()) {
    }
  }

  // Null if there is none.
  std::unique_ptr<T> take() {
    for (auto& slot : slots_) {
      if (!slot.load(std::memory_order_relaxed)) continue;
      std::unique_ptr<T> taken(slot.exchange(nullptr, std::memory_order_acquire));
      if (taken && taken->is_mine()) return taken;
    }
    return nullptr;
  }

  // Closes it if there is no room.
  void give(std::unique_ptr<T> one) {
    for (auto& slot : slots_) {
      T* empty = nullptr;
      if (slot.compare_exchange_strong(empty, one.get(), std::memory_order_release, std::memory_order_relaxed)) {
        static_cast<void>(one.release());
        return;
      }
    }
  }

 private:
  std::array<std::atomic<T*>, 8> slots_{};
};

}  // namespace muster::store
