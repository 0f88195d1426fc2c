// How much longer copy_bytes() takes at some offset between source and destination than at none; and memcpy().
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/copy.h"
#include "base/text.h"
#include "bounds.h"
#include "muster/base/deadline.h"

namespace bench {
namespace {

using muster::Clock;

template <typename Copy>
double seconds_of(std::byte* to, const std::byte* from, size_t bytes, Copy copy) {
  double best = 1;
  for (int round = 0; round < 5; ++round) {
    const auto calls = static_cast<int>((size_t{1} << 20) / bytes);
    const auto began = Clock::now();
    for (int i = 0; i < calls; ++i) {
      copy(to, from, bytes);
      asm volatile("" ::: "memory");  // the compiler must not drop a copy that the next one repeats
    }
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count() / calls);
  }
  return best;
}

}  // namespace

void copy() {
  constexpr size_t kPage = 4096, kMost = 64 << 10;
  const auto room = [] {
    return std::unique_ptr<std::byte, decltype(&std::free)>(
        static_cast<std::byte*>(std::aligned_alloc(kPage, kMost + 2 * kPage)), &std::free);
  };
  const auto from = room(), to = room();
  std::fill_n(from.get(), kMost, std::byte{1});
  const auto walk = [&](const std::string& name, size_t bytes, double bound, auto copy) {
    const double aligned = seconds_of(to.get(), from.get(), bytes, copy);
    std::vector<double> ratios;
    for (size_t offset = 1; offset < kPage; offset += offset < 128 ? 1 : 61)
      ratios.push_back(seconds_of(to.get() + offset, from.get(), bytes, copy) / aligned);
    std::sort(ratios.begin(), ratios.end());
    print("copy", muster::text(name, " of ", bytes >> 10, " KiB at any offset"), 1, ratios[ratios.size() / 2],
          ratios.back(), bound, "times the aligned copy");
  };
  for (const size_t bytes : {size_t{4} << 10, size_t{16} << 10, kMost}) {
    walk("copy_bytes()", bytes, 6, [](auto* to, auto* from, size_t n) { muster::copy_bytes(to, from, n); });
    walk("memcpy(), for comparison,", bytes, 1000, [](auto* to, auto* from, size_t n) { std::memcpy(to, from, n); });
  }
}

}  // namespace bench
