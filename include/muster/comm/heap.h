// A rank's heap in shared memory: tensors that live here are reduced in place by all ranks, without a copy.
//
//   auto buffer = world.heap().empty({1 << 20}, at::kFloat);      // then all_reduce(buffer) takes the direct path
//
// Each World has one, and so has a process with groups for c10d (process_group.h). Programs do not make any themselves.
//
// The heap is one memory file of the kernel (memfd) that every rank of the host maps. It takes memory as it grows,
// never more than `capacity`; a shortage of memory throws Unavailable (with the figures) and never causes a SIGBUS. The
// kernel frees the file when the last process that maps it has ended.
//
// Any dense CPU tensor may live here; it is an ordinary at::Tensor, and outlives the World (its bytes stay mapped).
//
// Thread-safety: all methods.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <memory>

namespace muster {
class Heap;
namespace shm {
class Arena;
}
namespace comm {
std::shared_ptr<Heap> make_heap(std::shared_ptr<shm::Arena> arena);
}

class Heap final : public c10::Allocator {
 public:
  ~Heap() override;

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);  // contiguous, uninitialised
  at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);

  bool contains(const void* address) const;
  static bool allocated(const c10::DataPtr& data);  // whether `data` came from any Heap
  size_t used() const;                              // bytes in live allocations
  size_t committed() const;                         // bytes that this heap has requested from the kernel
  size_t capacity() const;

  // c10::Allocator, for code that takes one.
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* dest, const void* src, std::size_t count) const override;

 private:
  friend std::shared_ptr<Heap> comm::make_heap(std::shared_ptr<shm::Arena> arena);
  explicit Heap(std::shared_ptr<shm::Arena> arena);

  std::shared_ptr<shm::Arena> arena_;
  c10::Allocator* for_tensors_;  // lives for ever
};

}  // namespace muster
