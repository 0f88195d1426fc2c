// Large gradients are allocated where they are reduced.
//
// Autograd allocates a tensor for each gradient, and if .grad is undefined (after zero_grad()) that tensor becomes
// .grad. Copying it into a bucket on the heap would cost as much as reducing it. So each large parameter has a block on
// the heap, and while backward runs, an allocation of exactly a large parameter's size is served from these blocks:
//
//   backward begins     blocks whose gradients are gone are free; Serving starts in this thread
//   gradient computed   its memory is a free block of its size; .grad is that tensor
//   bucket launched     reduces the block in place
//
// It does not matter which block a gradient gets, or whether a temporary of the same size uses one for a while: blocks
// are ordinary memory, and a gradient that comes from elsewhere is copied into a block. A gradient in a block that
// others still read is copied, too: the gradient of x + p.unsqueeze(0) is that of x and, as a view, that of p. A block
// that the user still holds (an old .grad) is not free.
//
// For this, the process's CPU allocator (c10::SetCPUAllocator) is replaced once by one that asks the calling thread's
// Serving first and then the allocator that was there before. With `serve` false it is not replaced, and gradients are
// copied into their blocks.
//
// Thread-safety: blocks may be freed in any thread; the rest is for the thread of the reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "base/auto_reset.h"
#include "muster/comm/heap.h"

namespace muster::parallel {

struct BlockPool;

class GradientBlocks {
 public:
  static constexpr size_t kLarge = size_t{1} << 20;  // a gradient of at least this many bytes has its own block
  static constexpr size_t kSlack = 256;              // bytes that may be used behind a gradient in its block

  explicit GradientBlocks(std::shared_ptr<Heap> heap, bool serve = true);

  // Memory for `bytes` and kSlack more; new memory from the heap if no block is free.
  c10::DataPtr take(size_t bytes);
  bool contains(const void* data) const;  // whether a block begins there

  // Serves this thread's allocations while it lives.
  class Serving {
   public:
    explicit Serving(const GradientBlocks& blocks);
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;
    ~Serving();

   private:
    const std::shared_ptr<BlockPool> pool_;
  };
  // Serves no allocations of this thread while it lives: those of work in backward that makes no gradients.
  class Pause {
   public:
    Pause();

   private:
    const AutoReset<BlockPool*> set_;
  };

 private:
  const bool serve_;
  const std::shared_ptr<BlockPool> pool_;
};

}  // namespace muster::parallel
