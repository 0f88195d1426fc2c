// Gives a variable, mostly one of a thread, another value until the end of a scope.
#pragma once

#include <type_traits>
#include <utility>

namespace muster {

template <typename T>
class [[nodiscard]] AutoReset {
 public:
  AutoReset(T& variable, std::type_identity_t<T> value)
      : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  AutoReset(const AutoReset&) = delete;
  AutoReset& operator=(const AutoReset&) = delete;
  ~AutoReset() { variable_ = std::move(before_); }

 private:
  T& variable_;
  T before_;
};

}  // namespace muster
