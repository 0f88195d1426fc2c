// What the second call of a checkpointed function needs of the first, so that it computes the same.
//
// Thread-safety: none for one object.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/kit/gradient_blocks.h"
#include "parallel/kit/random_numbers.h"
#include "parallel/tape/saved_tensors.h"

namespace muster::parallel {

// How often a tensor was changed in place; 0 where nobody counts.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<uint32_t>(tensor._version()) : 0;
}

// Made before the first call. It keeps no tensor when that has returned.
class FirstCall {
 public:
  FirstCall(bool preserve_rng_state, const std::vector<at::Tensor>& arguments);
  // The function has returned. InvalidArgument if it has changed an argument in place.
  void end();

  class WithoutAutocastCache {
   public:
    WithoutAutocastCache();
    WithoutAutocastCache(const WithoutAutocastCache&) = delete;
    WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;
    ~WithoutAutocastCache();

   private:
    const int nesting_;
    const bool before_;
  };

  // While it lives, random numbers, autocast and the like are as at the beginning of the first call, with gradients.
  class Again {
   public:
    explicit Again(const FirstCall& of);

   private:
    const std::unique_ptr<RandomNumbersGuard> random_;
    const at::ThreadLocalStateGuard state_;
    const at::AutoGradMode with_grad_{true};
    // Autocast keeps casted parameters until it ends; the first call's has ended, so nobody would clear them.
    const WithoutAutocastCache without_cache_;
    const GradientBlocks::Pause no_gradients_;
    const InSecondCall in_second_call_;
  };

 private:
  struct Argument {
    at::Tensor tensor;
    uint32_t version;
  };

  const at::ThreadLocalState state_;
  std::optional<RandomState> random_;  // none: nothing was drawn, or is to be the same
  std::vector<Argument> arguments_;    // during the call
};

}  // namespace muster::parallel
