// Values at the edges of reductions: NaN, infinities, signed zeros, overflow, truncation, rounding. They go through
// every way that the data can take, and through every instruction set that this machine has.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/tensor.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "comm/algorithms/reduce_kernels.h"
#include "muster/comm/collectives.h"
#include "support/full_run.h"
#include "support/patterns.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

// Compares bits, but any NaN equals any other, and MIN and MAX of zeros of both signs may be either zero.
template <typename T>
std::string wrong(const at::Tensor& actual, const at::Tensor& expected, ReduceOp op) {
  const bool order = op == ReduceOp::MIN || op == ReduceOp::MAX;
  for (int64_t i = 0; i < actual.numel(); ++i) {
    const T a = actual.const_data_ptr<T>()[i], e = expected.const_data_ptr<T>()[i];
    const auto da = static_cast<double>(a), de = static_cast<double>(e);
    if (std::memcmp(&a, &e, sizeof a) == 0 || (std::isnan(da) && std::isnan(de)) || (order && da == 0 && de == 0))
      continue;
    return (testing::Message() << "element " << i << " is " << da << ", not " << de
                               << (std::signbit(da) ? " (negative)" : ""))
        .GetString();
  }
  return "";
}

std::string wrong(const at::Tensor& actual, const at::Tensor& expected, ReduceOp op) {
  switch (actual.scalar_type()) {
    case at::kDouble:
      return wrong<double>(actual, expected, op);
    case at::kFloat:
      return wrong<float>(actual, expected, op);
    case at::kBFloat16:
      return wrong<c10::BFloat16>(actual, expected, op);
    case at::kHalf:
      return wrong<c10::Half>(actual, expected, op);
    default:
      return difference(actual, expected);
  }
}

template <typename T>
std::vector<T> edges() {
  using Limits = std::numeric_limits<T>;
  if constexpr (c10::is_complex<T>::value)
    return {T(0, 0), T(1, -1), T(0.1f, 3), T(-2.5f, 1e10f), T(3, -0.f)};
  else if constexpr (std::is_same_v<T, bool>)
    return {false, true};
  else if constexpr (std::is_integral_v<T>)
    return {Limits::min(), static_cast<T>(Limits::min() + 1), static_cast<T>(-1), 0, 1, 2, 7, static_cast<T>(-7),
            Limits::max()};
  else
    return {Limits::quiet_NaN(),
            Limits::infinity(),
            -Limits::infinity(),
            T(0.f),
            T(-0.f),
            Limits::max(),
            Limits::lowest(),
            Limits::min(),
            Limits::denorm_min(),
            T(1.f),
            T(-1.f),
            T(3.f),
            T(1.f + 1.f / 128.f),
            T(0.1f)};
}

// One tensor per rank, so that together they have all combinations of edges, one combination per element.
template <typename T>
std::vector<at::Tensor> combinations(at::ScalarType dtype, int ranks) {
  const auto values = edges<T>();
  int64_t count = 1;
  for (int r = 0; r < ranks; ++r) count *= static_cast<int64_t>(values.size());
  std::vector<at::Tensor> tensors;
  for (int64_t r = 0, stride = 1; r < ranks; ++r, stride *= static_cast<int64_t>(values.size())) {
    tensors.push_back(at::empty({count}, dtype));
    for (int64_t i = 0; i < count; ++i)
      tensors.back().mutable_data_ptr<T>()[i] = values[static_cast<size_t>(i / stride) % values.size()];
  }
  return tensors;
}

std::vector<at::Tensor> combinations(at::ScalarType dtype, int ranks) {
  switch (dtype) {
    case at::kDouble:
      return combinations<double>(dtype, ranks);
    case at::kFloat:
      return combinations<float>(dtype, ranks);
    case at::kBFloat16:
      return combinations<c10::BFloat16>(dtype, ranks);
    case at::kHalf:
      return combinations<c10::Half>(dtype, ranks);
    case at::kLong:
      return combinations<int64_t>(dtype, ranks);
    case at::kInt:
      return combinations<int32_t>(dtype, ranks);
    case at::kShort:
      return combinations<int16_t>(dtype, ranks);
    case at::kChar:
      return combinations<int8_t>(dtype, ranks);
    case at::kUInt64:
      return combinations<uint64_t>(dtype, ranks);
    case at::kUInt32:
      return combinations<uint32_t>(dtype, ranks);
    case at::kUInt16:
      return combinations<uint16_t>(dtype, ranks);
    case at::kBool:
      return combinations<bool>(dtype, ranks);
    case at::kComplexFloat:
      return combinations<c10::complex<float>>(dtype, ranks);
    case at::kComplexDouble:
      return combinations<c10::complex<double>>(dtype, ranks);
    default:
      return combinations<uint8_t>(dtype, ranks);
  }
}

class Values : public CommContract {};
MUSTER_COMM_CONTRACT(Values);

TEST_P(Values, EdgesInEveryTier) {
  // Only shm has tiers. Over a wire, a small tensor and a large one are enough for the gate.
  const bool thin = GetParam().backend != "shm" && !full_run();
  for (const int n : {2, 3})
    run(n, [n, thin](World& world) {
      for (const auto dtype : reducible_types()) {
        const auto by_rank = combinations(dtype, n);
        const at::Tensor& mine = by_rank[static_cast<size_t>(world.rank())];
        const int64_t count = mine.numel();
        for (const auto op : ops_of(dtype)) {
          const at::Tensor expected = reference(op, by_rank);
          at::Tensor first;
          // A small tensor takes the slot tier; repeated, it takes the tiers in place, staged, and on the heap.
          for (const int64_t bytes : {0, 8 << 10, 600 << 10, 601 << 10}) {
            if (thin && (bytes == 8 << 10 || bytes == 601 << 10)) continue;
            SCOPED_TRACE(testing::Message()
                         << c10::toString(dtype) << ", " << to_string(op) << ", " << bytes << " bytes");
            const int64_t repeats = std::max<int64_t>(1, bytes / mine.nbytes());
            at::Tensor t = mine.repeat({repeats});
            if (bytes == 601 << 10) t = world.heap().empty(t.sizes(), dtype).copy_(t);
            all_reduce(t, {.op = op});
            for (const int64_t part : {int64_t{0}, repeats - 1}) {
              const at::Tensor result = t.narrow(0, part * count, count);
              ASSERT_EQ(wrong(result, expected, op), "");
              if (!first.defined()) first = result.clone();
              EXPECT_EQ(difference(result, first), "") << "the bits differ from those of the first tier";
            }
          }
          at::Tensor everybodys = at::empty({n * count}, dtype);
          all_gather_into_tensor(everybodys, first);
          for (int r = 0; r < n; ++r)
            EXPECT_EQ(difference(everybodys.narrow(0, r * count, count), first), "")
                << "rank " << r << " has other bits";
        }
      }
    });
}

// The documented rules, with numbers.
TEST_P(Values, RoundingAndOrder) {
  run(3, [](World& world) {
    const auto reduced = [&](std::initializer_list<double> by_rank, at::ScalarType dtype, ReduceOp op) {
      at::Tensor t = at::full({9000}, std::data(by_rank)[world.rank()], dtype);
      all_reduce(t, {.op = op});
      at::Tensor one = at::full({}, std::data(by_rank)[world.rank()], dtype);
      all_reduce(one, {.op = op});
      EXPECT_TRUE(at::isclose(one, t[8999], 0, 0, /*equal_nan=*/true).item<bool>()) << one << " and " << t[8999];
      return one.item<double>();
    };
    // bfloat16 has 8 bits: 256 + 1 is 256 there, but not in the accumulator.
    EXPECT_EQ(reduced({256, 1, 1}, at::kBFloat16, ReduceOp::SUM), 258);
    EXPECT_EQ(reduced({2048, 1, 1}, at::kHalf, ReduceOp::SUM), 2050);
    // Divided before it is rounded: 771 rounds to 772 in bfloat16, and 772 / 3 would give 258.
    EXPECT_EQ(reduced({768, 1, 2}, at::kBFloat16, ReduceOp::AVG), 256);          // 257, a tie, to even
    EXPECT_EQ(reduced({65504, 65504, 65504}, at::kHalf, ReduceOp::AVG), 65504);  // the sum does not fit float16
    // In rank order.
    EXPECT_EQ(reduced({1, 1e8, -1e8}, at::kFloat, ReduceOp::SUM), 0);
    EXPECT_EQ(reduced({1e8, -1e8, 1}, at::kFloat, ReduceOp::SUM), 1);
    EXPECT_EQ(reduced({1, 1e17, -1e17}, at::kDouble, ReduceOp::SUM), 0);
    // Integers: quotients truncate, sums wrap, averages sum in 64 bits.
    EXPECT_EQ(reduced({-1, -2, -4}, at::kInt, ReduceOp::AVG), -2);
    EXPECT_EQ(reduced({1, 2, 4}, at::kByte, ReduceOp::AVG), 2);
    EXPECT_EQ(reduced({200, 200, 200}, at::kByte, ReduceOp::AVG), 200);
    EXPECT_EQ(reduced({200, 50, 10}, at::kByte, ReduceOp::SUM), 4);
    EXPECT_EQ(reduced({100, 27, 1}, at::kChar, ReduceOp::SUM), -128);
    EXPECT_EQ(reduced({2147483647, 1, 0}, at::kInt, ReduceOp::SUM), -2147483648.0);
    EXPECT_EQ(reduced({65536, 65536, 3}, at::kInt, ReduceOp::PRODUCT), 0);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
      EXPECT_TRUE(std::isnan(reduced({nan, 1, 2}, at::kFloat, op)));
      EXPECT_TRUE(std::isnan(reduced({1, nan, 2}, at::kHalf, op)));
      EXPECT_TRUE(std::isnan(reduced({1, 2, nan}, at::kBFloat16, op)));
    }
  });
}

// Every instruction set that is compiled in and that this processor has, with destinations that are separate from the
// sources, that are one of them, and with up to three destinations.
TEST(ReduceKernels, EveryInstructionSetGivesTheReference) {
  const auto targets = hwy::SupportedAndGeneratedTargets();
  EXPECT_GE(targets.size(), 1u);
  for (const int64_t target : targets) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    for (const auto dtype : reducible_types())
      for (const auto op : ops_of(dtype)) {
        const auto kernel = comm::reduce_kernel(dtype, op);
        ASSERT_NE(kernel, nullptr);
        for (const int n : {1, 2, 3, 4, 6, 8}) {
          SCOPED_TRACE(testing::Message() << hwy::TargetName(target) << ", " << c10::toString(dtype) << ", "
                                          << to_string(op) << ", " << n << " sources");
          for (const int64_t count : {0, 1, 7, 8, 31, 33, 64, 65, 1025, 4099})
            for (const int64_t offset : {0, 1}) {
              // -1: the destination is separate from the sources; else it is that source.
              for (int in_place = -1; in_place < (count == 65 ? n : 1); ++in_place) {
                std::vector<at::Tensor> sources;
                std::vector<const std::byte*> source_bytes;
                for (int r = 0; r < n; ++r) {
                  sources.push_back(tile(table_of(dtype, r), count, count + offset).narrow(0, offset, count));
                  source_bytes.push_back(static_cast<const std::byte*>(sources.back().const_data_ptr()));
                }
                const at::Tensor beside = tile(table_of(dtype, 7), 0, count + 2),
                                 others = tile(table_of(dtype, 7), 0, 2 * count);
                const at::Tensor target_tensor =
                    in_place < 0 ? beside.narrow(0, 1, count) : sources[static_cast<size_t>(in_place)];
                const at::Tensor expected = reduced_table(dtype, op, n);
                std::vector<std::byte*> destinations = {static_cast<std::byte*>(target_tensor.mutable_data_ptr())};
                for (int64_t other = 0; other < (count + offset) % 3; ++other)
                  destinations.push_back(
                      static_cast<std::byte*>(others.narrow(0, other * count, count).mutable_data_ptr()));
                kernel(destinations, source_bytes, static_cast<size_t>(count));
                ASSERT_EQ(difference(target_tensor, expected, count + offset), "")
                    << count << " elements, in place " << in_place;
                for (int64_t other = 0; other + 1 < static_cast<int64_t>(destinations.size()); ++other)
                  ASSERT_EQ(difference(others.narrow(0, other * count, count), expected, count + offset), "");
                EXPECT_EQ(difference(beside.narrow(0, 0, 1), table_of(dtype, 7), 0), "")
                    << "wrote before the destination";
                EXPECT_EQ(difference(beside.narrow(0, count + 1, 1), table_of(dtype, 7), count + 1), "")
                    << "wrote after it";
              }
            }
        }
        for (const int n : {2, 3}) {
          const auto by_rank = combinations(dtype, n);
          const at::Tensor result = at::empty({by_rank[0].numel()}, dtype);
          std::vector<const std::byte*> sources;
          for (const auto& t : by_rank) sources.push_back(static_cast<const std::byte*>(t.const_data_ptr()));
          const std::vector<std::byte*> destination = {static_cast<std::byte*>(result.mutable_data_ptr())};
          kernel(destination, sources, static_cast<size_t>(result.numel()));
          ASSERT_EQ(wrong(result, reference(op, by_rank), op), "")
              << hwy::TargetName(target) << ", " << c10::toString(dtype) << ", " << to_string(op) << ", " << n;
        }
      }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

TEST(ReduceKernels, NoneForWhatIsNotReduced) {
  for (const auto dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kQInt8, at::ScalarType::Undefined})
    for (const auto op : kAllOps) EXPECT_EQ(comm::reduce_kernel(dtype, op), nullptr);
  for (const auto dtype : reducible_types())
    for (const auto op : kAllOps) {
      const auto& ops = ops_of(dtype);
      const bool has = std::find(ops.begin(), ops.end(), op) != ops.end() ||
                       (op == ReduceOp::PREMUL_SUM && !c10::isIntegralType(dtype, true));
      EXPECT_EQ(comm::reduce_kernel(dtype, op) != nullptr, has) << c10::toString(dtype) << ", " << to_string(op);
    }
}

}  // namespace
}  // namespace muster::test
