#include "support/patterns.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

#include "base/text.h"
#include "support/sanitized.h"

namespace muster::test {
namespace {

// Vigna's splitmix64: any seed gives well-mixed bits.
uint64_t mix(uint64_t seed) {
  seed += 0x9e3779b97f4a7c15;
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
  return seed ^ (seed >> 31);
}

template <typename T>
T value_of(uint64_t bits) {
  const auto real = [](uint64_t b) { return (static_cast<double>(b >> 11) * 0x1p-53 - 0.5) * 4; };
  if constexpr (std::is_same_v<T, bool>)
    return bits & 1;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(bits);
  else if constexpr (c10::is_complex<T>::value)
    return T(real(bits), real(mix(bits)));
  else if constexpr (std::is_same_v<T, double>)
    return real(bits);
  else
    return static_cast<T>(static_cast<float>(real(bits)));
}

template <typename Fn>
void for_type(at::ScalarType dtype, Fn fn) {
  switch (dtype) {
    case at::kDouble:
      return fn(double{});
    case at::kFloat:
      return fn(float{});
    case at::kBFloat16:
      return fn(c10::BFloat16{});
    case at::kHalf:
      return fn(c10::Half{});
    case at::kLong:
      return fn(int64_t{});
    case at::kInt:
      return fn(int32_t{});
    case at::kShort:
      return fn(int16_t{});
    case at::kChar:
      return fn(int8_t{});
    case at::kByte:
      return fn(uint8_t{});
    case at::kUInt16:
      return fn(uint16_t{});
    case at::kUInt32:
      return fn(uint32_t{});
    case at::kUInt64:
      return fn(uint64_t{});
    case at::kFloat8_e4m3fn:
      return fn(c10::Float8_e4m3fn{});
    case at::kFloat8_e5m2:
      return fn(c10::Float8_e5m2{});
    case at::kBool:
      return fn(bool{});
    case at::kComplexFloat:
      return fn(c10::complex<float>{});
    case at::kComplexDouble:
      return fn(c10::complex<double>{});
    default:
      throw std::logic_error("no pattern for this dtype");
  }
}

template <typename T>
T reduce_integers(ReduceOp op, const std::vector<T>& values) {
  uint64_t sum = 0, product = 1, conjunction = ~uint64_t{0}, disjunction = 0, difference = 0;
  for (const T value : values) {
    sum += static_cast<uint64_t>(value);
    product *= static_cast<uint64_t>(value);
    conjunction &= static_cast<uint64_t>(value);
    disjunction |= static_cast<uint64_t>(value);
    difference ^= static_cast<uint64_t>(value);
  }
  switch (op) {
    case ReduceOp::SUM:
      return static_cast<T>(sum);
    case ReduceOp::AVG:
      if (std::is_unsigned_v<T>) return static_cast<T>(sum / values.size());
      return static_cast<T>(static_cast<int64_t>(sum) / static_cast<int64_t>(values.size()));
    case ReduceOp::PRODUCT:
      return static_cast<T>(product);
    case ReduceOp::MIN:
      return *std::min_element(values.begin(), values.end());
    case ReduceOp::MAX:
      return *std::max_element(values.begin(), values.end());
    case ReduceOp::BAND:
      return static_cast<T>(conjunction);
    case ReduceOp::BOR:
      return static_cast<T>(disjunction);
    case ReduceOp::BXOR:
      return static_cast<T>(difference);
    case ReduceOp::PREMUL_SUM:
      break;
  }
  throw std::logic_error("no such operation");
}

// Sums and maxima of booleans are "or", products and minima "and".
bool reduce_booleans(ReduceOp op, const std::vector<uint8_t>& values) {
  const bool all = std::all_of(values.begin(), values.end(), [](uint8_t v) { return v != 0; });
  const bool any = std::any_of(values.begin(), values.end(), [](uint8_t v) { return v != 0; });
  if (op == ReduceOp::BXOR) return std::count(values.begin(), values.end(), 1) % 2 == 1;
  return op == ReduceOp::SUM || op == ReduceOp::MAX || op == ReduceOp::BOR ? any : all;
}

// One operation on two floats, computed in 64 bits and rounded once to 32, gives what 32-bit arithmetic must give: 53
// bits are more than twice 24 (Figueroa, "When is double rounding innocuous?", 1995).
template <typename T>
T reduce_floats(ReduceOp op, const std::vector<T>& values) {
  const auto round = [](double x) { return std::is_same_v<T, double> ? x : double{static_cast<float>(x)}; };
  double result = static_cast<double>(values[0]);
  for (size_t r = 1; r < values.size(); ++r) {
    const auto next = static_cast<double>(values[r]);
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = round(result + next);
        break;
      case ReduceOp::PRODUCT:
        result = round(result * next);
        break;
      case ReduceOp::MIN:
        result = std::isnan(result) || result < next ? result : next;
        break;
      case ReduceOp::MAX:
        result = std::isnan(result) || result > next ? result : next;
        break;
      default:
        throw std::logic_error("no operation on floats");
    }
  }
  if (op == ReduceOp::AVG) result = round(result / static_cast<double>(values.size()));
  if constexpr (std::is_same_v<T, double>)
    return result;
  else
    return static_cast<T>(static_cast<float>(result));
}

template <typename T>
c10::complex<T> reduce_complex(ReduceOp op, const std::vector<c10::complex<T>>& values) {
  if (op != ReduceOp::PRODUCT) {
    std::vector<T> real, imaginary;
    for (const auto& value : values) {
      real.push_back(value.real());
      imaginary.push_back(value.imag());
    }
    return {reduce_floats(op, real), reduce_floats(op, imaginary)};
  }
  const auto product = [](T a, T b) { return reduce_floats<T>(ReduceOp::PRODUCT, {a, b}); };
  const auto sum = [](T a, T b) { return reduce_floats<T>(ReduceOp::SUM, {a, b}); };
  c10::complex<T> result = values[0];
  for (size_t r = 1; r < values.size(); ++r) {
    const auto& next = values[r];
    result = {sum(product(result.real(), next.real()), -product(result.imag(), next.imag())),
              sum(product(result.real(), next.imag()), product(result.imag(), next.real()))};
  }
  return result;
}

template <typename Key, typename Make>
const at::Tensor& cached(std::map<Key, at::Tensor>& cache, std::mutex& mutex, const Key& key, Make make) {
  const std::lock_guard lock(mutex);
  auto& entry = cache[key];
  if (!entry.defined()) entry = make();
  return entry;
}

std::string show(const at::Tensor& flat, int64_t i) {
  std::string words;
  for_type(flat.scalar_type(), [&](auto sample) {
    using T = decltype(sample);
    const T value = flat.const_data_ptr<T>()[i];
    if constexpr (c10::is_complex<T>::value)
      words = text(value.real(), " + ", value.imag(), "i");
    else if constexpr (sizeof(T) == 1)
      words = text(static_cast<float>(value));
    else if constexpr (std::is_integral_v<T>)
      words = text(value);
    else
      words = std::is_same_v<T, double> ? text(std::hexfloat, static_cast<float>(value), std::defaultfloat)
                                        : text(std::hexfloat, static_cast<float>(value), std::defaultfloat, " (",
                                               static_cast<float>(value), ")");
  });
  return words;
}

const std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); }

std::string first_difference(const at::Tensor& actual, const at::Tensor& expected, int64_t start,
                             int64_t expected_start, int64_t count) {
  const size_t item = actual.element_size();
  const std::byte* const is = bytes_of(actual) + start * item;
  const std::byte* const wanted = bytes_of(expected) + expected_start * item;
  if (count == 0 || std::memcmp(is, wanted, count * item) == 0) return "";
  for (int64_t i = 0; i < count; ++i)
    if (std::memcmp(is + i * item, wanted + i * item, item) != 0)
      return text("element ", start + i, " of ", actual.numel(), " is ", show(actual, start + i), ", not ",
                  show(expected, expected_start + i));
  return "";
}

}  // namespace

const std::vector<at::ScalarType>& reducible_types() {
  static const std::vector<at::ScalarType> types =
      kSanitized ? std::vector{at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexDouble}
                 : std::vector{at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,         at::kLong,
                               at::kInt,    at::kShort, at::kChar,     at::kUInt64,       at::kUInt32,
                               at::kUInt16, at::kByte,  at::kBool,     at::kComplexFloat, at::kComplexDouble};
  return types;
}

const std::vector<at::ScalarType>& movable_types() {
  static const std::vector<at::ScalarType> types = [] {
    auto list = reducible_types();
    list.insert(list.end(), {at::kFloat8_e4m3fn, at::kFloat8_e5m2});
    return list;
  }();
  return types;
}

const std::vector<ReduceOp>& ops_of(at::ScalarType dtype) {
  using enum ReduceOp;
  static const std::vector<ReduceOp> floats = {SUM, AVG, PRODUCT, MIN, MAX}, complex = {SUM, AVG, PRODUCT},
                                     integers = {SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR},
                                     booleans = {SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR};
  if (dtype == at::kBool) return booleans;
  if (c10::isComplexType(dtype)) return complex;
  return c10::isIntegralType(dtype, false) ? integers : floats;
}

const at::Tensor& table_of(at::ScalarType dtype, int rank) {
  static std::mutex mutex;
  static std::map<std::pair<at::ScalarType, int>, at::Tensor> cache;
  return cached(cache, mutex, {dtype, rank}, [&] {
    at::Tensor table = at::empty({kPeriod}, dtype);
    for_type(dtype, [&](auto sample) {
      using T = decltype(sample);
      T* const values = table.mutable_data_ptr<T>();
      const auto seed = static_cast<uint64_t>(rank) * 1'000'003 + static_cast<uint64_t>(dtype) * 7919;
      for (int64_t i = 0; i < kPeriod; ++i) values[i] = value_of<T>(mix(seed * 65537 + static_cast<uint64_t>(i)));
    });
    return table;
  });
}

const at::Tensor& reduced_table(at::ScalarType dtype, ReduceOp op, int n) {
  static std::mutex mutex;
  static std::map<std::tuple<at::ScalarType, ReduceOp, int>, at::Tensor> cache;
  return cached(cache, mutex, {dtype, op, n}, [&] {
    std::vector<at::Tensor> tables;
    for (int r = 0; r < n; ++r) tables.push_back(table_of(dtype, r));
    return reference(op, tables);
  });
}

at::Tensor reference(ReduceOp op, const std::vector<at::Tensor>& by_rank) {
  at::Tensor result = at::empty({by_rank[0].numel()}, by_rank[0].scalar_type());
  for_type(result.scalar_type(), [&](auto sample) {
    using T = decltype(sample);
    if constexpr (std::is_same_v<T, c10::Float8_e4m3fn> || std::is_same_v<T, c10::Float8_e5m2>) {
      throw std::logic_error("this dtype is not reduced");
    } else {
      using Value = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;  // vector<bool> is none
      std::vector<Value> values(by_rank.size());
      for (int64_t i = 0; i < result.numel(); ++i) {
        for (size_t r = 0; r < values.size(); ++r) values[r] = by_rank[r].const_data_ptr<T>()[i];
        if constexpr (std::is_same_v<T, bool>)
          result.mutable_data_ptr<T>()[i] = reduce_booleans(op, values);
        else if constexpr (c10::is_complex<T>::value)
          result.mutable_data_ptr<T>()[i] = reduce_complex(op, values);
        else if constexpr (std::is_integral_v<T>)
          result.mutable_data_ptr<T>()[i] = reduce_integers(op, values);
        else
          result.mutable_data_ptr<T>()[i] = reduce_floats(op, values);
      }
    }
  });
  return result;
}

at::Tensor tile(const at::Tensor& table, int64_t shift, int64_t count) {
  at::Tensor flat = at::empty({count}, table.scalar_type());
  const size_t item = flat.element_size();
  for (int64_t at = 0; at < count;) {
    const int64_t from = (at + shift) % kPeriod;
    const int64_t length = std::min(count - at, kPeriod - from);
    std::memcpy(static_cast<std::byte*>(flat.mutable_data_ptr()) + at * item, bytes_of(table) + from * item,
                length * item);
    at += length;
  }
  return flat;
}

std::string difference(const at::Tensor& actual, const at::Tensor& table, int64_t shift) {
  const at::Tensor flat = actual.contiguous().view(-1);
  const size_t item = flat.element_size();
  for (int64_t at = 0; at < flat.numel();) {
    const int64_t from = (at + shift) % kPeriod;
    const int64_t length = std::min(flat.numel() - at, kPeriod - from);
    if (std::memcmp(bytes_of(flat) + at * item, bytes_of(table) + from * item, length * item) != 0)
      return first_difference(flat, table, at, from, length);
    at += length;
  }
  return "";
}

std::string difference(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor flat = actual.contiguous().view(-1), wanted = expected.contiguous().view(-1);
  if (flat.numel() != wanted.numel()) return text(flat.numel(), " elements, not ", wanted.numel());
  return first_difference(flat, wanted, 0, 0, flat.numel());
}

}  // namespace muster::test
