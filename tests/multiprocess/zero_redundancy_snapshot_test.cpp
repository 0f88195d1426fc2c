// States that are divided among the ranks: consolidated, divided again, and in snapshots.
#include <torch/serialize.h>
#include <unistd.h>

#include <memory>
#include <sstream>
#include <string>

#include "base/text.h"
#include "multiprocess/zero_redundancy_fixture.h"

namespace muster::test::divided_states {
namespace {

// Through torch::save() of the class, on one rank, and back on all.
TEST(ZeroRedundancy, StatesAreConsolidatedAndDividedAgain) {
  on_hosts({"a", "b", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net), of_other(other);
    const AdamWOptions options = AdamWOptions(1e-2).amsgrad(true);
    auto zero = std::make_unique<Zero<topt::AdamW>>(net->parameters(), options);
    topt::AdamW whole(other->parameters(), options);
    const auto step_both = [&](topt::Optimizer& optimizer, int step) {
      optimizer.zero_grad();
      whole.zero_grad();
      backward(ddp, world, step);
      backward(of_other, world, step);
      optimizer.step();
      whole.step();
      expect_equal(*net, *other);
    };
    step_both(*zero, 0);
    step_both(*zero, 1);
    std::ostringstream refused;
    expect_refusal({"states of its own parameters only", "consolidate()"}, [&] { torch::save(*zero, refused); });
    zero->consolidate(1);
    std::string bytes;
    if (world.rank() == 1) {
      std::ostringstream archive;
      torch::save(*zero, archive);
      bytes = archive.str();
      EXPECT_EQ(zero->state().size(), net->parameters().size());
    } else {
      expect_refusal({"states of its own parameters only"}, [&] { torch::save(*zero, refused); });
    }
    bytes = broadcast_object(bytes, 1);
    step_both(*zero, 2);  // goes on, with its own states only
    expect_states_once(*zero, world, net->parameters().size());

    // As after step 1: the class itself, and again in parts.
    const auto begin_again = [&](topt::Optimizer& optimizer) {
      const torch::NoGradGuard no_grad;
      std::istringstream archive(bytes);
      torch::load(optimizer, archive);
      std::istringstream again(bytes);
      torch::load(whole, again);
    };
    topt::AdamW of_class(net->parameters(), AdamWOptions(1));
    begin_again(of_class);
    step_both(of_class, 3);
    zero = std::make_unique<Zero<topt::AdamW>>(net->parameters(), AdamWOptions(1));
    begin_again(*zero);
    expect_states_once(*zero, world, net->parameters().size());
    step_both(*zero, 4);
    expect_refusal({"rank of the optimizer: expected 0 to"}, [&] { zero->consolidate(3); });
  });
}

// Saved by three ranks and restored by two, by the class itself, and the reverse.
TEST(ZeroRedundancy, Snapshots) {
  const fs::path folder = fs::path(testing::TempDir()) / text("zero-snapshot-", ::getpid());
  const Tensor x = drawn(0, 1, {4, 12});  // the same on all ranks, so that their number does not matter
  // With this eps, a rounding of a gradient near zero is not a step.
  const AdamWOptions options = AdamWOptions(1e-2).eps(1e-2);
  std::vector<std::vector<Tensor>> expected;  // after each step, of AdamW without a pause
  {
    const auto net = make<FsdpNet>(7, {});
    topt::AdamW optimizer(net->parameters(), options);
    for (int step = 0; step <= 3; ++step) {
      auto& values = expected.emplace_back();
      for (const Tensor& parameter : net->parameters()) values.push_back(parameter.detach().clone());
      optimizer.zero_grad();
      net->forward(x).square().sum().backward();
      optimizer.step();
    }
  }
  const auto train_from = [&](const HostOfRank& hosts, bool sharded, int64_t from, int64_t to, bool divided) {
    on_hosts(hosts, [&](World&) {
      const auto net = make<FsdpNet>(7, {});
      Ddp<FsdpNet> ddp(net);
      std::unique_ptr<topt::Optimizer> optimizer;
      if (divided)
        optimizer = std::make_unique<Zero<topt::AdamW>>(net->parameters(), options);
      else
        optimizer = std::make_unique<topt::AdamW>(net->parameters(), options);
      Snapshot snapshot({.folder = folder, .sharded = sharded, .default_generator = false});
      snapshot.add("model", net).add("optimizer", *optimizer);
      EXPECT_EQ(snapshot.restore(), from);
      for (int64_t step = from; step < to; ++step) {
        optimizer->zero_grad();
        ddp(x).square().sum().backward();
        optimizer->step();
      }
      snapshot.save(to);
      const auto now = net->parameters();
      for (size_t i = 0; i < now.size(); ++i)
        EXPECT_TRUE(torch::allclose(now[i], expected[static_cast<size_t>(to)][i], 1e-4, 1e-6)) << i;
    });
  };
  for (const bool sharded : {false, true}) {
    train_from({"a", "b", "a"}, sharded, 0, 2, true);
    train_from({"a", "a"}, sharded, 2, 3, true);
    fs::remove_all(folder);
    train_from({"a", "b", "a"}, sharded, 0, 2, true);
    train_from({"a"}, sharded, 2, 3, false);
    fs::remove_all(folder);
    train_from({"a", "a"}, sharded, 0, 2, false);
    train_from({"a", "b", "a"}, sharded, 2, 3, true);
    fs::remove_all(folder);
  }
}

// A class whose states are not known is stored per rank.
TEST(ZeroRedundancy, SnapshotsOfAnotherClass) {
  const fs::path folder = fs::path(testing::TempDir()) / text("zero-of-another-class-", ::getpid());
  std::vector<std::vector<Tensor>> expected(2);
  for (const bool again : {false, true})
    on_ranks(2, [&](World& world) {
      const auto net = make<FsdpNet>(7, {});
      Ddp<FsdpNet> ddp(net);
      Zero<Failing> zero(net->parameters(), SGDOptions(1e-2).momentum(0.9));
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net).add("optimizer", zero);
      EXPECT_EQ(snapshot.restore(), again ? 1 : 0);
      for (int step = again ? 1 : 0; step < 2; ++step) {
        zero.zero_grad();
        backward(ddp, world, step);
        zero.step();
        if (step == 0) snapshot.save(1);
      }
      const auto now = net->parameters();
      auto& own = expected[static_cast<size_t>(world.rank())];
      for (size_t i = 0; i < now.size(); ++i) {
        if (!again) own.push_back(now[i].detach().clone());
        EXPECT_TRUE(torch::equal(now[i], own[i])) << i;
      }
    });
  fs::remove_all(folder);
}

}  // namespace
}  // namespace muster::test::divided_states
