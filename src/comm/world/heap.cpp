#include "muster/comm/heap.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>

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

}  // namespace

Heap::Heap(std::shared_ptr<shm::Arena> arena) : arena_(std::move(arena)) {}
Heap::~Heap() = default;

std::shared_ptr<Heap> comm::make_heap(std::shared_ptr<shm::Arena> arena) {
  return std::shared_ptr<Heap>(new Heap(std::move(arena)));
}

c10::DataPtr Heap::allocate(size_t bytes) {
  void* const data = bytes == 0 ? nullptr : arena_->allocate(bytes);
  return {data, std::make_unique<Block>(Block{arena_, data}).release(), &free_block, c10::Device(c10::DeviceType::CPU)};
}

void Heap::copy_data(void* dest, const void* src, std::size_t count) const { copy_bytes(dest, src, count); }

at::Tensor Heap::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, this, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

at::Tensor Heap::zeros(at::IntArrayRef sizes, at::ScalarType dtype) { return empty(sizes, dtype).zero_(); }

bool Heap::allocated(const c10::DataPtr& data) { return data.get_deleter() == &free_block; }
bool Heap::contains(const void* address) const { return arena_->contains(address); }
size_t Heap::used() const { return arena_->used(); }
size_t Heap::committed() const { return arena_->committed(); }
size_t Heap::capacity() const { return arena_->capacity(); }

}  // namespace muster
