// A value that survives GCC 12's way with braces in a co_await expression: there a member of an aggregate is made,
// copied bit by bit into the aggregate, and destroyed in both places. A Steady knows where it was made, and a copy of
// its bits elsewhere is read, but neither destroyed nor moved from.
//
//   co_await remote_async_call<&f>(x, {.reducer = mean_reducer});     // its options are such members
//
// Thread-safety: as T's.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace muster::detail {

template <typename T>
class Steady {
 public:
  Steady(T value) { new (room_) T(std::move(value)); }
  Steady(const Steady& other) : Steady(*other) {}
  Steady(Steady&& other) : Steady(other.self_ == &other ? std::move(other.value()) : T(*other)) {}
  Steady& operator=(Steady other) {
    value() = std::move(other.value());
    return *this;
  }
  ~Steady() {
    if (self_ == this) value().~T();
  }
  const T& operator*() const { return *std::launder(reinterpret_cast<const T*>(room_)); }

 private:
  T& value() { return *std::launder(reinterpret_cast<T*>(room_)); }

  const Steady* const self_ = this;
  alignas(T) std::byte room_[sizeof(T)];
};

}  // namespace muster::detail
