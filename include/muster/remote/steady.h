// A value that survives a bug of GCC 12 with braces in a co_await expression: GCC constructs a member of an aggregate,
// copies its bytes into the aggregate, and destroys it in both places. A Steady records the address where it was made;
// a bytewise copy at another address can be read, but is neither destroyed nor moved from.
//
//   co_await remote_async_call<&f>(x, {.reducer = mean_reducer});     // its options are such members
//
// Thread-safety: that of T.
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
