#include "muster/comm/heap.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/copy.h"
#include "comm/world/heaps.h"
#include "shm/arena.h"

namespace muster {
namespace {

// What a tensor's storage keeps alive: the arena outlives every tensor in it.
struct Block {
  std::shared_ptr<shm::Arena> arena;
  void* data;
};

void free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (block->data) block->arena->free(block->data);
}

c10::DataPtr block_of(std::shared_ptr<shm::Arena> arena, size_t bytes) {
  void* const data = bytes == 0 ? nullptr : arena->allocate(bytes);
  return {data, std::make_unique<Block>(Block{std::move(arena), data}).release(), &free_block,
          c10::Device(c10::DeviceType::CPU)};
}

// What the storage of a heap's tensor asks for memory when it grows. The storage has a plain pointer to it, and may
// outlive the World, so it is never destroyed.
class ForTensors final : public c10::Allocator {
 public:
  static ForTensors* make(const std::shared_ptr<shm::Arena>& arena) {
    static auto* const all = new std::vector<std::unique_ptr<ForTensors>>;
    static auto* const mutex = new std::mutex;
    const std::lock_guard lock(*mutex);
    return all->emplace_back(new ForTensors(arena)).get();
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto arena = arena_.lock();  // gone with the World and all tensors that have memory of it
    return arena ? block_of(std::move(arena), bytes) : c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override { copy_bytes(dest, src, count); }

 private:
  explicit ForTensors(const std::shared_ptr<shm::Arena>& arena) : arena_(arena) {}

  const std::weak_ptr<shm::Arena> arena_;
};

}  // namespace

Heap::Heap(std::shared_ptr<shm::Arena> arena) : arena_(std::move(arena)), for_tensors_(ForTensors::make(arena_)) {}
Heap::~Heap() = default;

std::shared_ptr<Heap> comm::make_heap(std::shared_ptr<shm::Arena> arena) {
  return std::shared_ptr<Heap>(new Heap(std::move(arena)));
}

c10::DataPtr Heap::allocate(size_t bytes) { return block_of(arena_, bytes); }

void Heap::copy_data(void* dest, const void* src, std::size_t count) const { copy_bytes(dest, src, count); }

at::Tensor Heap::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, for_tensors_, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

at::Tensor Heap::zeros(at::IntArrayRef sizes, at::ScalarType dtype) { return empty(sizes, dtype).zero_(); }

bool Heap::allocated(const c10::DataPtr& data) { return data.get_deleter() == &free_block; }
bool Heap::contains(const void* address) const { return arena_->contains(address); }
size_t Heap::used() const { return arena_->used(); }
size_t Heap::committed() const { return arena_->committed(); }
size_t Heap::capacity() const { return arena_->capacity(); }

}  // namespace muster
