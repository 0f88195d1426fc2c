// Copies of parameters on the device that computes, while the parameters themselves stay in the host's memory.
//
// A copy has memory only while operators need it, unit by unit. When an operator is about to read it (watched.h) and
// its unit is not there, the unit's values are copied from the host, on a stream of their own; if the host has all of
// them, the units that followed the last time come meanwhile. `most` units may be on the device; the least recently
// used one goes, but none that the same operator uses. What operators save for backward refers to the copy, not to its
// memory: it comes again.
//
//   operators    | unit 0      | unit 1      | unit 2      | …        on the current stream
//   copies       | 0 | 1 |     | 2 |         | 3, 0 gone | …          ahead of them, on their own
//
// A unit goes when the device has computed everything that reads it. The thread waits for that if it is too far ahead
// of the device, so no more units than `most` ever have memory.
//
// The values are those of the time when the copy is made. Whoever is about to change parameters calls forget() first.
//
// Errors: InvalidArgument if an operator reads a copy when the DeviceCopies are gone; those of the device, such as
// c10::OutOfMemoryError. Thread-safety: before_use() of the tensors from any thread, because autograd runs backward in
// a thread of the device; everything else from one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "parallel/fsdp/units.h"
#include "parallel/modules/same_module.h"

namespace muster::fsdp {

class DeviceCopies {
 public:
  struct Setup {
    at::Device device;                        // with an index
    std::vector<parallel::NamedTensor> from;  // on the CPU, by parameter; before_use of them is called
    std::vector<Unit> units;                  // of all parameters
    size_t most = 3;                          // with those that are on their way; at least 2
  };
  explicit DeviceCopies(Setup setup);
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  ~DeviceCopies();

  const at::Tensor& operator[](size_t index) const { return copies_[index]; }
  // The device has read what it was asked to; no copy has memory.
  void forget();
  std::vector<size_t> units_here() const;  // in order

 private:
  class Units;
  std::vector<at::Tensor> copies_;
  std::shared_ptr<Units> units_;
};

// Returns when autograd's thread of the device has nothing to do. A backward() that throws in the thread that called it
// returns before.
void wait_for_autograd(const at::Device& device);

}  // namespace muster::fsdp
