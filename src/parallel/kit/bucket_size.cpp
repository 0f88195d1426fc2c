#include "parallel/kit/bucket_size.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "muster/base/deadline.h"
#include "muster/comm/collectives.h"

namespace muster::parallel {

double bucket_mib_for(std::chrono::nanoseconds few, std::chrono::nanoseconds mebibyte) {
  const double start = static_cast<double>(few.count());
  const double per_mib = std::max(1.0, static_cast<double>((mebibyte - few).count()));
  double mib = kLeastBucketMiB;
  while (mib < kMostBucketMiB && mib * per_mib < 9 * start) mib *= 2;
  return std::min(mib, kMostBucketMiB);
}

double measured_bucket_mib(const Group& group, Heap& heap) {
  if (group.size() == 1) return kMostBucketMiB;
  // The fastest of some: others may have waited for a rank that came late.
  const auto fastest = [&](int64_t floats, int times) {
    const at::Tensor tensor = heap.zeros({floats}, at::kFloat);
    std::chrono::nanoseconds best = std::chrono::nanoseconds::max();
    for (int i = 0; i < times; ++i) {
      const auto begin = Clock::now();
      all_reduce(tensor, {.group = group});
      best = std::min<std::chrono::nanoseconds>(best, Clock::now() - begin);
    }
    return static_cast<int64_t>(best.count());
  };
  const at::Tensor times = heap.zeros({2}, at::kLong);
  auto* const each = times.mutable_data_ptr<int64_t>();
  each[0] = fastest(4, 3);
  each[1] = fastest((1 << 20) / 4, 2);
  all_reduce(times, {.op = ReduceOp::MAX, .group = group});
  return bucket_mib_for(std::chrono::nanoseconds(each[0]), std::chrono::nanoseconds(each[1]));
}

}  // namespace muster::parallel
