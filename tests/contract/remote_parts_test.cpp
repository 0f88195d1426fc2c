// How the arguments of a parallel call become parts, and which worker gets which.
#include <map>
#include <set>
#include <vector>

#include "contract/remote_fixture.h"
#include "muster/base/error.h"
#include "muster/remote/on_rank.h"
#include "support/nothing_left.h"

namespace muster::test::mapped_calls {
namespace {

std::pair<bool, bool> asks(Tensor x, Whole<Tensor> whole) { return {x.requires_grad(), whole->requires_grad()}; }
double weighted(const std::map<std::string, Tensor>& batch, std::string_view which, std::span<const double> weights) {
  return batch.at(std::string(which)).sum().item<double>() * weights[0];
}

TEST_P(Remote, RowsGoToTheWorkersInTurn) {
  for (const int n : {1, 3})
    lead(n, [n](World&) {
      for (const int64_t size : {1, 2, 3, 4, 7, 9}) {
        const Tensor x = at::rand({size, 2});
        const std::vector<Part> parts = remote_sync_call<&who_and_what>(x);
        ASSERT_EQ(parts.size(), static_cast<size_t>(std::min<int64_t>(n, size)));
        std::vector<Tensor> rows;
        for (size_t i = 0; i < parts.size(); ++i) {
          EXPECT_EQ(parts[i].first, static_cast<int>(i));
          rows.push_back(parts[i].second);
        }
        EXPECT_TRUE(at::equal(at::cat(rows), x)) << size;
        const auto single = remote_sync_call<&who_and_what>(
            x, {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false})});
        ASSERT_EQ(single.size(), static_cast<size_t>(size));
        for (size_t i = 0; i < single.size(); ++i) {
          EXPECT_EQ(single[i].first, static_cast<int>(i) % n);
          EXPECT_TRUE(at::equal(single[i].second, x[static_cast<int64_t>(i)]));
        }
      }
      EXPECT_EQ(remote_sync_call<&who_and_what>(at::rand({0, 2})).size(), 0u);
      EXPECT_CONTAINS(
          message_of<InvalidArgument>([] { remote_sync_call<&doubled>(at::rand({0}), {.reducer = mean_reducer}); }),
          "no results");
      EXPECT_EQ(remote_async_call<&who_and_what>(at::rand({0, 2})).get().size(), 0u);
    });
}

TEST_P(Remote, AllOfItToSome) {
  serve(3, [](World& world) {
    const Tensor x = at::arange(5);
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = 2}), std::vector{2});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = "worker1"}), std::vector{1});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = rpc::worker_info(0)}), std::vector{0});
    const auto all = remote_sync_call<&who_and_what>(x, {.partitioner = every_worker});
    ASSERT_EQ(all.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(all[static_cast<size_t>(i)].first, i);
      EXPECT_TRUE(at::equal(all[static_cast<size_t>(i)].second, x));
    }
    EXPECT_EQ(remote_sync_call<&own_rank>(5), std::vector{world.rank()});  // nothing to split: this worker
    const auto some = dim_partitioner(0, {.workers = {"worker2", 0}});
    EXPECT_EQ(remote_sync_call<&rank_of>(x, {.partitioner = some}), (std::vector{2, 0}));
    // A user-defined partitioner: the first row stays here, the rest goes to worker 1.
    const auto first_and_rest = [](const Tensor& whole) {
      return std::vector<RemotePart<Tensor>>{{get_rank(), {whole.slice(0, 0, 1)}}, {"worker1", {whole.slice(0, 1)}}};
    };
    const auto parts = remote_sync_call<&who_and_what>(x, {.partitioner = first_and_rest});
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[0].first, world.rank());
    EXPECT_EQ(parts[1].first, 1);
    EXPECT_EQ(parts[1].second.size(0), 4);
  });
}

// Worker 2 answers when the others have done all parts that it does not have.
std::pair<int, int64_t> slow_on_worker_2(std::string key, int64_t others, Tensor x) {
  Store& store = World::current().store();
  if (get_rank() == 2) {
    const auto until = patience();
    while (store.add(key, 0) < others && !until.passed()) std::this_thread::yield();
    EXPECT_FALSE(until.passed());
  } else {
    store.add(key, 1);
  }
  return {get_rank(), x.item<int64_t>()};
}

TEST_P(Remote, ABalancedCallGivesASlowWorkerFewParts) {
  lead(3, [](World&) {
    constexpr int64_t kParts = 40, kOfTheSlow = 2;
    const auto balanced = [](std::vector<WorkerId> workers) {
      return dim_partitioner(0, {.exclusive = true, .keepdim = false, .workers = std::move(workers), .balanced = true});
    };
    const auto done = remote_sync_call<&slow_on_worker_2>("slow", kParts - kOfTheSlow, at::arange(kParts),
                                                          {.partitioner = balanced({})});
    ASSERT_EQ(done.size(), static_cast<size_t>(kParts));
    std::map<int, int64_t> of;
    for (int64_t i = 0; i < kParts; ++i) {
      EXPECT_EQ(done[static_cast<size_t>(i)].second, i);  // the order of the parts
      ++of[done[static_cast<size_t>(i)].first];
    }
    EXPECT_EQ(of[2], kOfTheSlow);
    EXPECT_GE(of[0], 2);
    EXPECT_GE(of[1], 2);

    const auto some = remote_async_call<&rank_of>(at::arange(20), {.partitioner = balanced({"worker1", 2})}).get();
    EXPECT_EQ(std::set<int>(some.begin(), some.end()), (std::set{1, 2}));
  });
}

TEST_P(Remote, AnyWorker) {
  lead(3, [](World&) {
    const auto one = remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker({1, "worker2"})});
    ASSERT_EQ(one.size(), 1u);
    EXPECT_TRUE(one[0] == 1 || one[0] == 2);
    remote_sync_call<&note>("any", at::arange(3), {.partitioner = any_worker(), .max_retries = 1});
    EXPECT_EQ(World::current().store().add("any", 0), 3);
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { get_worker_id(any_worker()); }), "names no worker");
    EXPECT_THROW(remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker({"nobody"})}), InvalidArgument);
    EXPECT_THROW(dim_partitioner(0, {.balanced = true}), InvalidArgument);
    // Each part has its own candidates; any_worker() means all, whatever other parts name.
    const auto split = [](const Tensor& x) {
      std::vector<RemotePart<Tensor>> parts;
      for (int i = 0; i < 12; ++i) parts.push_back({any_worker({1 + i % 2}), {x}});
      for (int i = 0; i < 12; ++i) parts.push_back({any_worker(), {x}});
      parts.push_back({0, {x}});
      return parts;
    };
    const auto where = remote_sync_call<&rank_of>(at::arange(5), {.partitioner = split});
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(where[i], static_cast<int>(1 + i % 2));
    EXPECT_EQ(where.back(), 0);
    std::set<int> one_each;  // calls of one part each go to all workers, too
    for (int i = 0; i < 9; ++i)
      one_each.insert(remote_sync_call<&rank_of>(at::arange(5), {.partitioner = any_worker()})[0]);
    EXPECT_EQ(one_each, (std::set{0, 1, 2}));
    // Errors and cancellation are those of any call.
    EXPECT_CONTAINS(message_of<RemoteError>([] {
                      remote_sync_call<&fails_in_part_2>(
                          "any fails ", at::arange(3),
                          {.partitioner = dim_partitioner(0, {.exclusive = true, .balanced = true}), .max_retries = 3});
                    }),
                    "no such row [part 2 of 3]");
    for (const int part : {0, 1}) World::current().store().get("any fails stopped" + text_of(part), patience());
    const auto never = remote_async_call<&never_ends>("any ", at::arange(1), {.partitioner = any_worker({1})});
    World::current().store().get("any begun0", patience());
    EXPECT_TRUE(never.cancel());
    World::current().store().get("any stopped0", patience());
  });
}

// What waits for a worker is sent late: not if it has changed meanwhile, and not if the call has failed.
Tensor when_told(std::string key, Tensor x) {
  World::current().store().get(key, patience());
  return x;
}
int fails_in_row_0(Tensor x) {
  if (x.item<int64_t>() == 0) throw std::out_of_range("no such row");
  return 0;
}

TEST_P(Remote, PartsThatWait) {
  lead(2, [](World& world) {
    const auto balanced = dim_partitioner(0, {.exclusive = true, .keepdim = false, .balanced = true});
    for (const int retries : {0, 1}) {
      const Tensor x = at::arange(8);
      const std::string key = "told " + std::to_string(retries);
      const auto results = remote_async_call<&when_told>(key, x, {.partitioner = balanced, .max_retries = retries});
      x.add_(1);
      world.store().set(key, "");
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { results.get(); }), "was changed in place before the part was");
    }
    EXPECT_THROW(remote_sync_call<&fails_in_row_0>(at::arange(20'000), {.partitioner = balanced}), RemoteError);
    EXPECT_EQ(remote_sync_call<&rank_of>(at::arange(2'000), {.partitioner = balanced}).size(), 2'000u);
    // What cannot be sent is the call's own error.
    const Tensor sparse = at::eye(2).to_sparse();
    EXPECT_THROW((void)remote_async_call<&doubled>(sparse, {.partitioner = 1, .max_retries = 1}), InvalidArgument);
  });
}

// The graph holds the arguments for another call; not in a cycle, if they depend on the result later.
TEST_P(Remote, ArgumentsThatAreKeptAreNotKeptForEver) {
  lead(2, [](World&) {
    {
      const Tensor weight = at::ones({3}).set_requires_grad(true);
      Tensor hidden = weight * 2;
      const Tensor result = remote_sync_call<&doubled>(hidden, {.partitioner = 1, .max_retries = 1})[0];
      EXPECT_TRUE(result.requires_grad());
      hidden.add_(result);
    }
    expect_nothing_left();
  });
}

TEST_P(Remote, ArgumentsAreConvertedAndTheRestGoesToAllParts) {
  lead(2, [](World&) {
    const std::map<std::string, Tensor> batch{{"a", at::ones({6})}, {"b", at::arange(6)}};
    const std::string_view which = "b";
    const std::array<double, 2> weights{2, 3};
    EXPECT_EQ(remote_sync_call<&weighted>(batch, which, std::span(weights)), (std::vector<double>{6, 24}));
    EXPECT_EQ(remote_sync_call<&weighted>(batch, "a", std::vector{1.0}, {.reducer = mean_reducer}), 3);
    remote_sync_call<&note>("noted", at::ones({5}));  // returns nothing
    remote_async_call<&note>("noted", at::ones({5})).get();
    EXPECT_EQ(World::current().store().add("noted", 0), 10);
    EXPECT_EQ(
        (remote_sync_call<&note, size_t>("noted", at::ones({5}), {.reducer = [](auto parts) { return parts.size(); }})),
        2u);
  });
}

TEST_P(Remote, TensorsKeepAskingForGradients) {
  lead(2, [](World&) {
    const Tensor x = at::ones({2}).requires_grad_(), plain = at::ones({2});
    using Answers = std::vector<std::pair<bool, bool>>;
    EXPECT_EQ(remote_sync_call<&asks>(x, plain), (Answers{{true, false}, {true, false}}));
    EXPECT_EQ(remote_sync_call<&asks>(plain, x), (Answers{{false, true}, {false, true}}));
  });
}

}  // namespace
}  // namespace muster::test::mapped_calls
