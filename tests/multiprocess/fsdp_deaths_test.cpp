// Ranks of FullyShardedDataParallel die anywhere in a step. The others name the dead rank. A new job resumes from the
// newest snapshot, and ends with the bits of one that was not disturbed.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "support/full_run.h"
#include "support/temporary_folder.h"

namespace muster::test {
namespace {

// kInStep: between the steps of two optimizers. kInOneStep: when one of them has updated some of its parameters.
// kInCollective: in any collective of all ranks. kInUnitGather: in one that gathers a unit for forward() or backward().
// kInGather: in gather().
enum class Phase {
  kForward,
  kBackward,
  kBetween,
  kInStep,
  kInOneStep,
  kAfterStep,
  kInSave,
  kInGather,
  kInCollective,
  kInUnitGather,
  kNone,
};

struct DyingNet : FsdpNet {
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::relu(b(torch::relu(a(x))));
    if (dies) ::raise(SIGKILL);
    return d(torch::relu(c(h)));
  }
  bool dies = false;
};

// Updates one parameter after the other.
struct DyingAdamW : torch::optim::AdamW {
  using AdamW::AdamW;
  Tensor step(LossClosure closure = nullptr) override {
    std::vector<Tensor> parameters, gradients;
    for (Tensor& parameter : param_groups()[0].params()) {
      if (!parameter.grad().defined()) continue;
      parameters.push_back(parameter);
      gradients.push_back(std::exchange(parameter.mutable_grad(), Tensor()));
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = gradients[i];
      AdamW::step(closure);
      parameters[i].mutable_grad() = Tensor();
      if (dies) ::raise(SIGKILL);
    }
    if (dies) ::raise(SIGKILL);  // it owns none of them
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
    return {};
  }
  bool dies = false;
};

// A part of the snapshot on which a save dies.
struct DyingItem {
  void save(torch::serialize::OutputArchive&) const {
    if (dies) ::raise(SIGKILL);
  }
  void load(torch::serialize::InputArchive&) {}
  bool dies = false;
};

struct Death {
  Phase phase = Phase::kNone;
  int victim = 0, step = 0;
};

// A way to train, and the hosts of its ranks.
struct Training {
  HostOfRank hosts;
  FsdpOptions options;
};

// Trains for 4 steps, from the newest snapshot in `folder` on, and returns the parameters.
Values train_with_snapshots(World& world, const FsdpOptions& options, const std::filesystem::path& folder, bool sharded,
                            const Death& kill) {
  const auto net = make<DyingNet>(7, {});
  auto model = fully_shard(net, options);
  // Two optimizers, so that a rank can die when some parameters are updated and others are not.
  torch::optim::AdamW early({net->a->weight, net->a->bias, net->b->weight, net->b->bias}, 1e-2);
  DyingAdamW late({net->c->weight, net->c->bias, net->d->weight, net->d->bias}, 1e-2);
  DyingItem item;
  Snapshot snapshot({.folder = folder, .every = 1, .sharded = sharded, .default_generator = false});
  snapshot.add("model", net).add("early", early).add("late", late).add("item", item);
  Phase now = Phase::kNone;
  const auto dies_in = [&](Phase phase) { return now == phase; };
  net->b->weight.register_hook([&](const Tensor&) -> void {
    if (dies_in(Phase::kBackward)) ::raise(SIGKILL);
  });
  for (int64_t step = snapshot.restore(); step < 4; ++step) {
    if (world.rank() == kill.victim && step == kill.step) now = kill.phase;
    early.zero_grad();
    late.zero_grad();
    net->dies = dies_in(Phase::kForward);
    const Tensor loss = model(fsdp_input(world.rank(), static_cast<int>(step))).square().sum();
    loss.backward();
    if (dies_in(Phase::kBetween)) ::raise(SIGKILL);
    early.step();
    if (dies_in(Phase::kInStep)) ::raise(SIGKILL);
    late.dies = dies_in(Phase::kInOneStep);
    late.step();
    if (dies_in(Phase::kAfterStep)) ::raise(SIGKILL);
    item.dies = dies_in(Phase::kInSave);
    EXPECT_FALSE(snapshot.step(step + 1));
    if (dies_in(Phase::kInGather)) ::raise(SIGKILL);
    if (step == 1) model.gather();
  }
  model.gather();
  Values values = copies(net->named_parameters());
  model.synchronize();
  return values;
}

// The rank's process dies in its n-th collective of the group between hosts that gathers units.
FaultPlan in_gather_of_a_unit(uint64_t n, FaultPhase phase) {
  FaultPlan plan;
  for (const int rank_in_group : {0, 1})  // this process has one of them
    plan.add({.action = FaultAction::kKill,
              .rank = rank_in_group,
              .operation = n,
              .phase = phase,
              .group = "parameters between hosts"});
  return plan;
}

// It dies in the n-th collective of all ranks.
FaultPlan in_collective(int rank, uint64_t n, FaultPhase phase) {
  FaultPlan plan;
  plan.add({.action = FaultAction::kKill, .rank = rank, .operation = n, .phase = phase});
  return plan;
}

// Whether a message says that this rank is lost: "rank 3 (pid 4711) died", "rank 3 left group …".
bool names(const std::string& message, int rank) {
  return contains(message, text("rank ", rank, " (pid ")) || contains(message, text("rank ", rank, " left "));
}

class Campaign {
 public:
  explicit Campaign(const Training& training) : training_(training) {
    const auto ends = in_processes(training_.hosts, [&](World& world) {
      const Values values = train_with_snapshots(world, training_.options, top_ / "undisturbed", false, {});
      if (world.rank() == 0) torch::save(values.values(), reference_.string());
      return std::string("done");
    });
    for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  }

  void kill_and_resume(const Death& kill, bool sharded, const FaultPlan& faults = {}) {
    SCOPED_TRACE(text("phase ", static_cast<int>(kill.phase), ", rank ", kill.victim, ", step ", kill.step, " on ",
                      training_.hosts.size(), " ranks"));
    const auto folder = top_ / text("run-", ++runs_);
    const auto ends = in_processes(
        training_.hosts,
        [&](World& world) {
          return message_of<PeerLost>([&] { train_with_snapshots(world, training_.options, folder, sharded, kill); });
        },
        [&](int rank) { return rank == kill.victim ? faults : FaultPlan{}; });
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      if (static_cast<int>(rank) == kill.victim)
        EXPECT_EQ(ends[rank].signal, SIGKILL);
      else
        EXPECT_TRUE(names(ends[rank].said, kill.victim)) << ends[rank].said;
    }
    const auto resumed = in_processes(training_.hosts, [&](World& world) {
      const Values values = train_with_snapshots(world, training_.options, folder, sharded, {});
      std::vector<Tensor> expected;
      torch::load(expected, reference_.string());
      EXPECT_EQ(values.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(values.values()[i], expected[i])) << i;
      return std::string("done");
    });
    for (const auto& end : resumed) EXPECT_EQ(end.said, "done");
    std::filesystem::remove_all(folder);
  }

 private:
  const Training training_;
  const TemporaryFolder top_;
  const std::filesystem::path reference_ = top_ / "reference.pt";
  int runs_ = 0;
};

const std::vector<Phase> kPhases = {Phase::kForward,   Phase::kBackward,  Phase::kBetween, Phase::kInStep,
                                    Phase::kInOneStep, Phase::kAfterStep, Phase::kInSave};

TEST(FsdpProcess, AfterADeathInAnyPhaseAJobResumesToTheBit) {
  const HostOfRank one{"a", "a", "a"}, several{"a", "a", "b", "b"};
  int runs = 0;
  for (const auto& hosts : {one, several}) {
    Campaign campaign({.hosts = hosts});
    for (int round = 0; round < (full_run() ? 9 : 1); ++round)
      for (const Phase phase : kPhases) {
        if (!full_run() && (static_cast<int>(phase) % 2 == 0) == (hosts == one)) continue;  // each in one of the two
        const Death kill{phase, runs % static_cast<int>(hosts.size()), 1 + runs % 3};
        campaign.kill_and_resume(kill, ++runs % 2 == 0);
      }
    // Reductions of gradients, the meetings around an update, and those of a snapshot.
    for (int round = 0; round < (full_run() ? 16 : 2); ++round) {
      const Death kill{Phase::kInCollective, runs % static_cast<int>(hosts.size()), 0};
      const auto operation = static_cast<uint64_t>(5 + 7 * runs % 26);
      const auto phase = std::vector{FaultPhase::kStart, FaultPhase::kPosted, FaultPhase::kMiddle,
                                     FaultPhase::kEnd}[static_cast<size_t>(round + 1) % 4];
      SCOPED_TRACE(text("operation ", operation, ", ", static_cast<int>(phase)));
      campaign.kill_and_resume(kill, ++runs % 2 == 0, in_collective(kill.victim, operation, phase));
    }
  }
}

// The same where parameters are gathered. Each rank sends what others lack, and receives what it lacks, in forward()
// and in backward(); it may die in the middle of that as well.
TEST(FsdpFullShardProcess, AfterADeathInAnyPhaseAJobResumesToTheBit) {
  Campaign campaign({.hosts = {"a", "a", "b", "b"}, .options = full()});
  int runs = 0;
  for (int round = 0; round < (full_run() ? 3 : 1); ++round) {
    for (const Phase phase : kPhases) {
      if (!full_run() && phase != Phase::kForward && phase != Phase::kInSave) continue;
      const Death kill{phase, runs % 4, 1 + runs % 3};
      campaign.kill_and_resume(kill, ++runs % 2 == 0);
    }
    const Death in_gather{Phase::kInGather, runs % 4, 1};
    campaign.kill_and_resume(in_gather, ++runs % 2 == 0);
    for (const FaultPhase phase : {FaultPhase::kStart, FaultPhase::kPosted, FaultPhase::kMiddle, FaultPhase::kEnd}) {
      if (!full_run() && phase != FaultPhase::kPosted) continue;
      const Death in_unit{Phase::kInUnitGather, runs % 4, 0};
      const auto operation = static_cast<uint64_t>(1 + 2 * (runs % 5));
      SCOPED_TRACE(text("operation ", operation, ", ", static_cast<int>(phase)));
      campaign.kill_and_resume(in_unit, ++runs % 2 == 0, in_gather_of_a_unit(operation, phase));
    }
  }
}

}  // namespace
}  // namespace muster::test
