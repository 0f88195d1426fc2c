// A training with DdpOptions::reproducible is killed and goes on, each time on another number of ranks: every step's
// samples, losses, scale and parameters are those of a training of one process that nobody disturbed.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>

#include "base/text.h"
#include "launch/jobs/ledger_check.h"
#include "multiprocess/reproducible_fixture.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/data/ledger.h"
#include "muster/data/prefetch_loader.h"
#include "muster/data/sampler.h"
#include "muster/optim/autocast.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/lr_scheduler.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/averaged_model.h"

namespace muster::test {
namespace {

// The samples of a batch, and a random number that its worker has drawn.
struct ShardBatch {
  std::vector<size_t> samples;
  double drawn = 0;
};
ShardBatch fetch_for_shard(std::vector<size_t> samples, at::Generator& generator) {
  return {std::move(samples), torch::rand({}, generator).item<double>()};
}

// The batches of one shard, which two threads fetch ahead.
class ShardLoader {
 public:
  static constexpr int64_t kBatches = 6;  // of an epoch
  static constexpr size_t kSamples = kReproducibleShards * kRowsOfShard * kBatches;
  explicit ShardLoader(int shard)
      : sampler_(kSamples, {.num_replicas = kReproducibleShards, .rank = shard}),
        loader_(&fetch_for_shard, sampler_, {.batch_size = kRowsOfShard, .workers = 2}) {}
  const ShardBatch& next(int64_t step) {
    if (at_) ++*at_;
    if (!at_ || *at_ == std::default_sentinel) {
      sampler_.set_epoch(static_cast<uint64_t>(step / kBatches));
      at_.emplace(loader_.begin());
    }
    return **at_;
  }
  void save(torch::serialize::OutputArchive& archive) const { loader_.save(archive); }
  void load(torch::serialize::InputArchive& archive) {
    at_.reset();
    loader_.load(archive);
  }

 private:
  using Fetch = ShardBatch (*)(std::vector<size_t>, at::Generator&);
  using Loader = PrefetchLoader<Fetch, DistributedSampler>;
  DistributedSampler sampler_;
  Loader loader_;
  std::optional<Loader::Iterator> at_;
};

// All shards are at the same place, so each loads what any of them has saved.
struct ShardLoaders {
  std::map<int, ShardLoader> of_shard;
  void save(torch::serialize::OutputArchive& archive) const { of_shard.begin()->second.save(archive); }
  void load(torch::serialize::InputArchive& archive) {
    for (auto& [shard, loader] : of_shard) loader.load(archive);
  }
};

// Where a rank kills itself: so many steps after the snapshot with which it goes on, and at a place within the step.
struct KillOfRank {
  enum Place { kNever, kInForward, kAfterBackward, kAfterStep, kAfterSnapshot } place = kNever;
  int rank = 0;
  int64_t steps = 0;
};

std::filesystem::path ledger_of(std::filesystem::path folder) { return folder += ".ledger"; }

// Trains from the newest snapshot on until step `last`, with all that changes from step to step: a loss under Autocast
// that is scaled, and in one step infinite; a schedule; averages of parameters; threads that read ahead. Appends a line
// per step and shard to the file of the shard, and one per step to that of the losses.
std::string goes_on(World& world, const std::filesystem::path& folder, int64_t last, const KillOfRank& kill = {}) {
  torch::manual_seed(5 + world.rank());
  at::set_num_threads(1);
  std::filesystem::create_directories(folder);
  const auto net = std::make_shared<Images>();
  DistributedDataParallel<Images> ddp(net, {.reproducible = {.shards = kReproducibleShards, .seed = 3}});
  muster::AdamW adamw(net->parameters(), {.lr = 0.01});
  GradScaler scaler({.init_scale = 4096, .growth_interval = 3});
  optim::OneCycleLR schedule(adamw, {.max_lr = 0.01, .total_steps = 40});
  AveragedModel averages(net, {.decay = 0.8});
  ShardLoaders loaders;
  for (const int shard : ddp.shards()) loaders.of_shard.try_emplace(shard, shard);
  Snapshot snapshot({.folder = folder / "snapshots", .every = 3, .default_generator = false});
  snapshot.add("net", net).add("adamw", adamw).add("schedule", schedule, {.per_rank = false});
  snapshot.add("scaler", scaler, {.per_rank = false}).add("averages", averages, {.per_rank = false});
  snapshot.add("loaders", loaders, {.per_rank = false});
  int64_t step = snapshot.restore();
  Ledger ledger(ledger_of(folder), {.dataset_size = ShardLoader::kSamples, .steps = step});
  const int64_t kill_in = step + kill.steps;
  const auto dies = [&](KillOfRank::Place place) {
    if (kill.place == place && kill.rank == world.rank() && step == kill_in) ::raise(SIGKILL);
  };
  const auto write = [&](const std::string& file, const auto&... parts) {
    std::ofstream(folder / file, std::ios::app) << text(step, ":", parts..., ".\n");
  };
  while (step < last) {
    adamw.zero_grad();
    const auto loss_of = [&](int shard) {
      const ShardBatch& batch = loaders.of_shard.at(shard).next(step);
      write(text("shard-", shard), " ", join(batch.samples, " "), " ", batch.drawn);
      ledger.enter(static_cast<uint64_t>(step / ShardLoader::kBatches), batch.samples);
      dies(KillOfRank::kInForward);
      const Autocast autocast(torch::kBFloat16);
      const Tensor samples = torch::tensor(std::vector<int64_t>(batch.samples.begin(), batch.samples.end()));
      const double factor = step == 4 && shard == 5 ? 1e38 : 1 + batch.drawn;
      return scaler.scale(ddp->forward(samples).to(torch::kFloat) * factor);
    };
    const Tensor loss = ddp.backward_by_shards(static_cast<uint64_t>(step), loss_of);
    dies(KillOfRank::kAfterBackward);
    const bool stepped = scaler.step(adamw);
    EXPECT_EQ(stepped, step != 4);
    scaler.update();
    ledger.step();
    schedule.step();
    averages.update();
    dies(KillOfRank::kAfterStep);
    if (world.rank() == 0)
      write("losses", " ", std::bit_cast<uint64_t>(loss.item<double>()), " ", scaler.get_scale(), " ", hash_of(*net));
    if (snapshot.step(step + 1)) return "stopped";
    dies(KillOfRank::kAfterSnapshot);
    ++step;
  }
  snapshot.save(last);
  uint64_t states = 0;
  for (const auto& [name, tensor] : adamw.state_dict()) add_to_hash(states, tensor);
  const std::string hash = text(hash_of(*net), " ", states);
  const auto averaged = averages.in_use();
  return hash + " " + hash_of(*net);
}

class ReproducibleResumeProcess : public testing::Test {
 protected:
  ~ReproducibleResumeProcess() override { std::filesystem::remove_all(base_); }
  // By file, the lines of a training. Those of a step that was done twice are one line only if they are equal.
  static std::map<std::string, std::set<std::string>> lines_of(const std::filesystem::path& folder) {
    std::map<std::string, std::set<std::string>> lines;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) lines[entry.path().filename()].insert(line);
    }
    return lines;
  }

  const std::filesystem::path base_ = std::filesystem::path(testing::TempDir()) / text("reproducible-", ::getpid());
};

TEST_F(ReproducibleResumeProcess, ATrainingGoesOnOnAnotherNumberOfRanks) {
  const auto run = [&](const char* name, const HostOfRank& hosts, int64_t last) {
    return same_words(in_processes(hosts, [&](World& world) { return goes_on(world, base_ / name, last); }));
  };
  const std::string whole = run("whole", {"a"}, 12);
  run("parts", {"a", "a"}, 4);
  run("parts", {"a", "a", "b", "b"}, 9);
  EXPECT_EQ(run("parts", {"a"}, 12), whole);
  EXPECT_EQ(run("other", {"a", "b", "a", "b"}, 12), whole);
  EXPECT_EQ(lines_of(base_ / "parts"), lines_of(base_ / "whole"));
  EXPECT_EQ(lines_of(base_ / "other"), lines_of(base_ / "whole"));
}

TEST_F(ReproducibleResumeProcess, KillsAndOtherNumbersOfRanksChangeNothing) {
  constexpr int64_t kSteps = 3 * ShardLoader::kBatches;
  const char* given = std::getenv("MUSTER_TEST_SEED");
  const auto seed = given ? std::stoul(given) : std::random_device()();
  std::cout << "MUSTER_TEST_SEED=" << seed << std::endl;
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  // As often as it is to be killed, on 1, 2, 4 or 8 ranks. A later kill may come after the last step.
  int killed = 0;
  const auto train = [&](const std::string& name, int kills) {
    for (int attempt = 0;; ++attempt) {
      const int ranks = 1 << below(4);
      KillOfRank kill;
      if (attempt < kills)
        kill = {.place = static_cast<KillOfRank::Place>(1 + below(4)), .rank = below(ranks), .steps = below(6)};
      SCOPED_TRACE(text("attempt ", attempt, ", ", ranks, " ranks: a kill of rank ", kill.rank, " after ", kill.steps,
                        " steps, place ", static_cast<int>(kill.place)));
      const auto ends = in_processes(HostOfRank(static_cast<size_t>(ranks), "a"), [&](World& world) -> std::string {
        try {
          return goes_on(world, base_ / name, kSteps, kill);
        } catch (const PeerLost& lost) {
          EXPECT_EQ(lost.rank(), kill.rank);
          return "lost";
        }
      });
      if (ends[static_cast<size_t>(kill.rank)].signal == 0) {
        EXPECT_GE(attempt, std::min(kills, 3));
        return same_words(ends);
      }
      ++killed;
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == kill.rank) continue;
        EXPECT_EQ(ends[static_cast<size_t>(rank)].said, "lost");
      }
      if (HasFailure()) return std::string();
    }
  };
  const std::string whole = train("whole", 0);
  const auto lines = lines_of(base_ / "whole");
  EXPECT_EQ(lines.size(), size_t{kReproducibleShards + 1});
  for (const auto& [name, its] : lines) EXPECT_EQ(its.size(), size_t{kSteps}) << name;
  const int enough = full_run() ? 20 : 3;
  for (int i = 0; killed < enough && !HasFailure(); ++i) {
    const auto name = text("run-", i);
    EXPECT_EQ(train(name, 4), whole);
    EXPECT_EQ(lines_of(base_ / name), lines);
    const auto entered = launch::check_ledger({ledger_of(base_ / name).string()}, {.epochs = 3});
    EXPECT_TRUE(entered.is_exactly_once) << entered.words;
  }
}

}  // namespace
}  // namespace muster::test
