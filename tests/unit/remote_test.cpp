// Partitioners and reducers by themselves: what they cut, copy and combine.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "muster/remote/on_rank.h"
#include "muster/remote/parallelize.h"
#include "muster/rpc/modules.h"
#include "support/ranks.h"

namespace muster {
namespace {

using at::Tensor;
using test::contains;
using test::message_of;

struct Batch {
  Tensor data, target;
  double weight = 1;
  auto tree() { return std::tie(data, target); }
  MSGPACK_DEFINE(data, target, weight);
};
struct Sealed {
  Tensor data;
  MSGPACK_DEFINE(data);
};

// The sizes of dimension `dim` in each part.
template <typename Parts>
std::vector<int64_t> rows(const Parts& parts, int64_t dim = 0) {
  std::vector<int64_t> sizes;
  for (const auto& part : parts) sizes.push_back(std::get<0>(part.arguments).size(dim));
  return sizes;
}

DimOptions four(DimOptions options = {}) {
  options.workers = {0, 1, 2, 3};
  return options;
}

TEST(RemotePartition, RowsAndWhatIsLeftOver) {
  const DimPartitioner split(0, four());
  const auto sizes = [&](int64_t n) { return rows(split(at::rand({n, 2}))); };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes(0), Sizes());
  EXPECT_EQ(sizes(1), Sizes{1});
  EXPECT_EQ(sizes(3), (Sizes{1, 1, 1}));
  EXPECT_EQ(sizes(4), (Sizes{1, 1, 1, 1}));
  EXPECT_EQ(sizes(7), (Sizes{1, 1, 1, 4}));
  EXPECT_EQ(sizes(8), (Sizes{2, 2, 2, 2}));
  EXPECT_EQ(sizes(10), (Sizes{2, 2, 2, 4}));
  const DimPartitioner single(0, four({.exclusive = true}));
  EXPECT_EQ(rows(single(at::rand({6}))), Sizes(6, 1));
  EXPECT_EQ(single(at::rand({0})).size(), 0u);
}

TEST(RemotePartition, TogetherThePartsAreTheWhole) {
  const Tensor x = at::arange(5 * 7 * 9).reshape({5, 7, 9});
  for (const int64_t dim : {0, 1, 2, -1, -2, -3}) {
    for (const bool exclusive : {false, true}) {
      std::vector<Tensor> parts;
      for (auto& part : DimPartitioner(dim, four({.exclusive = exclusive}))(x)) {
        EXPECT_TRUE(std::get<0>(part.arguments).is_alias_of(x));  // views, not copies
        parts.push_back(std::get<0>(part.arguments));
      }
      EXPECT_EQ(parts.size(), exclusive ? static_cast<size_t>(x.size(dim)) : 4u);
      EXPECT_TRUE(at::equal(at::cat(parts, dim), x)) << dim;
    }
    const auto rows = DimPartitioner(dim, four({.exclusive = true, .keepdim = false}))(x);
    for (size_t i = 0; i < rows.size(); ++i)
      EXPECT_TRUE(at::equal(std::get<0>(rows[i].arguments), x.select(dim, static_cast<int64_t>(i))));
  }
}

TEST(RemotePartition, TensorsInsideOfThingsAreSplitAndTheRestGoesToAll) {
  const Tensor x = at::arange(4), y = at::arange(8).reshape({4, 2});
  const auto shared = std::make_shared<Tensor>(y);
  const auto parts = DimPartitioner(0, four())(
      x, std::map<std::string, Tensor>{{"y", y}}, std::tuple<int, std::vector<Tensor>>{7, {x, y}},
      std::optional<std::pair<Tensor, std::array<Tensor, 1>>>({x, {y}}), Batch{.data = x, .target = y, .weight = 3},
      Sealed{x}, Whole<std::vector<Tensor>>({x, y}), shared, Tensor(), std::optional<Tensor>(), std::string("all"));
  ASSERT_EQ(parts.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const auto at = static_cast<int64_t>(i);
    const Tensor row = x.slice(0, at, at + 1), row2 = y.slice(0, at, at + 1);
    const auto& [a, map, tuple, pair, batch, sealed, whole, pointer, undefined, none, word] = parts[i].arguments;
    EXPECT_TRUE(at::equal(a, row));
    EXPECT_TRUE(at::equal(map.at("y"), row2));
    EXPECT_EQ(std::get<0>(tuple), 7);
    EXPECT_TRUE(at::equal(std::get<1>(tuple)[1], row2));
    EXPECT_TRUE(at::equal(pair->first, row));
    EXPECT_TRUE(at::equal(pair->second[0], row2));
    EXPECT_TRUE(at::equal(batch.target, row2));
    EXPECT_EQ(batch.weight, 3);
    EXPECT_TRUE(at::equal(sealed.data, x));
    EXPECT_TRUE(at::equal((*whole)[1], y));
    EXPECT_TRUE(at::equal(*pointer, row2));
    EXPECT_FALSE(undefined.defined());
    EXPECT_FALSE(none.has_value());
    EXPECT_EQ(word, "all");
  }
  EXPECT_TRUE(at::equal(*shared, y));  // the caller's tensor is unchanged
}

TEST(RemotePartition, AModulesStateIsOneThing) {
  rpc::ModuleState state;
  state.parameters.emplace_back("weight", at::ones({3, 3}));
  const auto parts = DimPartitioner(0, four())(at::rand({4}), state);
  ASSERT_EQ(parts.size(), 4u);
  for (const auto& part : parts) EXPECT_EQ(std::get<1>(part.arguments).parameters[0].second.size(0), 3);
}

TEST(RemotePartition, WhatCannotBeSplitIsSaid) {
  const DimPartitioner split(1, four());
  const auto sizes = message_of<InvalidArgument>([&] { split(at::rand({2, 3}), 5, std::vector{at::rand({2, 4})}); });
  EXPECT_CONTAINS(sizes, "argument 2: expected 3 rows in dimension 1, as one of argument 0 has, got 4");
  EXPECT_CONTAINS(sizes, "muster::Whole");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { split(at::rand({2})); }), "1 dimension, which");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { DimPartitioner(0, four())(at::rand({})); }), "0 dimensions");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { DimPartitioner(-3, four())(at::rand({2, 2})); }), "dimension -3");
  EXPECT_CONTAINS(message_of<InvalidArgument>([] { dim_partitioner(0, {.keepdim = false}); }), ".exclusive = true");
}

TEST(RemotePartition, GradientsFlowThroughTheParts) {
  const Tensor x = at::ones({5, 2}).requires_grad_();
  Tensor sum = at::zeros({});
  int64_t factor = 1;
  for (const auto& part : DimPartitioner(0, four())(x)) {
    EXPECT_TRUE(std::get<0>(part.arguments).requires_grad());
    sum = sum + factor++ * std::get<0>(part.arguments).sum();
  }
  sum.backward();
  EXPECT_TRUE(at::equal(x.grad().select(1, 0), at::tensor({1.f, 2.f, 3.f, 4.f, 4.f})));
}

// --- reducers ---

TEST(RemoteReduce, TensorsAsTorchDoes) {
  std::vector<Tensor> parts;
  for (int i = 0; i < 5; ++i) parts.push_back(at::rand({3, 4}));
  EXPECT_TRUE(at::equal(mean_reducer(parts), at::mean(at::stack(parts), 0)));
  EXPECT_TRUE(at::equal(sum_reducer(parts), at::sum(at::stack(parts), 0)));
  EXPECT_TRUE(at::equal(sum_reducer(std::vector{at::ones({2}, at::kLong), at::ones({2}, at::kLong)}),
                        at::full({2}, 2, at::kLong)));
  EXPECT_EQ(sum_reducer(std::vector{at::ones({2}, at::kInt), at::ones({2}, at::kInt)}).scalar_type(), at::kInt);
  EXPECT_FALSE(sum_reducer(std::vector<Tensor>(2)).defined());
  const Tensor a = at::ones({2}).requires_grad_(), b = at::ones({2}).requires_grad_();
  mean_reducer(std::vector{a, b}).sum().backward();
  EXPECT_TRUE(at::equal(b.grad(), at::full({2}, 0.5)));
}

TEST(RemoteReduce, ElementByElement) {
  EXPECT_EQ(mean_reducer(std::vector{1.0, 2.0, 6.0}), 3);
  EXPECT_EQ(sum_reducer(std::vector<int16_t>{1, 2, 6}), 9);
  const auto ones = [](double n) { return at::ones({2}, at::kDouble) * n; };
  using Both = std::tuple<double, std::vector<Tensor>, std::map<std::string, Tensor>>;
  const auto [loss, gradients, more] = mean_reducer(
      std::vector<Both>{{1, {ones(1), ones(2)}, {{"a", ones(3)}}}, {3, {ones(5), ones(4)}, {{"a", ones(7)}}}});
  EXPECT_EQ(loss, 2);
  EXPECT_TRUE(at::equal(gradients[0], ones(3)));
  EXPECT_TRUE(at::equal(gradients[1], ones(3)));
  EXPECT_TRUE(at::equal(more.at("a"), ones(5)));
  const auto [first, second] = sum_reducer(
      std::vector<std::pair<std::optional<Tensor>, std::array<float, 2>>>{{ones(1), {1, 2}}, {ones(2), {3, 4}}});
  EXPECT_TRUE(at::equal(*first, ones(3)));
  EXPECT_EQ(second, (std::array<float, 2>{4, 6}));
  const Batch batch = sum_reducer(std::vector<Batch>{{ones(1), ones(2), 5}, {ones(3), ones(4), 6}});
  EXPECT_TRUE(at::equal(batch.data, ones(4)));
  EXPECT_TRUE(at::equal(batch.target, ones(6)));
  EXPECT_EQ(batch.weight, 5);  // not in tree(): of part 0
  EXPECT_TRUE(at::equal(*sum_reducer(std::vector{std::make_shared<Tensor>(ones(1)), std::make_shared<Tensor>(ones(1))}),
                        ones(2)));
}

TEST(RemoteReduce, WhatIsNotAlikeIsSaid) {
  const auto problem = [](auto results) { return message_of<InvalidArgument>([&] { mean_reducer(results); }); };
  using Tensors = std::vector<Tensor>;
  using Map = std::map<std::string, Tensor>;
  const Tensor one = at::ones({1}), two = at::ones({2});
  EXPECT_CONTAINS(problem(Tensors()), "no results");
  EXPECT_CONTAINS(problem(Tensors{one, one, two}), "sizes ([2] instead of [1]), the result of part 2 differs");
  EXPECT_CONTAINS(problem(Tensors{one, one.to(at::kDouble)}), "dtype (Double instead of Float)");
  EXPECT_CONTAINS(problem(Tensors{one, Tensor()}), "whether a tensor is defined");
  EXPECT_CONTAINS(problem(Tensors{one.to(at::kLong), one.to(at::kLong)}), "integers (Long)");
  EXPECT_CONTAINS(problem(std::vector<Tensors>{{one}, {one}, {one, one}}), "number of elements, the result of part 2");
  EXPECT_CONTAINS(problem(std::vector<Map>{{{"a", one}}, {{"b", one}}}), "the keys, the result of part 1");
  EXPECT_CONTAINS(problem(std::vector<std::optional<Tensor>>{one, {}}), "whether there is a value");
}

TEST(RemoteErrors, KeepTheirKindAndSayThePart) {
  const auto named = [](auto error) { return detail::error_of_part(std::make_exception_ptr(error), 1, 3); };
  try {
    std::rethrow_exception(named(PeerLost(4, 77, "gone", "look")));
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.rank(), 4);
    EXPECT_EQ(lost.pid(), 77);
    EXPECT_STREQ(lost.what(), "gone [part 1 of 3]. look");
  }
  try {
    std::rethrow_exception(named(TimeoutError("late", {2})));
  } catch (const TimeoutError& late) {
    EXPECT_EQ(late.missing(), std::vector{2});
    EXPECT_STREQ(late.what(), "late [part 1 of 3]");
  }
  EXPECT_CONTAINS(message_of<Aborted>([&] { std::rethrow_exception(named(Aborted("over"))); }), "[part 1 of 3]");
  struct Special : TimeoutError {
    using TimeoutError::TimeoutError;
  };
  EXPECT_THROW(std::rethrow_exception(named(Special("mine"))), Special);
  EXPECT_THROW(std::rethrow_exception(named(std::logic_error("other"))), std::logic_error);
  const auto alone = std::make_exception_ptr(Aborted("over"));
  EXPECT_EQ(detail::error_of_part(alone, 0, 1), alone);  // there is only one part: the error is unchanged
}

TEST(OnRank, RunsWhereItShall) {
  run_threads(3, [](World& world) {
    const int rank = world.rank();
    const auto twice = [](int x) { return 2 * x; };
    EXPECT_EQ(on_rank({0, 2}, twice)(4), rank == 1 ? std::nullopt : std::optional(8));
    EXPECT_EQ(not_on_rank({0, 2}, twice)(4), rank == 1 ? std::optional(8) : std::nullopt);
    EXPECT_EQ(rank_all(twice)(1), 2);
    EXPECT_EQ(on_rank({}, twice)(1), std::nullopt);
    EXPECT_EQ(on_rank({7, -1}, twice)(1), std::nullopt);  // neither rank exists
    int ran = 0;
    EXPECT_EQ(rank_zero_only([&] { ++ran; })(), rank == 0);
    EXPECT_EQ(ran, rank == 0);
    EXPECT_EQ(rank_non_zero_only([&](int n) { ran = n; })(5), rank != 0);
    EXPECT_EQ(ran, rank == 0 ? 1 : 5);
    const auto only = rank_zero_only([](std::unique_ptr<int> x) { return x; })(std::make_unique<int>(3));
    EXPECT_EQ(only.has_value(), rank == 0);
    const auto fails = rank_zero_only([]() -> int { throw std::out_of_range("here"); });
    if (rank == 0) {
      EXPECT_THROW(fails(), std::out_of_range);
    } else {
      EXPECT_FALSE(fails());
    }
    EXPECT_EQ(get_world_info().worker_name, "worker" + std::to_string(rank));  // RPC is not running
    EXPECT_EQ(get_local_world_size(), 3);
    EXPECT_EQ(is_local_leader(), rank == 0);
  });
  EXPECT_THROW(rank_zero_only([] {})(), Aborted);
}

}  // namespace
}  // namespace muster
