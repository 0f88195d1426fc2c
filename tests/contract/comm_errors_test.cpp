// Failures, and what all ranks are told of them: ranks that disagree, and a caller's own mistakes. Ranks that come late
// or leave are in comm_missing_test.cpp.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <functional>

#include "contract/comm_errors_fixture.h"
#include "muster/comm/collectives.h"

namespace muster::test::comm_failures {
namespace {

MUSTER_COMM_CONTRACT(Errors);

// --- ranks that disagree ---

struct Disagreement {
  const char* name;
  std::function<void(World&)> call, other_call;  // ranks 0 and 2, and rank 1
  std::vector<const char*> said;
};

std::vector<Disagreement> disagreements() {
  const auto all_reduce_of = [](int64_t count, at::ScalarType dtype, ReduceOp op = ReduceOp::SUM) {
    return [=](World&) { all_reduce(at::ones({count}, dtype), {.op = op}); };
  };
  const auto outputs = [](int n, int64_t count) {
    return std::vector<at::Tensor>(static_cast<size_t>(n), at::ones({count}));
  };
  const auto uneven = [](const std::vector<int64_t>& counts) {
    std::vector<at::Tensor> list;
    for (const int64_t count : counts) list.push_back(at::ones({count}));
    return list;
  };
  const auto all_gather_of = [=](std::vector<int64_t> counts) {
    return [=](World& w) { all_gather(uneven(counts), at::ones({counts[static_cast<size_t>(w.rank())]})); };
  };
  const auto reduce_scatter_of = [=](std::vector<int64_t> counts, ReduceOp op = ReduceOp::SUM) {
    return [=](World& w) {
      reduce_scatter(at::ones({counts[static_cast<size_t>(w.rank())]}), uneven(counts), {.op = op});
    };
  };
  return {
      {"operation",
       all_reduce_of(10, at::kFloat),
       [](World&) { broadcast(at::ones({10})); },
       {"rank 0 called all_reduce of 10 x Float, SUM", "rank 1 called broadcast of 10 x Float, from rank 0"}},
      {"skipped one",
       [](World&) { barrier(), all_reduce(at::ones({10})); },
       all_reduce_of(10, at::kFloat),
       {"rank 0 called barrier", "rank 1 called all_reduce of 10 x Float"}},
      {"order",
       [](World&) { all_reduce(at::ones({10})), reduce(at::ones({10}), 2); },
       [](World&) { reduce(at::ones({10}), 2), all_reduce(at::ones({10})); },
       {"rank 0 called all_reduce of 10 x Float", "rank 1 called reduce of 10 x Float, SUM, to rank 2"}},
      {"all_reduce and barrier", all_reduce_of(10, at::kFloat), [](World&) { barrier(); }, {"rank 1 called barrier"}},
      {"two that move the same bytes",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       {"rank 0 called gather of 5 x Float", "rank 1 called all_gather of 5 x Float"}},
      {"split on one rank",
       [](World& w) { w.group().split(0); },
       [](World&) { barrier(); },
       {"rank 0 called all_gather of 2 x Long (comm_errors_test.cpp:", "rank 1 called barrier (comm_errors_test.cpp:"}},
      {"count", all_reduce_of(10, at::kFloat), all_reduce_of(11, at::kFloat), {"10 x Float", "11 x Float"}},
      {"count, one small and one large",
       all_reduce_of(10, at::kFloat),
       all_reduce_of(1'000'000, at::kFloat),
       {"10 x Float", "1000000 x Float"}},
      {"count, large",
       all_reduce_of(1'000'001, at::kFloat),
       all_reduce_of(1'000'000, at::kFloat),
       {"1000001 x Float", "1000000 x Float"}},
      {"nothing on one rank", all_reduce_of(10, at::kFloat), all_reduce_of(0, at::kFloat), {"10 x Float", "0 x Float"}},
      {"dtype", all_reduce_of(10, at::kFloat), all_reduce_of(10, at::kInt), {"10 x Float", "10 x Int"}},
      {"dtype of the same size",
       all_reduce_of(4000, at::kHalf),
       all_reduce_of(4000, at::kBFloat16),
       {"Half", "BFloat16"}},
      {"reduce operation", all_reduce_of(10, at::kFloat), all_reduce_of(10, at::kFloat, ReduceOp::MAX), {"SUM", "MAX"}},
      {"reduce operation of reduce",
       [](World&) { reduce(at::ones({10}), 0, {.op = ReduceOp::MIN}); },
       [](World&) { reduce(at::ones({10}), 0, {.op = ReduceOp::PRODUCT}); },
       {"MIN, to rank 0", "PRODUCT, to rank 0"}},
      {"reduce operation of reduce_scatter",
       reduce_scatter_of({5, 5, 5}),
       reduce_scatter_of({5, 5, 5}, ReduceOp::MAX),
       {"reduce_scatter of 5 x Float, SUM", "reduce_scatter of 5 x Float, MAX"}},
      {"sum with and without factors",
       all_reduce_of(10, at::kFloat),
       [](World&) { all_reduce(at::ones({10}), {.op = ReduceOp::PREMUL_SUM, .factor = 0.5}); },
       {"rank 0 called all_reduce of 10 x Float, SUM", "rank 1 called all_reduce of 10 x Float, PREMUL_SUM"}},
      {"root of broadcast",
       [](World&) { broadcast(at::ones({10}), 0); },
       [](World&) { broadcast(at::ones({10}), 1); },
       {"broadcast of 10 x Float, from rank 0", "from rank 1"}},
      {"root of reduce",
       [](World&) { reduce(at::ones({10}), 0); },
       [](World&) { reduce(at::ones({10}), 2); },
       {"to rank 0", "to rank 2"}},
      {"root of gather",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5), 0); },
       [=](World&) { gather(at::ones({5}), outputs(3, 5), 1); },
       {"gather of 5 x Float, to rank 0", "gather of 5 x Float, to rank 1"}},
      {"root of scatter",
       [=](World& w) { scatter(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5), 0); },
       [=](World&) { scatter(at::ones({5}), outputs(3, 5), 1); },
       {"scatter of 5 x Float, from rank 0", "scatter of 5 x Float, from rank 1"}},
      {"count of broadcast",
       [](World&) { broadcast(at::ones({10})); },
       [](World&) { broadcast(at::ones({20})); },
       {"broadcast of 10 x Float", "broadcast of 20 x Float"}},
      {"count of reduce",
       [](World&) { reduce(at::ones({10'000})); },
       [](World&) { reduce(at::ones({20'000})); },
       {"reduce of 10000 x Float", "reduce of 20000 x Float"}},
      {"dtype of broadcast",
       [](World&) { broadcast(at::ones({10})); },
       [](World&) { broadcast(at::ones({10}, at::kInt)); },
       {"broadcast of 10 x Float", "broadcast of 10 x Int"}},
      {"dtype of all_gather",
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       [](World&) { all_gather(std::vector<at::Tensor>(3, at::ones({5}, at::kInt)), at::ones({5}, at::kInt)); },
       {"all_gather of 5 x Float", "all_gather of 5 x Int"}},
      {"count in a list of all_gather",
       all_gather_of({5, 6, 7}),
       all_gather_of({5, 8, 7}),
       {"broadcast of 6 x Float, from rank 1, part of all_gather",
        "broadcast of 8 x Float, from rank 1, part of all_gather"}},
      {"equal and unequal lists of all_gather",
       all_gather_of({5, 6, 7}),
       all_gather_of({6, 6, 6}),
       {"broadcast of 5 x Float, from rank 0, part of all_gather", "all_gather of 6 x Float"}},
      {"count in a list of reduce_scatter",
       reduce_scatter_of({5, 6, 7}),
       reduce_scatter_of({5, 6, 8}),
       {"reduce of 7 x Float, SUM, to rank 2, part of reduce_scatter",
        "reduce of 8 x Float, SUM, to rank 2, part of reduce_scatter"}},
      {"count of all_gather",
       [=](World&) { all_gather(outputs(3, 5), at::ones({5})); },
       [=](World&) { all_gather(outputs(3, 6), at::ones({6})); },
       {"all_gather of 5 x Float", "all_gather of 6 x Float"}},
      {"count of reduce_scatter",
       [=](World&) { reduce_scatter(at::ones({5}), outputs(3, 5)); },
       [=](World&) { reduce_scatter(at::ones({6}), outputs(3, 6)); },
       {"reduce_scatter of 5 x Float", "reduce_scatter of 6 x Float"}},
      {"count of gather",
       [=](World& w) { gather(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [](World&) { gather(at::ones({6}), {}); },
       {"gather of 5 x Float", "gather of 6 x Float"}},
      {"count of scatter",
       [=](World& w) { scatter(at::ones({5}), outputs(w.rank() == 0 ? 3 : 0, 5)); },
       [](World&) { scatter(at::ones({6}), {}); },
       {"scatter of 5 x Float", "scatter of 6 x Float"}},
      {"parts of all_to_all",
       [](World&) { all_to_all_single(at::ones({6}), at::ones({6})); },
       [](World&) {
         all_to_all_single(at::ones({6}), at::ones({7}), {.output_splits = {2, 2, 2}, .input_splits = {3, 2, 2}});
       },
       {"rank 1 (comm_errors_test.cpp:", " sends 12 bytes to rank 0 (comm_errors_test.cpp:", "which expects 8"}},
      {"large parts of all_to_all",
       [](World&) { all_to_all_single(at::ones({600'000}), at::ones({600'000})); },
       [](World&) { all_to_all_single(at::ones({600'003}), at::ones({600'003})); },
       {"all_to_all", "800000", "800004"}},
      {"dtype of all_to_all",
       [](World&) { all_to_all_single(at::ones({6}), at::ones({6})); },
       [](World&) { all_to_all_single(at::ones({6}, at::kInt), at::ones({6}, at::kInt)); },
       {"Float", "Int"}},
  };
}

int times_in(const std::string& text, std::string_view part) {
  int times = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++times;
  return times;
}

TEST_P(Errors, MismatchNamesBothSidesOnEveryRank) {
  for (const auto& each : disagreements())
    for (const bool async : {false, true}) {
      if (async && std::string(each.name) != "operation") continue;
      run(3, [&](World& world) {
        SCOPED_TRACE(each.name);
        all_reduce(at::ones({3}));  // operation #0 is in order
        const auto& call = world.rank() == 1 ? each.other_call : each.call;
        const auto text = message_of<Mismatch>([&] {
          if (async)
            (world.rank() == 1 ? broadcast_async(at::ones({10})) : all_reduce_async(at::ones({10}))).wait();
          else
            call(world);
        });
        for (const char* part : each.said) EXPECT_CONTAINS(text, part);
        EXPECT_EQ(times_in(text, "(comm_errors_test.cpp:"), 2) << text;  // where both called
        expect_same(world, "mismatch", text, 3);
        // The group stays failed, and reports the same error.
        EXPECT_EQ(message_of<Mismatch>([] { barrier(); }), text);
        EXPECT_EQ(message_of<Mismatch>([] { barrier_async().wait(); }), text);
        EXPECT_EQ(message_of<Mismatch>([&] { send(at::ones({1}), 0); }), text);
        // Other groups are not affected.
        all_reduce(at::ones({3}), {.group = world.new_group({0, 1, 2})});
      });
    }
}

// --- the caller's mistakes ---

TEST_P(Errors, InvalidArgumentIsFoundBeforeAnythingIsSent) {
  run(2, [](World& world) {
    const int me = world.rank();
    const at::Tensor ok = at::ones({4}), undefined, meta = at::empty({4}, at::TensorOptions(at::kMeta)),
                     sparse = at::ones({4}).to_sparse(), flags = at::ones({4}, at::kBool),
                     complex = at::ones({4}, at::kComplexFloat), three = at::ones({3}), ints = at::ones({4}, at::kInt),
                     eight = at::ones({8}), expanded = at::ones({1}).expand({4}),
                     overlapping = at::empty_strided({4}, {0}), eight_ints = at::ones({8}, at::kInt),
                     scalar = at::ones({}), conjugate = at::ones({4}, at::kComplexFloat).conj();
    struct Mistake {
      const char* said;
      std::function<void()> call;
    };
    const std::vector<Mistake> mistakes = {
        {"undefined", [&] { all_reduce(undefined); }},
        {"undefined", [&] { broadcast(undefined); }},
        {"undefined",
         [&] {
           all_gather({ok, undefined}, ok);
         }},
        {"undefined",
         [&] {
           reduce_scatter(ok, {undefined, ok});
         }},
        {"undefined", [&] { all_to_all_single(undefined, ok); }},
        {"undefined", [&] { all_to_all_single(ok, undefined); }},
        {"undefined", [&] { send(undefined, 0); }},
        {"meta", [&] { all_reduce(meta); }},
        {"meta", [&] { all_gather_into_tensor(at::empty({8}, at::TensorOptions(at::kMeta)), ok); }},
        {"meta", [&] { recv(meta, 0); }},
        {"MAX is not defined for sparse tensors", [&] { all_reduce(sparse, {.op = ReduceOp::MAX}); }},
        {"sparse", [&] { broadcast(sparse); }},
        {"sparse", [&] { isend(sparse, 0); }},
        {"conjugate", [&] { broadcast(conjugate); }},
        {"AVG is not defined here for tensors of Bool", [&] { all_reduce(flags, {.op = ReduceOp::AVG}); }},
        {"BXOR is not defined here for tensors of Float", [&] { all_reduce(ok, {.op = ReduceOp::BXOR}); }},
        {"MAX is not defined here for tensors of ComplexFloat", [&] { reduce(complex, 0, {.op = ReduceOp::MAX}); }},
        {"not defined",
         [&] {
           reduce_scatter(flags, {flags, flags}, {.op = ReduceOp::AVG});
         }},
        {"not defined", [&] { all_reduce(ok, {.op = static_cast<ReduceOp>(9)}); }},
        {"root: expected a rank from 0 to 1, got 2", [&] { broadcast(ok, 2); }},
        {"root: expected a rank from 0 to 1, got -1", [&] { reduce(ok, -1); }},
        {"root: expected a rank from 0 to 1, got 2", [&] { gather(ok, {}, 2); }},
        {"root: expected a rank from 0 to 1, got 7", [&] { scatter(ok, {}, 7); }},
        {"rank: expected a rank from 0 to 1, got 2. Use the rank within the group", [&] { send(ok, 2); }},
        {"rank: expected a rank from 0 to 1, got -1", [&] { isend(ok, kAnySource); }},
        {"rank: expected a rank from 0 to 1, got -2", [&] { irecv(ok, -2); }},
        {"outputs: expected one for each rank of a group of 2, got 3",
         [&] {
           all_gather({ok, ok, ok}, ok);
         }},
        {"outputs: expected one for each rank of a group of 2, got 0", [&] { all_gather({}, ok); }},
        {"an output: expected 4 x Float, got 3 x Float",
         [&] {
           all_gather({three, three}, ok);
         }},
        {"expected 4 x Float, got 4 x Int",
         [&] {
           all_gather({ok, ints}, ok);
         }},
        {"expected 8 x Float, got 4 x Float", [&] { all_gather_into_tensor(ok, ok); }},
        {"expected 8 x Float, got 8 x Int", [&] { all_gather_into_tensor(eight_ints, ok); }},
        {"inputs: expected one for each rank of a group of 2, got 3",
         [&] {
           reduce_scatter(ok, {ok, ok, ok});
         }},
        {"3 x Float",
         [&] {
           reduce_scatter(ok, {three, three});
         }},
        {"an input: expected 8 x Float, got 4 x Float", [&] { reduce_scatter_tensor(ok, ok); }},
        {me == 0 ? "outputs: expected one for each rank of a group of 2, got 0" : "which is not the root",
         [&] {
           gather(ok, me == 0 ? std::vector<at::Tensor>{} : std::vector{ok, ok});
         }},
        {me == 0 ? "3 x Float" : "which is not the root",
         [&] {
           gather(ok, {ok, three});
         }},
        {me == 0 ? "4 x Int" : "which is not the root",
         [&] {
           scatter(ok, {ok, ints});
         }},
        {"3 rows cannot be divided among 2", [&] { all_to_all_single(three, three); }},
        {"cannot be divided", [&] { all_to_all_single(scalar, scalar); }},
        {"different dtypes", [&] { all_to_all_single(ok, ints); }},
        {"input splits: expected one for each of 2 ranks, got 1",
         [&] { all_to_all_single(ok, ok, {.input_splits = {4}}); }},
        {"do not add up to its 4 rows",
         [&] {
           all_to_all_single(ok, ok, {.output_splits = {1, 2}});
         }},
        {"an output split: expected 0 or more, got -1",
         [&] {
           all_to_all_single(ok, ok, {.output_splits = {5, -1}});
         }},
        {"add up",
         [&] {
           all_to_all_single(ok, ok, {.input_splits = {INT64_MAX, INT64_MAX}});
         }},
        {"one dimension",
         [&] {
           all_to_all_single(scalar, scalar, {.input_splits = {1, 0}});
         }},
        // Several elements in one place cannot hold several results.
        {"overlap", [&] { all_reduce(expanded); }},
        {"overlap", [&] { broadcast(overlapping); }},
        {"overlap",
         [&] {
           all_gather({expanded, ok}, ok);
         }},
        {"overlap", [&] { recv(expanded, 0); }},
        {"overlap", [&] { all_to_all_single(expanded, ok); }},
    };
    for (size_t i = 0; i < mistakes.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "mistake " << i << ": " << mistakes[i].said);
      EXPECT_CONTAINS(message_of<InvalidArgument>(mistakes[i].call), mistakes[i].said);
    }
    // Nothing was sent: the group still works, and counts from the start.
    all_reduce(ok);
    EXPECT_TRUE((ok == 2).all().item<bool>());
    EXPECT_EQ(world.group().stats().operations, 1u);
    // An expanded input is not a mistake.
    const at::Tensor both = at::zeros({8});
    all_gather_into_tensor(both, expanded);
    EXPECT_TRUE((both == 1).all().item<bool>());
  });
}

// The other ranks are told the text of the exception that ended a rank.
TEST_P(Errors, AnExceptionInOneRankReachesTheOthersWithItsText) {
  if (!as_threads()) GTEST_SKIP() << "for processes, the launcher tells; see launch_function_test.cpp";
  std::vector<std::string> heard(3);
  try {
    run(3, [&](World& world) {
      if (world.rank() == 1) throw std::runtime_error("the data ran out");
      heard[static_cast<size_t>(world.rank())] = message_of<PeerLost>([] { barrier(); });
      throw Aborted("an echo");
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the data ran out");
  }
  for (const int rank : {0, 2}) EXPECT_CONTAINS(heard[static_cast<size_t>(rank)], "rank 1 ended: the data ran out");
}

}  // namespace
}  // namespace muster::test::comm_failures
