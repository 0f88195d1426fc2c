#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/algorithms/reduce_kernels.cpp"
#include <hwy/foreach_target.h>  // compiles this file again for each target; must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "comm/algorithms/reduce_kernels.h"

#ifndef MUSTER_REDUCE_KERNELS_ONCE
#define MUSTER_REDUCE_KERNELS_ONCE
namespace muster::comm {

// 16-bit floats as the bits they are stored in; only their conversions are arithmetic.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
template <typename T>
struct Complex {
  T real, imaginary;
};

}  // namespace muster::comm
#endif

HWY_BEFORE_NAMESPACE();
namespace muster::comm::HWY_NAMESPACE {
namespace {

// The type in which a dtype is accumulated, and the conversions to it and back.
template <typename T>
struct Traits {
  using Accumulator = T;
  static HWY_INLINE T load(T value) { return value; }
  static HWY_INLINE T store(T value) { return value; }
};

template <>
struct Traits<BFloat16> {
  using Accumulator = float;
  static HWY_INLINE float load(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
  static HWY_INLINE BFloat16 store(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded)};
  }
};

template <>
struct Traits<Float16> {
  using Accumulator = float;
  // _Float16 rounds to nearest even, in hardware (F16C) or in the compiler's library.
  static HWY_INLINE float load(Float16 value) { return static_cast<float>(std::bit_cast<_Float16>(value.bits)); }
  static HWY_INLINE Float16 store(float value) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(value))}; }
};

struct Sum {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) +
                            static_cast<U>(b));  // wraps, without the undefined behaviour of signed overflow
    } else {
      return a + b;
    }
  }
};

// The product, rounded. When GCC 12 vectorises complex arithmetic, it fuses multiplications and additions even with
// -ffp-contract=off. Then equal elements of a tensor could get different bits, depending on their position.
template <typename T>
HWY_INLINE T rounded_product(T a, T b) {
  T product = a * b;
  asm("" : "+m"(product));
  return product;
}

struct Product {
  template <typename T>
  static HWY_INLINE Complex<T> combine(Complex<T> a, Complex<T> b) {
    return {rounded_product(a.real, b.real) - rounded_product(a.imaginary, b.imaginary),
            rounded_product(a.real, b.imaginary) + rounded_product(a.imaginary, b.real)};
  }
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::common_type_t<std::make_unsigned_t<T>, uint32_t>;  // uint16 * uint16 would be a signed int
      return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};

// Written so that compilers turn them into compare and blend; a != a is "a is NaN".
struct Min {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};

struct And {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static HWY_INLINE T combine(T a, T b) {
    return a ^ b;
  }
};

struct Average : Sum {};

template <typename T, typename Byte>
HWY_INLINE auto at(Byte* base, size_t offset) {
  return reinterpret_cast<std::conditional_t<std::is_const_v<Byte>, const T, T>*>(base) + offset;
}

// Convert values between memory and the accumulator's type.
template <typename T, typename Acc>
HWY_INLINE void load_block(const T* from, Acc* to, size_t length) {
  for (size_t i = 0; i < length; ++i) to[i] = static_cast<Acc>(Traits<T>::load(from[i]));
}
template <typename T, typename Acc>
HWY_INLINE void store_block(const Acc* from, T* to, size_t length) {
  if constexpr (std::is_same_v<Acc, typename Traits<T>::Accumulator>)
    for (size_t i = 0; i < length; ++i) to[i] = Traits<T>::store(from[i]);
  else
    for (size_t i = 0; i < length; ++i) to[i] = static_cast<T>(from[i]);
}

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
// GCC does not vectorise conversions of _Float16. These targets have instructions for them, which round the same way.
constexpr hn::ScalableTag<float> kFloats;
constexpr hn::Rebind<hwy::float16_t, decltype(kFloats)> kHalves;
HWY_INLINE void load_block(const Float16* from, float* to, size_t length) {
  size_t i = 0;
  for (; i + hn::Lanes(kFloats) <= length; i += hn::Lanes(kFloats))
    hn::StoreU(hn::PromoteTo(kFloats, hn::LoadU(kHalves, reinterpret_cast<const hwy::float16_t*>(from + i))), kFloats,
               to + i);
  for (; i < length; ++i) to[i] = Traits<Float16>::load(from[i]);
}
HWY_INLINE void store_block(const float* from, Float16* to, size_t length) {
  size_t i = 0;
  for (; i + hn::Lanes(kFloats) <= length; i += hn::Lanes(kFloats))
    hn::StoreU(hn::DemoteTo(kHalves, hn::LoadU(kFloats, from + i)), kHalves, reinterpret_cast<hwy::float16_t*>(to + i));
  for (; i < length; ++i) to[i] = Traits<Float16>::store(from[i]);
}
#endif

// Copies a block to all destinations. With vectors: GCC would make a memcpy of it, whose "rep movsb" is slow if the
// lines are in another core's cache.
template <typename T>
HWY_INLINE void copy_to_all(std::span<std::byte* const> destinations, size_t start, const T* from, size_t length) {
  const hn::ScalableTag<uint8_t> vector;
  const auto* const in = reinterpret_cast<const uint8_t*>(from);
  const size_t bytes = length * sizeof(T), step = hn::Lanes(vector);
  for (std::byte* const destination : destinations) {
    auto* const to = reinterpret_cast<uint8_t*>(at<T>(destination, start));
    size_t i = 0;
    for (; i + step <= bytes; i += step) hn::StoreU(hn::LoadU(vector, in + i), vector, to + i);
    std::memcpy(to + i, in + i, bytes - i);
  }
}

// to[i] = first[i] combined with element i of `count` more sources, 1 to 3, in their order. Several at a time, so that
// `to` goes through the cache less often. Memory that overlaps is the same, element for element.
template <typename T, typename Op>
HWY_INLINE void combine_block(T* to, const T* first, const std::byte* const* more, size_t count, size_t start,
                              size_t length) {
  const T* const a = at<T>(more[0], start);
  const T* const b = at<T>(more[count > 1 ? 1 : 0], start);
  const T* const c = at<T>(more[count - 1], start);
  if (count == 1) {
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) to[i] = Op::combine(first[i], a[i]);
  } else if (count == 2) {
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) to[i] = Op::combine(Op::combine(first[i], a[i]), b[i]);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < length; ++i) to[i] = Op::combine(Op::combine(Op::combine(first[i], a[i]), b[i]), c[i]);
  }
}

// Bytes of one block of the accumulator: small beside the first-level cache, large beside the loop's overhead.
constexpr size_t kBlockBytes = 4096;
constexpr size_t kTogether = 3;  // sources that combine_block() takes

template <typename T, typename Op>
HWY_NOINLINE void reduce(std::span<std::byte* const> destinations, std::span<const std::byte* const> sources,
                         size_t count) {
  constexpr bool kAverage = std::is_same_v<Op, Average>;
  // Averages of integers need room for the sum.
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  using Acc = std::conditional_t<kAverage && std::is_integral_v<T>, Wide, typename Traits<T>::Accumulator>;
  constexpr size_t kBlock = kBlockBytes / sizeof(Acc);
  alignas(128) Acc accumulator[kBlock], widened[std::is_same_v<T, Acc> ? 1 : kBlock];
  alignas(128) T result[std::is_same_v<T, Acc> ? 1 : kBlock];
  const size_t n = sources.size();

  const auto finish = [n](Acc value) HWY_ATTR {
    if constexpr (!kAverage) return value;
    // A double holds these sums exactly, and truncating its quotient gives the right result. Processors have vector
    // instructions for the division of doubles, but not of integers.
    else if constexpr (std::is_integral_v<T> && sizeof(T) < 8)
      return static_cast<Acc>(static_cast<double>(value) / static_cast<double>(n));
    else
      return static_cast<Acc>(value / static_cast<Acc>(n));
  };

  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    if constexpr (std::is_same_v<T, Acc>) {
      // The common cases need no accumulator. Sources and destinations are the same memory, element for element, or do
      // not overlap. So no dependence prevents vectorisation.
      if (n == 2 && destinations.size() <= 2) {
        const T* const a = at<T>(sources[0], start);
        const T* const b = at<T>(sources[1], start);
        T* const first = at<T>(destinations[0], start);
        T* const last = at<T>(destinations.back(), start);
        if (last == first) {
#pragma GCC ivdep
          for (size_t i = 0; i < length; ++i) first[i] = finish(Op::combine(a[i], b[i]));
        } else {
          // Not first a destination and then a copy of it: its lines may still be on their way from the peer's cache.
#pragma GCC ivdep
          for (size_t i = 0; i < length; ++i) first[i] = last[i] = finish(Op::combine(a[i], b[i]));
        }
        continue;
      }
    }
    if constexpr (std::is_same_v<T, Acc>) {
      const T* so_far = at<T>(sources[0], start);
      for (size_t source = 1; source < n; source += kTogether) {
        combine_block<T, Op>(accumulator, so_far, &sources[source], std::min(kTogether, n - source), start, length);
        so_far = accumulator;
      }
      if (n == 1) load_block(so_far, accumulator, length);
    } else {
      load_block(at<T>(sources[0], start), accumulator, length);
      for (size_t source = 1; source < n; ++source) {
        load_block(at<T>(sources[source], start), widened, length);
        for (size_t i = 0; i < length; ++i) accumulator[i] = Op::combine(accumulator[i], widened[i]);
      }
    }
    for (size_t i = 0; i < length; ++i) accumulator[i] = finish(accumulator[i]);
    if constexpr (std::is_same_v<T, Acc>) {
      copy_to_all<T>(destinations, start, accumulator, length);
    } else if (destinations.size() == 1) {
      store_block(accumulator, at<T>(destinations[0], start), length);
    } else {
      store_block(accumulator, result, length);
      copy_to_all<T>(destinations, start, result, length);
    }
  }
}

}  // namespace

// A sum of complex numbers is a sum of twice as many real numbers.
template <typename T, typename Op>
void reduce_parts(std::span<std::byte* const> destinations, std::span<const std::byte* const> sources, size_t count) {
  reduce<T, Op>(destinations, sources, 2 * count);
}

template <typename T>
ReduceKernel real_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
      return &reduce<T, Sum>;
    case ReduceOp::AVG:
      return &reduce<T, Average>;
    case ReduceOp::PRODUCT:
      return &reduce<T, Product>;
    case ReduceOp::MIN:
      return &reduce<T, Min>;
    case ReduceOp::MAX:
      return &reduce<T, Max>;
    default:
      return nullptr;
  }
}

template <typename T>
ReduceKernel integer_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::BAND:
      return &reduce<T, And>;
    case ReduceOp::BOR:
      return &reduce<T, Or>;
    case ReduceOp::BXOR:
      return &reduce<T, Xor>;
    default:
      return real_kernel<T>(op);
  }
}

// The factors of PREMUL_SUM have been applied already.
template <typename T>
ReduceKernel float_kernel(ReduceOp op) {
  return real_kernel<T>(op == ReduceOp::PREMUL_SUM ? ReduceOp::SUM : op);
}

template <typename T>
ReduceKernel complex_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM:
      return &reduce_parts<T, Sum>;
    case ReduceOp::AVG:
      return &reduce_parts<T, Average>;
    case ReduceOp::PRODUCT:
      return &reduce<Complex<T>, Product>;
    default:
      return nullptr;
  }
}

// Booleans are bytes that hold 0 or 1.
ReduceKernel bool_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
    case ReduceOp::BOR:
      return &reduce<uint8_t, Or>;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::BAND:
      return &reduce<uint8_t, And>;
    case ReduceOp::BXOR:
      return &reduce<uint8_t, Xor>;
    default:
      return nullptr;
  }
}

ReduceKernel kernel(c10::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return float_kernel<double>(op);
    case c10::ScalarType::Float:
      return float_kernel<float>(op);
    case c10::ScalarType::BFloat16:
      return float_kernel<BFloat16>(op);
    case c10::ScalarType::Half:
      return float_kernel<Float16>(op);
    case c10::ScalarType::ComplexDouble:
      return complex_kernel<double>(op);
    case c10::ScalarType::ComplexFloat:
      return complex_kernel<float>(op);
    case c10::ScalarType::Long:
      return integer_kernel<int64_t>(op);
    case c10::ScalarType::Int:
      return integer_kernel<int32_t>(op);
    case c10::ScalarType::Short:
      return integer_kernel<int16_t>(op);
    case c10::ScalarType::Char:
      return integer_kernel<int8_t>(op);
    case c10::ScalarType::UInt64:
      return integer_kernel<uint64_t>(op);
    case c10::ScalarType::UInt32:
      return integer_kernel<uint32_t>(op);
    case c10::ScalarType::UInt16:
      return integer_kernel<uint16_t>(op);
    case c10::ScalarType::Byte:
      return integer_kernel<uint8_t>(op);
    case c10::ScalarType::Bool:
      return bool_kernel(op);
    default:
      return nullptr;
  }
}

}  // namespace muster::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace muster::comm {

HWY_EXPORT(kernel);

ReduceKernel reduce_kernel(c10::ScalarType dtype, ReduceOp op) { return HWY_DYNAMIC_DISPATCH(kernel)(dtype, op); }

}  // namespace muster::comm
#endif
