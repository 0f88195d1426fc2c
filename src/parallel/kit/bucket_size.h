// How large buckets of small gradients are where the user does not say: as the speed of the group's all_reduce wants it.
//
// A larger bucket is on its way later, so backward() hides less of it; of smaller ones, more have to be started. To
// start one costs what an all_reduce of a few bytes takes. A bucket is as large as needed for that to be a tenth of its
// time: 1 MiB in shared memory and on fast networks, more where messages are on their way for milliseconds.
#pragma once

#include <chrono>

#include "muster/comm/group.h"
#include "muster/comm/heap.h"

namespace muster::parallel {

inline constexpr double kLeastBucketMiB = 1, kMostBucketMiB = 25;

// `few`, `mebibyte`: how long an all_reduce of a few bytes takes, and one of 1 MiB. A power of two, or the most.
double bucket_mib_for(std::chrono::nanoseconds few, std::chrono::nanoseconds mebibyte);

// A collective, with the same result on all ranks: that of the slowest. Five all_reduces, of which two have 1 MiB. For
// tensors on the CPU.
double measured_bucket_mib(const Group& group, Heap& heap);

}  // namespace muster::parallel
