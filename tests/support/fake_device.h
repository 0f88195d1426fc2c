// A type of device that is in no machine, fake:0 to fake:2 (libtorch's PrivateUse1), for tests of code that must work
// with any device of libtorch's. A program that links fake_device.cpp has it: from its start, and so that libtorch's
// engine makes threads for it; hence no binary of other tests should, least of all one that forks after backward().
//
// Memory of these devices cannot be read or written: an address in it is good for nothing but SIGSEGV. Copies to and
// from it and views work by themselves; every other operator copies its arguments to the CPU and its results back.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace muster::test {

inline constexpr c10::DeviceIndex kFakeDevices = 3;

inline c10::Device fake(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

struct FakeDeviceCounts {
  size_t blocks = 0, bytes = 0;  // of memory that are there
  size_t unblocked_copies = 0;   // that were allowed to end later than the call
};
FakeDeviceCounts fake_device_counts();

}  // namespace muster::test
