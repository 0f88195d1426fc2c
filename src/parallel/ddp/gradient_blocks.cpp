#include "parallel/ddp/gradient_blocks.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace muster::ddp {

struct BlockPool : std::enable_shared_from_this<BlockPool> {
  struct Block {
    size_t bytes;
    c10::DataPtr memory;
  };
  // What the storage of a block in use holds on to.
  struct Used {
    std::shared_ptr<BlockPool> pool;
    Block block;
  };

  explicit BlockPool(std::shared_ptr<Heap> heap) : heap(std::move(heap)) {}

  c10::DataPtr lend(Block block) {
    void* const data = block.memory.get();
    const auto give_back = [](void* context) {
      const std::unique_ptr<Used> used(static_cast<Used*>(context));
      const std::lock_guard lock(used->pool->mutex);
      used->pool->free.push_back(std::move(used->block));
    };
    auto used = std::make_unique<Used>(Used{shared_from_this(), std::move(block)});
    return {data, used.release(), give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DataPtr take_free(size_t bytes) {
    Block block;
    {
      const std::lock_guard lock(mutex);
      const auto fits = std::find_if(free.begin(), free.end(), [&](const Block& b) { return b.bytes == bytes; });
      if (fits == free.end()) return {};
      block = std::move(*fits);
      free.erase(fits);
    }
    return lend(std::move(block));
  }

  const std::shared_ptr<Heap> heap;
  std::mutex mutex;
  std::vector<Block> free;
  std::unordered_set<const void*> known;
};

namespace {

// The pool that serves this thread, and what keeps it alive should its Serving end in another thread. The plain pointer
// may be read until the thread's very end.
thread_local BlockPool* serving = nullptr;
struct Keep {
  std::shared_ptr<BlockPool> pool;
  ~Keep() { serving = nullptr; }
};
thread_local Keep keep;

class ServingAllocator final : public c10::Allocator {
 public:
  explicit ServingAllocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (serving && bytes >= GradientBlocks::kLarge) [[unlikely]]
      if (c10::DataPtr block = serving->take_free(bytes)) return block;
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { before_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* const before_;
};

void install_allocator() {
  // Leaked, as libtorch's own: storages may ask for it until the very end.
  [[maybe_unused]] static const bool once =
      (c10::SetCPUAllocator(std::make_unique<ServingAllocator>(c10::GetCPUAllocator()).release()), true);
}

}  // namespace

GradientBlocks::GradientBlocks(std::shared_ptr<Heap> heap) : pool_(std::make_shared<BlockPool>(std::move(heap))) {}

c10::DataPtr GradientBlocks::take(size_t bytes) {
  if (c10::DataPtr block = pool_->take_free(bytes)) return block;
  BlockPool::Block block{bytes, pool_->heap->allocate(bytes + kSlack)};
  {
    const std::lock_guard lock(pool_->mutex);
    pool_->known.insert(block.memory.get());
  }
  install_allocator();
  return pool_->lend(std::move(block));
}

bool GradientBlocks::contains(const void* data) const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->known.contains(data);
}

GradientBlocks::Serving::Serving(const GradientBlocks& blocks) : pool_(blocks.pool_) {
  keep.pool = pool_;
  serving = pool_.get();
}
GradientBlocks::Serving::~Serving() {
  if (serving != pool_.get()) return;
  serving = nullptr;
  keep.pool = nullptr;
}

}  // namespace muster::ddp
