// Trainings whose ranks are processes, killed and stopped at random places, go on as if nothing had been: every step's
// samples, loss and random numbers, and the parameters at the end, are those of a training that nobody disturbed.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/data/datasets/base.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "base/text.h"
#include "checkpoint/container.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/muster.h"
#include "muster/optim/autocast.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/lr_scheduler.h"
#include "support/forked.h"
#include "support/full_run.h"
#include "support/kill_while_saving.h"
#include "support/memory_peak.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kSteps = 40, kEvery = 6, kBatch = 3, kSamples = 42;  // 7 steps per epoch
constexpr int64_t kOverflowAt = 21;

struct Numbers : torch::data::datasets::BatchDataset<Numbers, std::vector<size_t>> {
  std::vector<size_t> get_batch(at::ArrayRef<size_t> request) override { return request.vec(); }
  std::optional<size_t> size() const override { return kSamples; }
};

uint64_t sum_of(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  return checkpoint::checksum({static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()});
}

// What happens to the training on the way.
struct Disturbance {
  enum Kind { kNone, kKill, kKillInCollective, kTerm, kFullFile } kind = kNone;
  int rank = 0;
  int64_t step = 0;  // within this one; for kKillInCollective the number of the operation
  int place = 0;     // of the step: before, after the gradients, after the optimizer
  bool asynchronous = false;

  friend std::ostream& operator<<(std::ostream& out, const Disturbance& d) {
    return out << "kind " << d.kind << ", rank " << d.rank << ", step " << d.step << ", place " << d.place
               << (d.asynchronous ? ", asynchronous" : "");
  }
};

// A line for each step that a rank has done, "step: samples, loss, random numbers after it", and one for the end.
std::map<std::string, std::string> lines_of(const fs::path& path) {
  std::map<std::string, std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.back() != '.') continue;  // torn by the kill
    const auto [known, is_new] = lines.emplace(line.substr(0, colon), line);
    EXPECT_EQ(known->second, line) << "done twice, differently";
  }
  return lines;
}

std::string train(World& world, const fs::path& folder, bool sharded, const Disturbance& disturbance) {
  const World::Scope scope(world);
  at::set_num_threads(1);
  const bool mine = disturbance.rank == world.rank();
  const auto disturb = [&](int64_t step, int place) {
    if (!mine || step != disturbance.step || place != disturbance.place) return;
    if (disturbance.kind == Disturbance::kKill) ::raise(SIGKILL);
    if (disturbance.kind == Disturbance::kTerm) ::raise(SIGTERM);
  };
  if (mine && disturbance.kind == Disturbance::kFullFile) {
    const rlimit limit{static_cast<rlim_t>(disturbance.step), RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);  // SIGXFSZ kills in the middle of a write
  }
  torch::manual_seed(static_cast<uint64_t>(5 + world.rank()));
  torch::nn::Sequential net(torch::nn::Linear(kSamples, 20), torch::nn::BatchNorm1d(20), torch::nn::ReLU(),
                            torch::nn::Dropout(0.3), torch::nn::Linear(20, 4));
  DistributedDataParallel ddp(net);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (sharded) {
    optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), 0.01);
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  // All that changes from step to step: half precision with its scale, the rate, averages, and threads that read ahead.
  DistributedSampler sampler(kSamples, {.seed = 8});
  PrefetchLoader loader(Numbers(), sampler, {.batch_size = kBatch, .workers = 2});
  GradScaler scaler({.init_scale = 4096, .growth_interval = 9});
  optim::OneCycleLR schedule(*optimizer, {.max_lr = sharded ? 0.03 : 0.2, .total_steps = kSteps});
  AveragedModel averages(net, {.decay = 0.9, .average_buffers = true});

  double loss_sum = 0;
  Snapshot snapshot(
      {.folder = folder / "snapshots", .every = kEvery, .sharded = sharded, .asynchronous = disturbance.asynchronous});
  snapshot.add("model", net).add("optimizer", *optimizer).add("loader", loader).add("loss sum", loss_sum);
  snapshot.add("scaler", scaler, {.per_rank = false}).add("schedule", schedule).add("averages", averages);
  std::ofstream log(folder / text("rank-", world.rank()), std::ios::app);
  int64_t step = snapshot.restore();
  const int64_t an_epoch = kSamples / kRanks / kBatch;
  for (auto epoch = static_cast<uint64_t>(std::max<int64_t>(step - 1, 0) / an_epoch); step < kSteps; ++epoch) {
    sampler.set_epoch(epoch);
    for (const auto& batch : loader) {
      disturb(step, 0);
      auto x = torch::rand({kBatch, kSamples});
      for (int64_t i = 0; i < kBatch; ++i) x[i][static_cast<int64_t>(batch[static_cast<size_t>(i)])] = 3;
      optimizer->zero_grad();
      torch::Tensor loss;
      {
        const Autocast autocast(torch::kBFloat16);
        loss = ddp(x).to(torch::kFloat).square().mean();
      }
      // In one step the gradients are infinite, and the optimizer keeps its parameters.
      scaler.scale(step == kOverflowAt ? loss * 1e38 : loss).backward();
      disturb(step, 1);
      EXPECT_EQ(scaler.step(*optimizer), step != kOverflowAt);
      scaler.update();
      schedule.step();
      averages.update();
      loss_sum += loss.item<double>();
      ++step;
      log << step << ": " << join(batch, " ") << " " << std::hexfloat << loss_sum << " "
          << sum_of(at::detail::getDefaultCPUGenerator().get_state()) << "." << std::endl;
      disturb(step - 1, 2);
      if (snapshot.step(step)) return text("stopped after ", step);
      if (step == kSteps) break;
    }
  }
  log << "end:";
  for (const auto& parameter : net->named_parameters())
    log << " " << sum_of(parameter.value()) << " " << sum_of(averages.average(parameter.key()));
  for (const auto& parameter : net->parameters()) {
    const auto& state = *optimizer->state().at(parameter.unsafeGetTensorImpl());
    if (sharded) {
      const auto& adam = static_cast<const torch::optim::AdamParamState&>(state);
      log << " " << adam.step() << " " << sum_of(adam.exp_avg()) << " " << sum_of(adam.exp_avg_sq());
    } else {
      log << " " << sum_of(static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer());
    }
  }
  if (world.rank() == 0)  // the others' are their own until the next forward
    for (const auto& buffer : net->buffers()) log << " " << sum_of(buffer);
  log << "." << std::endl;
  return "done";
}

class SnapshotProcess : public testing::Test {
 protected:
  SnapshotProcess() {
    std::string pattern = (fs::temp_directory_path() / "snapshot-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~SnapshotProcess() override { fs::remove_all(folder_); }

  std::vector<ForkedRanks::End> run(const fs::path& folder, bool sharded, const Disturbance& disturbance) const {
    fs::create_directories(folder);
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
      WorldOptions options{.timeout = kPatience};
      if (disturbance.kind == Disturbance::kKillInCollective)
        options.faults.add({.action = FaultAction::kKill,
                            .rank = disturbance.rank,
                            .operation = static_cast<uint64_t>(disturbance.step),
                            .phase = static_cast<FaultPhase>(disturbance.place)});
      auto world = job.join(rank, kRanks, options);
      try {
        return train(world, folder, sharded, disturbance);
      } catch (const PeerLost&) {
        return "lost";
      } catch (const Aborted&) {
        return "lost";
      }
    });
    return ranks.wait_all(patience());
  }
  static void expect_all(const std::vector<ForkedRanks::End>& ends, const std::string& said) {
    for (const auto& end : ends) EXPECT_TRUE(end.exited && end.status == 0 && end.said == said) << end.said;
  }
  // The same lines in both, none missing.
  static void expect_same(const fs::path& reference, const fs::path& folder) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto name = text("rank-", rank);
      const auto expected = lines_of(reference / name), found = lines_of(folder / name);
      EXPECT_EQ(expected.size(), static_cast<size_t>(kSteps) + 1);
      for (const auto& [step, line] : expected)
        EXPECT_TRUE(found.contains(step) && found.at(step) == line) << name << " has not: " << line;
      EXPECT_EQ(found.size(), expected.size());
    }
  }

  fs::path folder_;
};

// Ten stops and twenty kills, of which half are in the middle of a collective.
TEST_F(SnapshotProcess, ThirtyRandomEndsChangeNothing) {
  const char* given = std::getenv("MUSTER_TEST_SEED");
  const auto seed = given ? std::stoul(given) : std::random_device()();
  std::cout << "MUSTER_TEST_SEED=" << seed << std::endl;
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (const bool sharded : {false, true}) {
    const auto reference = folder_ / text("whole-", sharded);
    expect_all(run(reference, sharded, {}), "done");
    for (int i = 0; i < 15; ++i) {
      Disturbance disturbance{.rank = static_cast<int>(below(kRanks)), .step = below(kSteps)};
      disturbance.place = static_cast<int>(below(3));
      disturbance.kind = i % 3 == 0 ? Disturbance::kTerm : Disturbance::kKill;
      disturbance.asynchronous = i >= 8;
      if (i % 6 == 2 || i % 6 == 4) {
        disturbance.kind = Disturbance::kKillInCollective;
        disturbance.step = below(2 * kSteps);  // each step has at least two
        disturbance.place = static_cast<int>(below(4));
      }
      SCOPED_TRACE(text("sharded ", sharded, ", ", disturbance));
      const auto folder = folder_ / text("run-", sharded, "-", i);
      const auto ends = run(folder, sharded, disturbance);
      const auto& struck = ends[static_cast<size_t>(disturbance.rank)];
      if (disturbance.kind == Disturbance::kTerm) {
        expect_all(ends, text("stopped after ", disturbance.step + 1));
      } else {
        EXPECT_EQ(struck.signal, SIGKILL) << struck.said;
        EXPECT_EQ(ends[static_cast<size_t>(1 - disturbance.rank)].said, "lost");
      }
      expect_all(run(folder, sharded, {}), "done");
      expect_same(reference, folder);
      if (HasFailure()) return;
    }
  }
}

// A rank dies in the middle of writing its file, at another byte each time.
TEST_F(SnapshotProcess, ADeathWhileWritingLeavesTheOldSnapshots) {
  for (const bool sharded : {false, true}) {
    const auto reference = folder_ / text("whole-", sharded);
    expect_all(run(reference, sharded, {}), "done");
    for (const int64_t bytes : {1000, 2500, 4000, 5000}) {  // more than the test's own file has until then
      SCOPED_TRACE(text("sharded ", sharded, ", ", bytes));
      const auto folder = folder_ / text("run-", sharded, "-", bytes);
      // Two snapshots, before the one that is torn.
      expect_all(run(folder, sharded, {.kind = Disturbance::kTerm, .rank = 1, .step = 14}), "stopped after 15");
      const int struck = sharded ? 1 : 0;
      for (int rank = 0; rank < kRanks; ++rank) fs::rename(folder / text("rank-", rank), folder / "aside");
      const auto ends = run(folder, sharded, {.kind = Disturbance::kFullFile, .rank = struck, .step = bytes});
      EXPECT_EQ(ends[static_cast<size_t>(struck)].signal, SIGXFSZ) << ends[static_cast<size_t>(struck)].said;
      EXPECT_EQ(ends[static_cast<size_t>(1 - struck)].said, "lost");
      expect_all(run(folder, sharded, {}), "done");
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto name = text("rank-", rank);
        const auto expected = lines_of(reference / name);
        const auto found = lines_of(folder / name);
        for (const auto& [step, line] : found) EXPECT_EQ(expected.at(step), line);
        EXPECT_TRUE(found.contains("end"));
        EXPECT_TRUE(found.contains("16"));
        EXPECT_FALSE(found.contains("15"));  // that was in the snapshot
      }
      for (const auto& entry : fs::directory_iterator(folder / "snapshots"))
        EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
  }
}

// Ranks that do nothing but save are killed at any moment. The next ones find the newest snapshot that is complete: the
// last that save() has returned for, or one that was complete before rank 0 could say so. All of its numbers are those
// of its step.
TEST_F(SnapshotProcess, AKillWhileSavingCostsAtMostTheSnapshotUnderWay) {
  const int kills = full_run() ? 200 : 12;
  std::mt19937 random(11);
  struct Last {
    int64_t saved = 0, more = 0;  // as far as the ranks had told; and how many more may be complete
  };
  std::map<bool, Last> last;
  for (int i = 0; i < kills; ++i) {
    const bool sharded = i % 2 == 0, asynchronous = i % 3 == 0;
    SCOPED_TRACE(text("kill ", i, sharded ? ", sharded" : "", asynchronous ? ", asynchronous" : ""));
    const auto folder = folder_ / (sharded ? "sharded" : "whole");  // each goes on where the one before it was killed
    const SharedNumbers numbers(3);
    std::atomic<int64_t>&restored = numbers[0], &saved = numbers[1], &wrong = numbers[2];
    restored = -1;
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
      auto world = job.join(rank, kRanks, {.timeout = kPatience});
      const World::Scope scope(world);
      torch::nn::Sequential net(torch::nn::Linear(300, 300), torch::nn::Linear(300, 900));
      const auto set_all = [&](double value) {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.fill_(value);
      };
      set_all(0);
      try {
        Snapshot snapshot({.folder = folder, .sharded = sharded, .asynchronous = asynchronous});
        snapshot.add("model", net);
        int64_t step = snapshot.restore();
        for (const auto& parameter : net->parameters())
          if (!parameter.eq(static_cast<double>(step)).all().item<bool>()) wrong = 1;
        restored = step;
        for (;;) {
          set_all(static_cast<double>(++step));
          snapshot.save(step);  // if it is asynchronous, the one before it is complete now
          if (rank == 0) saved = asynchronous ? step - 1 : step;
        }
      } catch (const PeerLost&) {
        return "lost";
      } catch (const Aborted&) {
        return "lost";
      }
    });
    ASSERT_NO_FATAL_FAILURE(kill_while_saving(ranks, i / 2 % kRanks, restored, saved, random));
    EXPECT_EQ(wrong, 0);
    EXPECT_GE(restored, last[sharded].saved);
    EXPECT_LE(restored, last[sharded].saved + last[sharded].more);
    last[sharded] = {saved, asynchronous ? 2 : 1};
    if (HasFailure()) return;
  }
}

TEST_F(SnapshotProcess, NeitherSavingNorRestoringNeedsASecondCopy) {
  constexpr int64_t kWidth = 4096;
  constexpr size_t kAll = 2 * kWidth * kWidth * sizeof(float);  // 128 MiB
  for (const bool sharded : {true, false}) {
    SCOPED_TRACE(sharded);
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&](int rank) -> std::string {
      auto world = job.join(rank, kRanks, {.timeout = kPatience});
      const World::Scope scope(world);
      torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), torch::nn::Linear(kWidth, kWidth));
      const SnapshotOptions options{.folder = folder_ / text("of-", sharded), .sharded = sharded};
      Snapshot first(options), second(options);
      first.add("model", net);
      second.add("model", net);
      EXPECT_EQ(first.restore(), 0);
      EXPECT_LT(peak_of([&] { first.save(1); }), kAll / 4);
      EXPECT_LT(peak_of([&] { EXPECT_EQ(second.restore(), 1); }), kAll / 4);
      return "done";
    });
    expect_all(ranks.wait_all(patience()), "done");
  }
}

// From outside, as schedulers do it: to one rank, to both, and twice.
TEST_F(SnapshotProcess, SigtermFromOutsideStopsAll) {
  for (const int rank : {0, 1, kRanks}) {
    const auto folder = folder_ / text("run-", rank);
    fs::create_directories(folder);
    const ForkedJob job;
    ForkedRanks ranks(kRanks, [&](int own) -> std::string {
      const StopSignal until_the_end;  // the second signal may come after the snapshot's own has gone
      auto world = job.join(own, kRanks);
      const World::Scope scope(world);
      int64_t number = 0;
      Snapshot snapshot({.folder = folder});
      snapshot.add("number", number);
      snapshot.restore();
      if (own == 0) world.store().set("ready", "yes");
      for (number = 1;; ++number)
        if (snapshot.step(number)) return text("stopped after ", number);
    });
    job.store()->get("ready", patience());
    for (int own = 0; own < kRanks; ++own)
      if (rank == own || rank == kRanks)
        for (int i = 0; i < 2; ++i) ranks.signal(own, SIGTERM);
    const auto ends = ranks.wait_all(patience());
    for (const auto& end : ends) {
      EXPECT_TRUE(end.exited && end.status == 0) << end.said;
      EXPECT_EQ(end.said, ends[0].said);
      EXPECT_TRUE(end.said.starts_with("stopped after ")) << end.said;
    }
  }
}

}  // namespace
}  // namespace muster::test
