// The states of libtorch's default generators.
//
// Thread-safety: each call. But the generators are the process's: numbers that other threads draw meanwhile are not
// theirs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace muster::parallel {

class RandomState {
 public:
  // The present ones: of the CPU's generator, and of those of the CUDA devices on which these tensors are.
  static RandomState with_devices_of(const std::vector<at::Tensor>& tensors) {
    RandomState state;
    state.add(at::detail::getDefaultCPUGenerator());
    for (const at::Tensor& tensor : tensors)
      if (tensor.defined() && tensor.is_cuda()) state.add(at::globalContext().defaultGenerator(tensor.device()));
    return state;
  }
  static RandomState of_cpu() { return with_devices_of({}); }

  // Of the same generators.
  RandomState now() const {
    RandomState state;
    for (const auto& [generator, unused] : states_) state.add(generator);
    return state;
  }
  bool operator==(const RandomState& other) const {
    return std::equal(states_.begin(), states_.end(), other.states_.begin(), other.states_.end(),
                      [](const auto& a, const auto& b) { return a.first == b.first && at::equal(a.second, b.second); });
  }
  void set() const {
    for (auto [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void add(at::Generator generator) {
    for (const auto& [known, unused] : states_)
      if (known == generator) return;
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// The generators are as before when the guard has ended.
class [[nodiscard]] RandomNumbersGuard {
 public:
  explicit RandomNumbersGuard(RandomState before) : before_(std::move(before)) {}
  RandomNumbersGuard(const RandomNumbersGuard&) = delete;
  RandomNumbersGuard& operator=(const RandomNumbersGuard&) = delete;
  ~RandomNumbersGuard() { before_.set(); }

 private:
  const RandomState before_;
};

inline void set_cpu_seed(uint64_t seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace muster::parallel
