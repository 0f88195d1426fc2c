// Parts of a batch that a rank computes apart from each other, although a synchronized batch norm takes them as one
// batch.
//
// A part is the calling thread's while its Scope lives. A batch norm that is called then keeps the part for its
// backward(), which must come from the same function.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "muster/comm/group.h"

namespace muster::parallel {

class BatchPart {
 public:
  BatchPart() = default;
  BatchPart(const BatchPart&) = delete;
  BatchPart& operator=(const BatchPart&) = delete;
  virtual ~BatchPart() = default;

  // By which the parts know a parameter or buffer of a batch norm; -1: not at all.
  virtual int64_t number_of(const at::Tensor& tensor) const = 0;
  // What each part of each rank gives here, [parts, numel], in the same order on every number of ranks. `mine` has one
  // dimension and is on the CPU. Waits for the other parts. `norm`: the number of a tensor of the batch norm; -1: none
  // is known, as without running statistics; kOfAnotherModule: its running statistics are not known. `group`: the batch
  // norm's, a group_beside().
  static constexpr int64_t kOfAnotherModule = -2;
  virtual at::Tensor gather(const at::Tensor& mine, int64_t norm, const Group& group) = 0;

  class [[nodiscard]] Scope {
   public:
    explicit Scope(std::shared_ptr<BatchPart> part) : before_(std::exchange(current(), std::move(part))) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { current() = std::move(before_); }

   private:
    std::shared_ptr<BatchPart> before_;
  };
  static std::shared_ptr<BatchPart>& current() {  // of the calling thread; null: its batch is the rank's only part
    static thread_local std::shared_ptr<BatchPart> part;
    return part;
  }
};

}  // namespace muster::parallel
