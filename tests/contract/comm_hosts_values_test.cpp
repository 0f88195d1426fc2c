// Values of collectives over several hosts (faked on one machine): which steps they take, and in which blocks, does not
// show.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <iterator>
#include <optional>
#include <utility>

#include "base/text.h"
#include "contract/comm_hosts_fixture.h"
#include "support/collective_cases.h"

namespace muster::test::faked_hosts {
namespace {

// Every collective with every root, on hosts of all kinds. Whole numbers, so that the order of sums does not matter.
TEST(Hosts, EveryCollectiveOnEveryShape) {
  const std::vector<Hosts> shapes = {
      {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"a", "b", "b", "b"}, {"a", "b", "c"}, {"a", "b", "b", "c", "a"}};
  for (const auto& hosts : shapes)
    run_on(hosts, [&](World& world) {
      int64_t number = 0;
      for (const auto& subject : collectives())
        for (const int64_t count : {0, 1, 5, 3000, 70'000})
          for (int root = 0; root < world.world_size(); ++root) {
            ++number;
            const Case c{.world = world,
                         .group = world.group(),
                         .dtype = number % 2 ? at::kLong : at::kInt,
                         .op = subject.reduces ? ops_of(at::kLong)[static_cast<size_t>(number) % 4] : ReduceOp::SUM,
                         .count = count,
                         .kind = kKinds[static_cast<size_t>(number) % std::size(kKinds)],
                         .root = root,
                         .async = number % 3 == 0,
                         .shift = number * 17};
            SCOPED_TRACE(testing::Message() << join(hosts) << ": " << subject.name << ", " << c);
            subject.start(c)();
          }
    });
}

// Tensors of several blocks and a part of one, over hosts of all kinds and over a wire alone.
TEST(Hosts, LargeTensorsMoveInBlocks) {
  const std::vector<std::pair<Hosts, std::string>> shapes = {{{"a", "a", "b", "b"}, "auto"},
                                                             {{"a", "b", "b", "c", "a"}, "auto"},
                                                             {{"a", "b"}, "gloo"},
                                                             {{"a", "a", "a"}, "gloo"}};
  for (const auto& [hosts, backend] : shapes)
    run_on(
        hosts,
        [&](World& world) {
          int64_t number = 0;
          for (const char* const name : {"all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
                                         "reduce_scatter", "reduce_scatter_tensor"})
            for (int root = 0; root < world.world_size(); ++root) {
              ++number;
              const auto dtype = number % 2 ? at::kInt : at::kLong;
              const Case c{.world = world,
                           .group = world.group(),
                           .dtype = dtype,
                           .op = ops_of(dtype)[static_cast<size_t>(number) % 4],
                           .count = (backend == "gloo" ? 3 : 1) * 700'001,
                           .kind = kKinds[static_cast<size_t>(number) % std::size(kKinds)],
                           .root = root,
                           .async = number % 3 == 0,
                           .shift = number * 17};
              SCOPED_TRACE(testing::Message() << join(hosts) << ": " << name << ", " << c);
              collective(name).start(c)();
            }
        },
        options_of(backend));
}

// All parts are in one tensor, or in one each, as each rank likes; the rank's own tensor may be a part of it.
TEST(Hosts, GathersAndScattersWhereTheTensorsLie) {
  const std::vector<Hosts> shapes = {{"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"a", "b", "b", "c"}, {"a", "b"}};
  for (const auto& hosts : shapes)
    run_on(hosts, [&](World& world) {
      const int n = world.world_size(), rank = world.rank();
      for (const int64_t count : {0, 3, 50'000}) {
        SCOPED_TRACE(testing::Message() << join(hosts) << ", " << count);
        std::vector<at::Tensor> parts, outputs;
        for (int r = 0; r < n; ++r) {
          parts.push_back(at::arange(count, at::kLong) + 100'000 * r);
          outputs.push_back(at::zeros({count}, at::kLong));
        }
        const at::Tensor expected = at::cat(parts), all = at::zeros({n * count}, at::kLong);
        const auto part = [&](const at::Tensor& of, int r) { return of.narrow(0, r * count, count); };
        for (const int place : {rank, (rank + 1) % n}) {  // within the output
          all.fill_(-1);
          part(all, place).copy_(parts[static_cast<size_t>(rank)]);
          all_gather_into_tensor(all, part(all, place));
          EXPECT_TRUE(at::equal(all, expected)) << place;
        }
        all.fill_(-1);
        if (rank % 2 == 0)
          all_gather_into_tensor(all, parts[static_cast<size_t>(rank)]);
        else
          all_gather(outputs, parts[static_cast<size_t>(rank)]);
        EXPECT_TRUE(at::equal(rank % 2 == 0 ? all : at::cat(outputs), expected));

        const at::Tensor sum = parts[static_cast<size_t>(rank)] * n + n * (n - 1) / 2;
        const at::Tensor inputs = expected + rank, before = inputs.clone();
        const at::Tensor own = part(inputs, rank), output = at::zeros({count}, at::kLong);
        if (rank % 2 == 0)
          reduce_scatter_tensor(output, inputs);
        else
          reduce_scatter(output, inputs.chunk(n));
        EXPECT_TRUE(at::equal(output, sum));
        EXPECT_TRUE(at::equal(inputs, before));
        reduce_scatter_tensor(own, inputs);
        EXPECT_TRUE(at::equal(own, sum));
        own.copy_(part(before, rank));
        EXPECT_TRUE(at::equal(inputs, before));
      }
    });
}

// Sums whose steps have other dtypes than the tensor, or other memory, in several blocks.
TEST(Hosts, LargeSumsInOtherDtypes) {
  run_on({"a", "b", "b", "a"}, [](World& world) {
    const int64_t count = 1'300'003;
    const at::Tensor numbers = at::arange(count, at::kFloat).remainder(61);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
      for (const auto between : {std::optional<at::ScalarType>(), std::optional(at::kHalf)})
        for (const auto op : {ReduceOp::SUM, ReduceOp::AVG})
          for (const int root : {-1, 1, 3}) {
            SCOPED_TRACE(testing::Message() << c10::toString(dtype) << ", between hosts "
                                            << (between ? c10::toString(*between) : "the same") << ", " << to_string(op)
                                            << ", root " << root);
            const at::Tensor own = (numbers + world.rank()).to(dtype), t = own.clone();
            if (root < 0)
              all_reduce(t, {.op = op, .between_hosts = between});
            else
              reduce(t, root, {.op = op, .between_hosts = between});
            const at::Tensor sum = numbers * 4 + 6;
            const at::Tensor expected = op == ReduceOp::SUM ? sum : sum / 4;
            EXPECT_TRUE(at::equal(t, root < 0 || root == world.rank() ? expected.to(dtype) : own));
          }
  });
}

TEST(Hosts, SumsOfHalvesAreRoundedOnceAndATimeoutMayBeEndless) {
  run_on({"a", "a", "b", "b"}, [](World& world) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::PREMUL_SUM}) {
      const at::Tensor t = at::full({3}, world.rank() < 2 ? 40'000 : -40'000, at::kHalf);
      all_reduce(t, {.op = op, .timeout = std::chrono::milliseconds::max()});
      EXPECT_TRUE(t.eq(0).all().item<bool>());  // not inf - inf
    }
  });
}

// Hosts exchange their sums in another dtype, if all leaders say so; on one host, nothing is converted.
TEST(Hosts, SumsTravelInAnotherDtype) {
  const float exact = 1 + 1.0f / 1024, rounded = 1;  // bfloat16 has 8 bits
  const auto reduced = [&](World& world, bool to_one, ReduceOp op, at::ScalarType dtype) {
    const at::Tensor t = at::full({5000}, world.rank() == 0 ? exact : 0, dtype);
    const ReduceOptions options{.op = op, .between_hosts = at::kBFloat16};
    to_one ? reduce(t, 3, options) : all_reduce(t, options);
    EXPECT_TRUE(t.eq(t[0]).all().item<bool>());
    return t[0].item<double>() * (op == ReduceOp::AVG ? world.world_size() : 1);
  };
  run_on({"a", "a", "b", "b"}, [&](World& world) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG})
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        EXPECT_EQ(reduced(world, false, op, dtype), rounded);
        const double at_root = reduced(world, true, op, dtype);
        if (world.rank() == 3) {
          EXPECT_EQ(at_root, rounded);
        }
      }
    const at::Tensor whole = at::full({3}, 257, at::kLong);
    all_reduce(whole, {.between_hosts = at::kBFloat16});
    EXPECT_EQ(whole[0].item<int64_t>(), 1028);
  });
  run_on({"a", "b"}, [&](World&) {
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { all_reduce(at::ones({3}), {.between_hosts = at::kInt}); }), "Int");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { send(at::ones({3}), 0, {.tag = (1 << 28) - 1}); }), "tag");
  });
  run_on({"a", "a"}, [&](World& world) { EXPECT_EQ(reduced(world, false, ReduceOp::SUM, at::kFloat), exact); });
  run_on({"a", "b"}, [&](World& world) {
    ReduceOptions options;
    if (world.rank() == 1) options.between_hosts = at::kHalf;
    EXPECT_CONTAINS(message_of<Mismatch>([&] { all_reduce(at::ones({100}), options); }), "Half");
  });
}

// A reduce between two hosts goes to its root block by block; a part of a block is left.
TEST(Hosts, ReduceOfManyBlocks) {
  run_on({"a", "b"}, [](World& world) {
    const int64_t count = 3 * (int64_t{2} << 20) / 4 + 77;
    const at::Tensor numbers = at::arange(count, at::kInt);
    for (const int root : {0, 1}) {
      const at::Tensor t = numbers + world.rank() * 1'000'000;
      reduce(t, root);
      EXPECT_TRUE(at::equal(t, world.rank() == root ? numbers * 2 + 1'000'000 : numbers + world.rank() * 1'000'000));
    }
    for (const int root : {0, 1}) {
      const at::Tensor t = at::full({count}, world.rank() == 0 ? 1e8F : 1.0F);
      reduce(t, root, {.op = ReduceOp::AVG});
      if (world.rank() == root) {
        EXPECT_TRUE(t.eq(5e7F).all().item<bool>());
      }
    }
  });
}

// Sums of floats have the same bits on every rank and in a second run, and are close to the sum in the order of ranks.
TEST(Hosts, FloatsHaveTheSameBitsEverywhere) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat})
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT})
      run_on({"a", "b", "a", "b", "b"}, [&](World& world) {
        SCOPED_TRACE(testing::Message() << c10::toString(dtype) << ", " << to_string(op));
        at::Tensor before;
        for (const int64_t count : {3, 40'000, 40'000}) {
          const at::Tensor t = tile(table_of(dtype, world.rank()), 0, count);
          all_reduce(t, {.op = op});
          const at::Tensor all = at::zeros({5 * count}, dtype);
          all_gather_into_tensor(all, t);
          for (int r = 0; r < 5; ++r) ASSERT_TRUE(at::equal(all.narrow(0, r * count, count), t)) << "rank " << r;
          if (before.defined() && before.numel() == count) {
            EXPECT_TRUE(at::equal(before, t)) << "another run, other bits";
          }
          before = t;
          const auto wide = dtype == at::kComplexFloat ? at::kComplexDouble : at::kDouble;
          const double off =
              (t.to(wide) - tile(reduced_table(dtype, op, 5), 0, count).to(wide)).abs().max().item<double>();
          EXPECT_LE(off, dtype == at::kBFloat16 ? 0.25 : dtype == at::kHalf ? 0.03 : 1e-4);
        }
      });
}

}  // namespace
}  // namespace muster::test::faked_hosts
