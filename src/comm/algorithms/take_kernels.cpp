#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/algorithms/take_kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles this file again for each target; must come before highway.h
#include <hwy/highway.h>

#include <cstdint>

#include "comm/algorithms/take_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace muster::comm::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <Leave kLeave, bool kStream>
void take(uint8_t* HWY_RESTRICT to, uint8_t* HWY_RESTRICT from, size_t lines) {
  const hn::CappedTag<uint8_t, kCacheLine> bytes;
  const size_t step = hn::Lanes(bytes), size = lines * kCacheLine;
  const auto store = [&](auto data, size_t at) HWY_ATTR {
    if (kStream)
      hn::Stream(data, bytes, to + at);
    else
      hn::StoreU(data, bytes, to + at);
  };
  const auto leave = [&](size_t at) HWY_ATTR {
    auto* const word = reinterpret_cast<volatile uint64_t*>(from + at);
    if (kLeave == Leave::kUnchanged) *word = *word;
  };
  size_t at = 0;
  // Several loads before the first store: a load from an address that equals that of a store before it in the low 12
  // bits waits for the store, which itself waits for its line. `to` is often one line further than `from` in its page:
  // large tensors begin there.
  for (; at + 4 * kCacheLine <= size; at += 4 * kCacheLine) {
    for (size_t i = at; i < at + 4 * kCacheLine; i += 4 * step) {
      const auto a = hn::Load(bytes, from + i), b = hn::Load(bytes, from + i + step);
      const auto c = hn::Load(bytes, from + i + 2 * step), d = hn::Load(bytes, from + i + 3 * step);
      store(a, i);
      store(b, i + step);
      store(c, i + 2 * step);
      store(d, i + 3 * step);
    }
    for (size_t line = 0; line < 4; ++line) leave(at + line * kCacheLine);
  }
  for (; at < size; at += kCacheLine) {
    for (size_t i = at; i < at + kCacheLine; i += step) store(hn::Load(bytes, from + i), i);
    leave(at);
  }
  if (kStream) hwy::FlushStream();
}

template <Leave kLeave>
void take(uint8_t* to, uint8_t* from, size_t lines, bool stream) {
  stream ? take<kLeave, true>(to, from, lines) : take<kLeave, false>(to, from, lines);
}

void take_any(uint8_t* to, uint8_t* from, size_t lines, Leave leave, bool stream) {
  switch (leave) {
    case Leave::kNothing:
      return take<Leave::kNothing>(to, from, lines, stream);
    case Leave::kUnchanged:
      return take<Leave::kUnchanged>(to, from, lines, stream);
  }
}

}  // namespace
}  // namespace muster::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace muster::comm {

HWY_EXPORT(take_any);

void take_lines(std::byte* to, std::byte* from, size_t lines, Leave leave, bool stream) {
  HWY_DYNAMIC_DISPATCH(take_any)
  (reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint8_t*>(from), lines, leave,
   stream && reinterpret_cast<uintptr_t>(to) % kCacheLine == 0);
}

}  // namespace muster::comm
#endif
