// The forms of operations beyond the grid of comm_collectives_test: unequal and listed parts, batches, sparse tensors,
// factors, receives from any source, call sites, and tensors larger than 32 bits can count. Works are in
// comm_works_test.cpp.

// GCC 12 with a sanitizer wrongly reports an uninitialised guard in ivalue::Future::addCallback.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <functional>

#include "base/text.h"
#include "comm/core/backend.h"
#include "contract/comm_forms_fixture.h"
#include "muster/comm/collectives.h"
#include "support/asleep.h"
#include "support/patience.h"
#include "support/patterns.h"

namespace muster::test::operation_forms {
namespace {

MUSTER_COMM_CONTRACT(Forms);

// The size of rank r's part in an operation with unequal parts: 0, 1, and some sizes of every tier.
int64_t part_size(int rank) { return std::vector<int64_t>{7, 0, 30'000, 1, 4099}[static_cast<size_t>(rank) % 5]; }

at::Tensor strided(const at::Tensor& values) {  // the same values, every other element of a larger tensor
  const at::Tensor wide = at::zeros({values.numel(), 2}, values.scalar_type());
  wide.select(1, 1).copy_(values);
  return wide.select(1, 1);
}

TEST_P(Forms, AllGatherOfUnequalParts) {
  for (const int n : {1, 2, 4})
    run(n, [n](World& world) {
      for (const bool async : {false, true}) {
        std::vector<at::Tensor> outputs;
        for (int r = 0; r < n; ++r)
          outputs.push_back(r % 2 ? strided(at::zeros({part_size(r)})) : at::zeros({part_size(r)}));
        const at::Tensor mine = tile(table_of(at::kFloat, world.rank()), 3, part_size(world.rank()));
        if (async)
          all_gather_async(outputs, mine).wait();
        else
          all_gather(outputs, mine);
        for (int r = 0; r < n; ++r)
          EXPECT_EQ(difference(outputs[static_cast<size_t>(r)], table_of(at::kFloat, r), 3), "") << r;
      }
    });
}

TEST_P(Forms, ReduceScatterOfUnequalParts) {
  for (const int n : {2, 3, 5})
    run(n, [n](World& world) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX}) {
        std::vector<at::Tensor> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(tile(table_of(at::kFloat, world.rank()), r, part_size(r)));
        const at::Tensor output = at::zeros({part_size(world.rank())});
        reduce_scatter(output, inputs, {.op = op});
        EXPECT_EQ(difference(output, reduced_table(at::kFloat, op, n), world.rank()), "");
        for (int r = 0; r < n; ++r)
          EXPECT_EQ(difference(inputs[static_cast<size_t>(r)], table_of(at::kFloat, world.rank()), r), "");
      }
    });
}

// Calls fn(count, zeros) with small and large counts; zeros(elements) are in ordinary memory or on the heap.
using Zeros = std::function<at::Tensor(int64_t elements)>;
void for_counts_and_memories(World& world, const std::function<void(int64_t count, const Zeros& zeros)>& fn) {
  for (const int64_t count : {5, 3'000, 40'000})
    for (const bool on_heap : {false, true}) {
      SCOPED_TRACE(testing::Message() << count << (on_heap ? " on the heap" : ""));
      fn(count, [&](int64_t elements) { return on_heap ? world.heap().zeros({elements}) : at::zeros({elements}); });
    }
}

// Outputs may lie where the input does.
TEST_P(Forms, OutputsMayOverlapTheInput) {
  constexpr int kRanks = 3;
  run(kRanks, [](World& world) {
    const int me = world.rank();
    for_counts_and_memories(world, [&](int64_t count, const Zeros& zeros) {
      const at::Tensor whole = zeros(kRanks * count);
      const auto part = [&](int r) { return whole.narrow(0, r * count, count); };
      for (int place = 0; place < kRanks; ++place) {  // of the input, on rank 0
        part((me + place) % kRanks).fill_(me + 1);
        all_gather_into_tensor(whole, part((me + place) % kRanks));
        for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(part(r).eq(r + 1).all().item<bool>()) << place << ", part " << r;

        for (int r = 0; r < kRanks; ++r) part(r).fill_(10 * me + r);
        const at::Tensor output = part((me + place) % kRanks);
        reduce_scatter_tensor(output, whole);
        EXPECT_TRUE(output.eq(30 + kRanks * me).all().item<bool>()) << place;
      }
      for (int r = 0; r < kRanks; ++r) part(r).fill_(10 * me + r);
      all_to_all_single(whole, whole);
      for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(part(r).eq(10 * r + me).all().item<bool>()) << "part " << r;
      // Unequal parts: one element more to the next rank, and one less to the one after it.
      std::vector<int64_t> to(kRanks, count), from(kRanks, count);
      ++to[static_cast<size_t>((me + 1) % kRanks)];
      --to[static_cast<size_t>((me + 2) % kRanks)];
      ++from[static_cast<size_t>((me + 2) % kRanks)];
      --from[static_cast<size_t>((me + 1) % kRanks)];
      int64_t at = 0;
      for (int r = 0; r < kRanks; at += to[static_cast<size_t>(r)], ++r)
        whole.narrow(0, at, to[static_cast<size_t>(r)]).fill_(10 * me + r);
      all_to_all_single(whole, whole, {.output_splits = from, .input_splits = to});
      at = 0;
      for (int r = 0; r < kRanks; at += from[static_cast<size_t>(r)], ++r)
        EXPECT_TRUE(whole.narrow(0, at, from[static_cast<size_t>(r)]).eq(10 * r + me).all().item<bool>()) << r;
    });
  });
}

// Shifted by one element, so that what comes overwrites what has yet to go.
TEST_P(Forms, OutputsMayBeTheInputShifted) {
  constexpr int kRanks = 3;
  run(kRanks, [](World& world) {
    const int me = world.rank();
    for_counts_and_memories(world, [&](int64_t count, const Zeros& zeros) {
      const int64_t all = kRanks * count;
      const auto line_of = [&](int r) { return at::arange(all + 1, at::kFloat).remainder(50) + 100 * r; };
      const at::Tensor memory = zeros(all + 1);
      const at::Tensor whole = memory.narrow(0, 0, all), later = memory.narrow(0, 1, all);
      const auto part = [&](const at::Tensor& of, int r) { return of.narrow(0, r * count, count); };

      memory.copy_(line_of(me));
      all_gather_into_tensor(whole, part(later, 0));
      for (int r = 0; r < kRanks; ++r)
        EXPECT_TRUE(at::equal(part(whole, r), line_of(r).narrow(0, 1, count))) << "part " << r;

      memory.copy_(line_of(me));
      reduce_scatter_tensor(part(later, 0), whole);
      at::Tensor sum = at::zeros({count});
      for (int r = 0; r < kRanks; ++r) sum += part(line_of(r), me);
      EXPECT_TRUE(at::equal(part(later, 0), sum));

      memory.copy_(line_of(me));
      all_to_all_single(later, whole);
      for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(at::equal(part(later, r), part(line_of(r), me))) << "part " << r;

      // Parts of different sizes: rank r's has r elements more.
      const auto begin = [&](int r) { return r * (count - 2) + r * (r - 1) / 2; };
      const auto unequal = [&](const at::Tensor& of) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < kRanks; ++r) parts.push_back(of.narrow(0, begin(r), count - 2 + r));
        return parts;
      };
      memory.copy_(line_of(me));
      all_gather(unequal(whole), memory.narrow(0, 2, count - 2 + me));
      for (int r = 0; r < kRanks; ++r)
        EXPECT_TRUE(at::equal(unequal(whole)[static_cast<size_t>(r)], line_of(r).narrow(0, 2, count - 2 + r))) << r;

      memory.copy_(line_of(me));
      const at::Tensor mine = memory.narrow(0, 1, count - 2 + me);
      reduce_scatter(mine, unequal(whole));
      sum = at::zeros({count - 2 + me});
      for (int r = 0; r < kRanks; ++r) sum += line_of(r).narrow(0, begin(me), count - 2 + me);
      EXPECT_TRUE(at::equal(mine, sum));

      // Into another rank's part, of two ranks that have equal ones.
      const auto two_equal = [&](const at::Tensor& of) {
        return std::vector<at::Tensor>{of.narrow(0, 0, count), of.narrow(0, count, count),
                                       of.narrow(0, 2 * count, count - 1)};
      };
      memory.copy_(line_of(me));
      const at::Tensor there = me < 2 ? two_equal(memory)[static_cast<size_t>(1 - me)] : two_equal(memory)[2];
      reduce_scatter(there, two_equal(memory));
      sum = at::zeros_like(there);
      for (int r = 0; r < kRanks; ++r) sum += two_equal(line_of(r))[static_cast<size_t>(me)];
      EXPECT_TRUE(at::equal(there, sum));
    });
  });
}

// A rank whose parts are equal among ranks whose parts are not.
TEST_P(Forms, UnequalOnSomeRanksIsMismatch) {
  run(2, [](World& world) {
    const auto message = message_of<Mismatch>([&] {
      all_gather({at::zeros({6}), at::zeros({world.rank() == 0 ? 6 : 2})}, at::zeros({world.rank() == 0 ? 6 : 2}));
    });
    EXPECT_CONTAINS(message, "part of all_gather");
  });
}

TEST_P(Forms, AllToAllOfLists) {
  for (const int n : {1, 2, 4})
    run(n, [n](World& world) {
      const auto size = [](int from, int to) { return part_size(from + 2 * to); };
      for (const bool async : {false, true}) {
        std::vector<at::Tensor> inputs, outputs;
        for (int r = 0; r < n; ++r) {
          const at::Tensor part = tile(table_of(at::kInt, world.rank()), r, size(world.rank(), r));
          inputs.push_back(r % 2 ? part : strided(part));
          outputs.push_back(at::zeros({size(r, world.rank())}, at::kInt));
        }
        if (async)
          all_to_all_async(outputs, inputs).wait();
        else
          all_to_all(outputs, inputs);
        for (int r = 0; r < n; ++r)
          EXPECT_EQ(difference(outputs[static_cast<size_t>(r)], table_of(at::kInt, r), world.rank()), "") << r;
      }
      EXPECT_CONTAINS(message_of<InvalidArgument>(
                          [&] { all_to_all(std::vector<at::Tensor>(static_cast<size_t>(n) + 1, at::zeros({1})), {}); }),
                      "all_to_all");
    });
}

TEST_P(Forms, Coalesced) {
  run(3, [](World& world) {
    std::vector<at::Tensor> tensors;
    for (const int64_t count : {1, 5000, 100'000})
      tensors.push_back(tile(table_of(at::kFloat, world.rank()), 0, count));
    all_reduce_coalesced(tensors, {.op = ReduceOp::MAX});
    Work work = all_reduce_coalesced_async({at::ones({2}), at::ones({3}, at::kInt)});
    work.wait();
    for (const auto& tensor : tensors)
      EXPECT_EQ(difference(tensor, reduced_table(at::kFloat, ReduceOp::MAX, 3), 0), "");
    all_reduce_coalesced({});

    // c10d's other coalesced forms.
    comm::Backend& backend = comm::backend_of(world.group());
    std::vector<at::Tensor> in = {at::full({2}, world.rank(), at::kFloat),
                                  at::full({700}, world.rank() + 10, at::kFloat)};
    std::vector<at::Tensor> out = {at::zeros({6}), at::zeros({2100})};
    backend.allgather_into_tensor_coalesced(out, in, {})->wait();
    std::vector<at::Tensor> scattered = {at::zeros({2}), at::zeros({700})};
    backend.reduce_scatter_tensor_coalesced(scattered, out, {})->wait();
    std::vector<std::vector<at::Tensor>> lists;
    for (int r = 0; r < 3; ++r) lists.push_back({at::zeros({2}), at::zeros({700})});
    backend.allgather_coalesced(lists, in, {})->wait();
    for (int r = 0; r < 3; ++r)
      for (const size_t i : {0, 1}) {
        const double value = r + 10.0 * static_cast<double>(i);
        const int64_t each = in[i].numel();
        EXPECT_TRUE(out[i].narrow(0, r * each, each).eq(value).all().item<bool>());
        EXPECT_TRUE(lists[static_cast<size_t>(r)][i].eq(value).all().item<bool>());
        if (r == world.rank()) {
          EXPECT_TRUE(scattered[i].eq(3 * value).all().item<bool>());
        }
      }
  });
}

TEST_P(Forms, SparseAllReduce) {
  for (const int n : {1, 2, 3})
    run(n, [n](World& world) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::AVG})
        for (const bool async : {false, true}) {
          // Rank r has rows 0, r and 5, row r twice; rank 1 has none at all.
          const auto of = [](int rank) {
            const at::Tensor rows =
                rank == 1 ? at::zeros({1, 0}, at::kLong) : at::tensor({0, rank, rank, 5}, at::kLong).view({1, 4});
            return at::sparse_coo_tensor(rows, at::ones({rows.size(1), 3}) * (rank + 1), {6, 3});
          };
          const at::Tensor mine = of(world.rank());
          if (async)
            all_reduce_async(mine, {.op = op}).wait();
          else
            all_reduce(mine, {.op = op});
          at::Tensor expected = at::zeros({6, 3});
          for (int r = 0; r < n; ++r) expected += of(r).to_dense();
          if (op == ReduceOp::AVG) expected /= n;
          EXPECT_TRUE(mine.is_sparse());
          EXPECT_TRUE(at::equal(mine.to_dense(), expected));
        }
      EXPECT_CONTAINS(
          message_of<InvalidArgument>([&] { all_reduce(at::ones({3}).to_sparse(), {.op = ReduceOp::MAX}); }),
          "MAX is not defined for sparse tensors");
      if (n > 1) {
        EXPECT_CONTAINS(message_of<Mismatch>([&] { all_reduce(at::ones({3 + world.rank()}).to_sparse()); }),
                        "another shape");
        EXPECT_THROW(barrier(), Mismatch);  // the group has failed
      }
    });
}

TEST_P(Forms, PremultipliedSum) {
  run(3, [](World& world) {
    const double factor = world.rank() + 0.5;  // 0.5, 1.5, 2.5
    for (const int64_t count : {int64_t{1}, int64_t{3000}, int64_t{200'000}})
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
        const at::Tensor t = at::full({count}, 2, dtype), kept = at::full({count}, 2, dtype);
        all_reduce(t, {.op = ReduceOp::PREMUL_SUM, .factor = factor});
        EXPECT_TRUE(t.eq(9).all().item<bool>()) << c10::toString(dtype);
        reduce(kept, 1, {.op = ReduceOp::PREMUL_SUM, .factor = factor});
        EXPECT_TRUE(kept.eq(world.rank() == 1 ? 9 : 2).all().item<bool>());
        const at::Tensor scanned = at::full({count}, 2, dtype);
        scan(scanned, {.op = ReduceOp::PREMUL_SUM, .factor = factor});
        EXPECT_TRUE(scanned.eq(std::array{1, 4, 9}[static_cast<size_t>(world.rank())]).all().item<bool>());
        const at::Tensor input = at::full({3, count}, 2, dtype), output = at::zeros({count}, dtype);
        reduce_scatter_tensor(output, input, {.op = ReduceOp::PREMUL_SUM, .factor = factor});
        EXPECT_TRUE(output.eq(9).all().item<bool>());
        EXPECT_TRUE(input.eq(2).all().item<bool>()) << "the input was changed";
      }
    EXPECT_CONTAINS(
        message_of<InvalidArgument>([] { all_reduce(at::ones({3}, at::kInt), {.op = ReduceOp::PREMUL_SUM}); }),
        "PREMUL_SUM is not defined here for tensors of Int");
    // c10d's way to pass a factor.
    std::vector<at::Tensor> list = {at::ones({4})};
    c10d::AllreduceOptions options;
    options.reduceOp.op_ = c10d::ReduceOp::PREMUL_SUM;
    options.reduceOp.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(at::tensor(3.0));
    comm::backend_of(world.group()).allreduce(list, options)->wait();
    EXPECT_TRUE(list[0].eq(9).all().item<bool>());
    // A factor of another dtype: an optimizer in full precision has one for tensors in half precision.
    c10d::ReduceScatterOptions scatters;
    scatters.reduceOp.op_ = c10d::ReduceOp::PREMUL_SUM;
    scatters.reduceOp.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(at::full({1}, 0.5));
    std::vector<at::Tensor> halves = {at::zeros({5}, at::kHalf)};
    std::vector<std::vector<at::Tensor>> inputs = {std::vector<at::Tensor>(3, at::ones({5}, at::kHalf))};
    comm::backend_of(world.group()).reduce_scatter(halves, inputs, scatters)->wait();
    EXPECT_TRUE(halves[0].eq(1.5).all().item<bool>());
  });
}

TEST_P(Forms, ReceiveFromAnybody) {
  run(4, [](World& world) {
    if (world.rank() != 0) {
      send(at::full({3}, world.rank(), at::kFloat), 0, {.tag = 7});
      send(at::full({50'000}, world.rank(), at::kFloat), 0, {.tag = 9});
      EXPECT_THROW(recv(at::zeros({1}), 0), TimeoutError);  // the group's failure, which is caused below
    } else {
      std::vector<int> sources;
      const Work early = irecv(at::zeros({50'000}), kAnySource, {.tag = 9});
      for (int i = 0; i < 3; ++i) {
        const at::Tensor t = at::zeros({3});
        const int source = recv(t, kAnySource, {.tag = 7});
        EXPECT_TRUE(t.eq(source).all().item<bool>());
        sources.push_back(source);
      }
      std::sort(sources.begin(), sources.end());
      EXPECT_EQ(sources, (std::vector<int>{1, 2, 3}));
      std::vector<int> large;
      for (int i = 0; i < 2; ++i) {
        const at::Tensor t = at::zeros({50'000});
        large.push_back(recv(t, kAnySource, {.tag = 9}));
        EXPECT_TRUE(t.eq(large.back()).all().item<bool>());
      }
      Work(early).wait();
      large.push_back(early.source_rank());
      std::sort(large.begin(), large.end());
      EXPECT_EQ(large, (std::vector<int>{1, 2, 3}));
      isend(at::ones({1}), 0, {.tag = 1});
      EXPECT_EQ(recv(at::zeros({1}), kAnySource, {.tag = 1}), 0);  // any source includes this rank
      EXPECT_CONTAINS(
          message_of<TimeoutError>([] { recv(at::zeros({1}), kAnySource, {.tag = 2, .timeout = milliseconds(50)}); }),
          "from any rank");
    }
  });
}

TEST_P(Forms, ManyMessagesAtOnce) {
  run(3, [](World& world) {
    const int next = (world.rank() + 1) % 3, previous = (world.rank() + 2) % 3;
    std::vector<P2POp> operations;
    std::vector<at::Tensor> received;
    for (const int64_t count : {1, 1000, 100'000}) {
      received.push_back(at::zeros({count}));
      operations.push_back({P2POp::kRecv, received.back(), previous});
      operations.push_back({P2POp::kSend, at::full({count}, world.rank(), at::kFloat), next});
    }
    for (auto& work : batch_isend_irecv(operations)) work.wait();
    for (const auto& t : received) EXPECT_TRUE(t.eq(previous).all().item<bool>());
  });
}

TEST_P(Forms, MismatchNamesBothCallSites) {
  run(2, [](World& world) {
    std::string message;
    uint32_t here = 0, there = 0;
    if (world.rank() == 0) {
      here = std::source_location::current().line() + 1;
      message = message_of<Mismatch>([] { all_reduce(at::ones({3})); });
      there = here + 4;
    } else {
      there = std::source_location::current().line() + 1;
      message = message_of<Mismatch>([] { broadcast(at::ones({3})); });
      here = there - 4;
    }
    EXPECT_CONTAINS(message, text("all_reduce of 3 x Float, SUM (comm_forms_test.cpp:", here, ")"));
    EXPECT_CONTAINS(message, text("broadcast of 3 x Float, from rank 0 (comm_forms_test.cpp:", there, ")"));
  });
}

TEST_P(Forms, MonitoredBarrierNamesTheMissing) {
  for (const bool all : {false, true})
    run(4, [this, all](World& world) {
      monitored_barrier();
      if (world.rank() >= 2) {  // until the others have given up
        EXPECT_THROW(while (true) recv(at::zeros({1}), 0), TimeoutError);
        return;
      }
      // Rank 1 waits already when the timeout of rank 0 begins.
      std::optional<OnceAsleep> watch;
      if (world.rank() == 1)
        watch.emplace([&] { world.store().set("1 waits", "1"); });
      else
        world.store().get("1 waits", patience());
      const milliseconds limit = world.rank() == 0 ? milliseconds(300) : milliseconds(kPatience);
      EXPECT_CONTAINS(message_of<TimeoutError>([&] { monitored_barrier({.timeout = limit}, all); }),
                      text(all && GetParam().backend != "hierarchical" ? "Ranks 2, 3" : "Rank 2",
                           " failed to pass monitoredBarrier in ", limit.count(), " ms"));
    });
}

// More bytes than 32 bits can count, signed or not.
TEST(FormsLarge, BeyondFourGibibytesProcess) {
  if (kSanitized) GTEST_SKIP() << "takes minutes under a sanitizer";
  run_threads(2, [](World& world) {
    constexpr int64_t kCount = (int64_t{1} << 32) + 4099;
    const at::Tensor t = at::full({kCount}, world.rank() + 1, at::kByte);
    all_reduce(t);
    for (const int64_t at : {int64_t{0}, (int64_t{1} << 31) - 2000, (int64_t{1} << 32) - 2000, kCount - 4000})
      EXPECT_TRUE(t.narrow(0, at, 4000).eq(3).all().item<bool>()) << at;
  });
}

}  // namespace
}  // namespace muster::test::operation_forms
