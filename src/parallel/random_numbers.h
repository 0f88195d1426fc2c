// Libtorch's default CPU generator, which is as before when the guard has ended.
//
// Thread-safety: each call. But the generator is the process's: numbers that other threads draw meanwhile are not theirs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>

namespace muster::parallel {

class [[nodiscard]] RandomNumbersGuard {
 public:
  RandomNumbersGuard() : before_(state()) {}
  RandomNumbersGuard(const RandomNumbersGuard&) = delete;
  RandomNumbersGuard& operator=(const RandomNumbersGuard&) = delete;
  ~RandomNumbersGuard() { set_state(before_); }

  static at::Tensor state() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }
  void set_state(const at::Tensor& state) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state);
  }
  void set_seed(uint64_t seed) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  const at::Tensor before_;
};

}  // namespace muster::parallel
