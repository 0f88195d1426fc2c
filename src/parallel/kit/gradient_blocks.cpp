#include "parallel/kit/gradient_blocks.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace muster::parallel {

struct BlockPool : std::enable_shared_from_this<BlockPool> {
  struct Block {
    size_t bytes;
    c10::DataPtr memory;
  };

  explicit BlockPool(std::shared_ptr<Heap> heap) : heap(std::move(heap)) {}

  c10::DataPtr lend(Block block);

  c10::DataPtr take_free(size_t bytes) {
    Block block;
    {
      const std::lock_guard lock(mutex);
      const auto fits = free.find(bytes);
      if (fits == free.end() || fits->second.empty()) return {};
      block = std::move(fits->second.front());
      fits->second.pop_front();
    }
    return lend(std::move(block));
  }

  const std::shared_ptr<Heap> heap;
  std::atomic<bool> serves = false;  // a Serving lives; it may end in another thread, as backward() on a device does
  std::mutex mutex;
  std::unordered_map<size_t, std::deque<Block>> free;  // by size; the one that was free first goes first
  std::unordered_set<const void*> known;
};

namespace {

// All blocks in use, by their addresses. libtorch's allocators promise that a deleter needs nothing but the address of
// what it frees (c10::Allocator::raw_allocate(), which oneDNN uses for scratch memory). So the data of a block cannot
// be in the context of its DataPtr.
class Lent {
 public:
  void add(const std::shared_ptr<BlockPool>& pool, BlockPool::Block block) {
    const auto address = reinterpret_cast<uintptr_t>(block.memory.get());
    const std::lock_guard lock(mutex_);
    if (address < first_) first_ = address;
    if (address > last_) last_ = address;
    blocks_.emplace(address, Used{pool, std::move(block)});
  }

  // Gives the block that begins at `data` back to its pool; false if there is none.
  bool give_back(const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (address < first_ || address > last_) return false;
    Used used;
    {
      const std::lock_guard lock(mutex_);
      auto node = blocks_.extract(address);
      if (!node) return false;
      used = std::move(node.mapped());
    }
    const std::lock_guard lock(used.pool->mutex);
    used.pool->free[used.block.bytes].push_back(std::move(used.block));
    return true;
  }

 private:
  struct Used {
    std::shared_ptr<BlockPool> pool;
    BlockPool::Block block;
  };
  std::atomic<uintptr_t> first_{UINTPTR_MAX}, last_{0};  // of the addresses of all blocks that were ever in use
  std::mutex mutex_;
  std::unordered_map<uintptr_t, Used> blocks_;
};

// Leaked on purpose: storages may be destroyed after everything else.
Lent& lent() {
  static Lent& all = *new Lent;
  return all;
}

// The deleter of the allocator that ours replaced.
std::atomic<c10::DeleterFnPtr> delete_as_before{nullptr};

// Frees what ServingAllocator returned, whether it is a block or not.
void free_any(void* data) {
  if (!data || lent().give_back(data)) return;
  delete_as_before.load()(data);
}

// The pool that serves this thread, and the pointer that keeps it alive if its Serving ends in another thread. The
// plain pointer may be read until the very end of the thread.
thread_local BlockPool* serving = nullptr;
struct Keep {
  std::shared_ptr<BlockPool> pool;
  ~Keep() { serving = nullptr; }
};
thread_local Keep keep;

std::atomic<c10::Allocator*> allocator_before = nullptr;

class ServingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (serving && bytes >= GradientBlocks::kLarge && serving->serves) [[unlikely]]
      if (c10::DataPtr block = serving->take_free(bytes)) return block;
    return before().allocate(bytes);  // deleted as before
  }
  c10::DeleterFnPtr raw_deleter() const override { return before().raw_deleter() ? &free_any : nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { before().copy_data(to, from, bytes); }

 private:
  static c10::Allocator& before() { return *allocator_before.load(); }
};

// Made before there are threads, because libtorch shows it to others without synchronisation. Leaked, like libtorch's
// own: storages may outlive all else.
ServingAllocator& the_allocator = *new ServingAllocator;

void install_allocator() {
  [[maybe_unused]] static const bool once = [] {
    c10::Allocator* const before = c10::GetCPUAllocator();
    delete_as_before = before->raw_deleter();
    allocator_before = before;
    c10::SetCPUAllocator(&the_allocator);
    return true;
  }();
}

}  // namespace

c10::DataPtr BlockPool::lend(Block block) {
  void* const data = block.memory.get();
  lent().add(shared_from_this(), std::move(block));
  return {data, data, &free_any, c10::Device(c10::DeviceType::CPU)};
}

GradientBlocks::GradientBlocks(std::shared_ptr<Heap> heap, bool serve)
    : serve_(serve), pool_(std::make_shared<BlockPool>(std::move(heap))) {}

c10::DataPtr GradientBlocks::take(size_t bytes) {
  if (c10::DataPtr block = pool_->take_free(bytes)) return block;
  BlockPool::Block block{bytes, pool_->heap->allocate(bytes + kSlack)};
  {
    const std::lock_guard lock(pool_->mutex);
    pool_->known.insert(block.memory.get());
  }
  if (serve_) install_allocator();
  return pool_->lend(std::move(block));
}

bool GradientBlocks::contains(const void* data) const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->known.contains(data);
}

GradientBlocks::Serving::Serving(const GradientBlocks& blocks) : pool_(blocks.pool_) {
  if (!blocks.serve_) return;
  keep.pool = pool_;
  serving = pool_.get();
  pool_->serves = true;
}
GradientBlocks::Serving::~Serving() {
  pool_->serves = false;
  if (serving != pool_.get()) return;
  serving = nullptr;
  keep.pool = nullptr;
}

GradientBlocks::Pause::Pause() : set_(serving, nullptr) {}

}  // namespace muster::parallel
