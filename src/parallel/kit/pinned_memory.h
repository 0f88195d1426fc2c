// Memory that a CUDA device reads directly and while the thread goes on, as long as the object lives. On other devices,
// or if CUDA refuses (then it says so in a warning), copies from it are only slower.
//
// Thread-safety: of(); objects are immutable.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "shm/mapping.h"

namespace muster::parallel {

class PinnedMemory {
 public:
  // Whoever maps it has written it for the first time: pages that are not there yet are made. All ranks of a process
  // share the result, as they share the mapping.
  static std::shared_ptr<PinnedMemory> of(const std::shared_ptr<shm::Mapping>& memory, const c10::Device& device);

  PinnedMemory(std::shared_ptr<shm::Mapping> memory, const c10::Device& device);
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

 private:
  const std::shared_ptr<shm::Mapping> memory_;
  bool is_pinned_ = false;
};

}  // namespace muster::parallel
