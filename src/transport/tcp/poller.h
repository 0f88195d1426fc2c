// What the transport's thread sleeps on: epoll(7), and an eventfd that wakes it.
//
// Thread-safety: wait() by one thread at a time; everything else by any thread.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <span>

#include "base/fd.h"
#include "muster/base/error.h"

namespace muster::transport {

class Poller {
 public:
  static constexpr size_t kMostEvents = 64;         // of one wait()
  static constexpr uint64_t kWoken = ~uint64_t{0};  // the id of wake()

  Poller() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!epoll_ || !bell_) throw_errno("cannot make an epoll and an eventfd");
    add(bell_.get(), EPOLLIN, kWoken);
  }

  void add(int fd, uint32_t events, uint64_t id) {
    if (!control(EPOLL_CTL_ADD, fd, events, id)) throw_errno("cannot watch a socket");
  }
  void change(int fd, uint32_t events, uint64_t id) { control(EPOLL_CTL_MOD, fd, events, id); }
  // Must be called before the descriptor is closed: otherwise a forked child's copy of it would still be watched.
  void remove(int fd) { control(EPOLL_CTL_DEL, fd, 0, 0); }

  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);  // full: it is awake anyway
  }

  std::span<const epoll_event> wait(std::chrono::milliseconds at_most) {
    const int n =
        ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), static_cast<int>(at_most.count()));
    if (n <= 0) return {};
    for (int i = 0; i < n; ++i) {
      uint64_t count = 0;
      if (events_[static_cast<size_t>(i)].data.u64 == kWoken) [[maybe_unused]]
        const auto r = ::read(bell_.get(), &count, sizeof count);
    }
    return {events_.data(), static_cast<size_t>(n)};
  }

 private:
  bool control(int operation, int fd, uint32_t events, uint64_t id) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return ::epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
  }

  UniqueFd epoll_, bell_;
  std::array<epoll_event, kMostEvents> events_{};
};

}  // namespace muster::transport
