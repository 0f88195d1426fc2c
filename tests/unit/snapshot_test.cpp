// Snapshots of ranks that are threads: what is restored, from which snapshot, what is refused, and what is reported.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/muster.h"
#include "support/ranks.h"
#include "support/seccomp.h"

namespace muster {
namespace {

// As long as this file exists, no folder can be synced.
std::atomic<const std::filesystem::path*> spoils_folders{nullptr};

}  // namespace
}  // namespace muster

// Replaces the C library's fsync() in this program.
extern "C" int fsync(int fd) {
  const auto* const file = muster::spoils_folders.load();
  struct stat about {};
  if (file && ::fstat(fd, &about) == 0 && S_ISDIR(about.st_mode) && std::filesystem::exists(*file)) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace muster {
namespace {

namespace fs = std::filesystem;
using test::message_of;

struct SnapshotNet : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 200)),
                    b = register_module("b", torch::nn::Linear(200, 200)),
                    c = register_module("c", torch::nn::Linear(200, 3));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(200));
  torch::Tensor forward(torch::Tensor x) { return c(torch::relu(norm(b(torch::relu(a(x)))))); }
};

std::string bits(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  return {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()};
}
std::string bits(const torch::nn::Module& module) {
  std::string all;
  for (const auto& tensor : module.parameters()) all += bits(tensor);
  for (const auto& tensor : module.buffers()) all += bits(tensor);
  return all;
}

std::shared_ptr<SnapshotNet> make_net(uint64_t seed) {  // the default generator is the process's
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return std::make_shared<SnapshotNet>();
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

// One rank's training. All of its parts are in the snapshot.
struct Training {
  explicit Training(const World& world, uint64_t seed, const MakeOptimizer& make)
      : net(make_net(seed)),
        optimizer(make(net->parameters())),
        sampler(41, {.seed = 3}),
        noise(at::make_generator<at::CPUGeneratorImpl>(seed + static_cast<uint64_t>(world.rank()))) {
    counters["seen"] = 0;
  }
  void add_to(Snapshot& snapshot) {
    snapshot.add("model", *net)
        .add("optimizer", *optimizer)
        .add("sampler", sampler)
        .add("noise", noise)
        .add("counters", counters)
        .add("means", means)
        .add("best", best)
        .add("total", total)
        .add("last", last);
  }
  void step() {
    auto places = sampler.next(4);
    if (!places) {
      sampler.set_epoch(sampler.epoch() + 1);
      sampler.reset();
      places = sampler.next(4);
    }
    seen.insert(seen.end(), places->begin(), places->end());
    counters["seen"] += static_cast<int64_t>(places->size());
    const auto x = torch::rand({4, 6}, noise);
    const auto loss = optimizer->step([&] {
      optimizer->zero_grad();
      auto output = net->forward(x).square().mean();
      output.backward();
      for (const auto& parameter : net->parameters()) all_reduce(parameter.grad(), {.op = ReduceOp::AVG});
      output = output.detach().clone();
      all_reduce(output, {.op = ReduceOp::AVG});  // a line search must take the same steps on all ranks
      return output;
    });
    for (const auto& buffer : net->buffers()) broadcast(buffer);  // as DDP does
    best = std::min(best, loss.item<double>());
    means[text("after ", ++total)] = loss.item<double>();
    last.copy_(x);
  }
  // All of this rank's state as bytes, to compare.
  std::string state() const {
    std::ostringstream all;
    all << bits(*net) << bits(noise.get_state()) << bits(last) << total << std::hexfloat << best;
    for (const auto& [name, value] : means) all << name << value;
    for (const auto& [name, value] : counters) all << name << value;
    return std::move(all).str();
  }

  std::shared_ptr<SnapshotNet> net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  DistributedSampler sampler;
  at::Generator noise;
  std::map<std::string, int64_t> counters;
  std::map<std::string, double> means;
  double best = 1e9;
  int64_t total = 0;
  torch::Tensor last = torch::zeros({4, 6});
  std::vector<size_t> seen;
};

template <typename Kind, typename Options>
MakeOptimizer optimizer(Options options) {
  return [options](std::vector<torch::Tensor> parameters) {
    std::vector<torch::optim::OptimizerParamGroup> groups;  // two groups with different options
    groups.emplace_back(std::vector<torch::Tensor>(parameters.begin(), parameters.begin() + 2),
                        std::make_unique<Options>(options));
    groups.emplace_back(std::vector<torch::Tensor>(parameters.begin() + 2, parameters.end()));
    return std::make_unique<Kind>(std::move(groups), options);
  };
}

MakeOptimizer sgd() { return optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9)); }

std::map<std::string, MakeOptimizer> optimizers() {
  using namespace torch::optim;
  return {{"SGD", sgd()},
          {"Adam", optimizer<Adam>(AdamOptions(0.01).amsgrad(true).betas({0.8, 0.9}))},
          {"AdamW", optimizer<AdamW>(AdamWOptions(0.01))},
          {"RMSprop", optimizer<RMSprop>(RMSpropOptions(0.01).centered(true).momentum(0.5))},
          {"Adagrad", optimizer<Adagrad>(AdagradOptions(0.01).lr_decay(0.01))},
          {"LBFGS", [](std::vector<torch::Tensor> parameters) {
             return std::make_unique<LBFGS>(parameters, LBFGSOptions(0.1).max_iter(3).line_search_fn("strong_wolfe"));
           }}};
}

class SnapshotTest : public testing::TestWithParam<bool> {
 protected:
  SnapshotTest() {
    std::string pattern = (fs::temp_directory_path() / "snapshot-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    at::set_num_threads(1);
  }
  ~SnapshotTest() override { fs::remove_all(folder_); }

  static bool sharded() { return GetParam(); }
  SnapshotOptions options(int64_t every = 0) const {
    return {.folder = folder_, .every = every, .sharded = sharded(), .default_generator = false};
  }
  // Makes n ranks save snapshots of these steps.
  void save_steps(int n, const std::vector<int64_t>& steps) const {
    run_threads(n, [&](World& world) {
      Training training(world, 1, sgd());
      Snapshot snapshot(options());
      training.add_to(snapshot);
      snapshot.restore();
      for (const int64_t step : steps) {
        training.total = step;
        snapshot.save(step);
      }
    });
  }
  // What n ranks write to standard error while each runs `each`, after all have restored.
  std::string said_by(int n, int64_t restored, const std::function<void(World&, Training&, Snapshot&)>& each) const {
    testing::internal::CaptureStderr();
    run_threads(n, [&](World& world) {
      Training training(world, 2, sgd());
      Snapshot snapshot(options());
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), restored);
      each(world, training, snapshot);
    });
    // On a busy machine a World reports at its end which rank was late; those lines are not the snapshot's.
    std::istringstream all(testing::internal::GetCapturedStderr());
    std::string said;
    for (std::string line; std::getline(all, line);)
      if (line.find(" came last to ") == std::string::npos) said += line + '\n';
    return said;
  }
  // The step that n ranks restore; checks that the restored state is of the same step.
  int64_t restored(int n) const {
    std::atomic<int64_t> result{-1};
    run_threads(n, [&](World& world) {
      Training training(world, 2, sgd());
      Snapshot snapshot(options());
      training.add_to(snapshot);
      const auto steps = snapshot.restore();
      EXPECT_EQ(training.total, steps);
      if (world.rank() == 0) result = steps;
    });
    return result;
  }
  template <typename Kind>
  std::string restore_error(int n, const std::function<void(Training&, Snapshot&)>& change = {}) const {
    std::vector<std::string> messages(static_cast<size_t>(n));
    run_threads(n, [&](World& world) {
      Training training(world, 2, sgd());
      Snapshot snapshot(options());
      if (change) {
        change(training, snapshot);
      } else {
        training.add_to(snapshot);
      }
      const auto before = training.state();
      messages[static_cast<size_t>(world.rank())] = message_of<Kind>([&] { snapshot.restore(); });
      EXPECT_TRUE(training.state() == before);
    });
    for (const auto& message : messages) EXPECT_EQ(message, messages[0]);
    return messages[0];
  }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.insert(entry.path().filename());
    return names;
  }
  fs::path file(const std::string& part) const {
    for (const auto& name : files())
      if (name.find(part) != std::string::npos) return folder_ / name;
    ADD_FAILURE() << "no " << part << " in " << folder_;
    return {};
  }
  static void flip(const fs::path& path, int64_t byte) {  // a negative `byte` counts from the end
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(byte, byte < 0 ? std::ios::end : std::ios::beg);
    const int was = file.peek();
    file.seekp(byte, byte < 0 ? std::ios::end : std::ios::beg);
    file.put(static_cast<char>(was ^ 1));
  }
  // The file with most of the tensors: of rank 1, or of rank 0 if there is only one file.
  fs::path data_file(int64_t steps) const {
    return file(text("step-", steps, sharded() ? ".shard-1" : ".snapshot.safetensors"));
  }

  fs::path folder_;
};

INSTANTIATE_TEST_SUITE_P(Files, SnapshotTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Sharded" : "One"; });

TEST_P(SnapshotTest, GoesOnToTheBitWithEveryOptimizer) {
  for (const auto& [name, make] : optimizers())
    for (const int n : {1, 3}) {
      SCOPED_TRACE(text(name, " on ", n));
      fs::remove_all(folder_);
      run_threads(n, [&, &make = make](World& world) {
        Training whole(world, 1, make);
        {
          Snapshot snapshot(options());
          whole.add_to(snapshot);
          EXPECT_EQ(snapshot.restore(), 0);
          for (int step = 0; step < 5; ++step) whole.step();
          snapshot.save(5);
        }
        whole.seen.clear();
        for (int step = 0; step < 10; ++step) whole.step();

        Training rest(world, 99, make);
        rest.step();  // makes its own state, which restoring must discard
        rest.counters["other"] = 5;
        rest.seen.clear();
        Snapshot snapshot(options());
        rest.add_to(snapshot);
        EXPECT_EQ(snapshot.restore(), 5);
        for (int step = 0; step < 10; ++step) rest.step();
        EXPECT_EQ(rest.seen, whole.seen);
        EXPECT_EQ(rest.total, 15);
        EXPECT_TRUE(rest.state() == whole.state());
      });
    }
}

// A convolution in channels-last, tied and half parameters, a large buffer, and tensors without elements or dimensions.
struct ManyLayouts : torch::nn::Module {
  explicit ManyLayouts(double value) {
    const torch::NoGradGuard no_grad;
    conv->bias.zero_();  // it is random, and the ranks' models are to be equal
    conv->weight.set_data(torch::full({64, 64, 5, 5}, value).contiguous(torch::MemoryFormat::ChannelsLast));
    for (auto& tensor : parameters()) tensor.add_(torch::arange(tensor.numel(), tensor.options()).view_as(tensor));
    wide.fill_(value);
  }
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(64, 64, 5));
  torch::Tensor large = register_parameter("large", torch::zeros({400, 400}));
  torch::Tensor tied = register_parameter("tied", large);
  torch::Tensor half = register_parameter("half", torch::zeros({300'000}, torch::kBFloat16));
  torch::Tensor none = register_parameter("none", torch::zeros({0, 5}));
  torch::Tensor scalar = register_parameter("scalar", torch::zeros({}));
  torch::Tensor wide = register_buffer("wide", torch::zeros({100'000}, torch::kDouble));
};

// Large tensors come straight into the memory where they stay, others through memory that is used again.
TEST_P(SnapshotTest, TensorsOfEveryLayoutComeBack) {
  for (const bool own_folders : {false, true})  // as if each rank were on a host with its own disk
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(text(ranks, own_folders ? " ranks with folders of their own" : " ranks"));
      fs::remove_all(folder_);
      run_threads(ranks, [&](World& world) {
        SnapshotOptions with = options();
        if (own_folders) with.folder = folder_ / text("rank-", world.rank());
        const auto step = [](ManyLayouts& net, torch::optim::Adam& adam) {
          for (auto& parameter : net.parameters())
            parameter.mutable_grad() = torch::arange(parameter.numel(), parameter.options()).view_as(parameter) + 1;
          adam.step();
        };
        const auto net = std::make_shared<ManyLayouts>(3.0);
        torch::optim::Adam adam(net->parameters());
        step(*net, adam);
        {
          Snapshot snapshot(with);
          snapshot.add("model", net).add("adam", adam);
          EXPECT_EQ(snapshot.restore(), 0);
          snapshot.save(1);
        }
        for (const bool has_states : {false, true}) {
          const auto other = std::make_shared<ManyLayouts>(7.0);
          torch::optim::Adam others_adam(other->parameters());
          if (has_states) step(*other, others_adam);
          const void* const memory = other->large.data_ptr();
          const auto version = other->large._version();
          Snapshot snapshot(with);
          snapshot.add("model", other).add("adam", others_adam);
          EXPECT_EQ(snapshot.restore(), 1);
          EXPECT_EQ(other->large.data_ptr(), memory);
          EXPECT_GT(other->large._version(), version);
          EXPECT_TRUE(other->conv->weight.is_contiguous(torch::MemoryFormat::ChannelsLast));
          for (const auto& named : net->named_parameters()) {
            const torch::Tensor here = other->named_parameters()[named.key()];
            EXPECT_TRUE(torch::equal(here, named.value())) << named.key();
            using State = torch::optim::AdamParamState;
            const auto& ours = static_cast<State&>(*adam.state().at(named.value().unsafeGetTensorImpl()));
            const auto& theirs = static_cast<State&>(*others_adam.state().at(here.unsafeGetTensorImpl()));
            EXPECT_EQ(theirs.step(), ours.step());
            EXPECT_TRUE(torch::equal(theirs.exp_avg(), ours.exp_avg())) << named.key();
            EXPECT_TRUE(torch::equal(theirs.exp_avg_sq(), ours.exp_avg_sq())) << named.key();
            if (has_states) {
              EXPECT_EQ(theirs.exp_avg().strides(), ours.exp_avg().strides()) << named.key();
            }
          }
          EXPECT_TRUE(torch::equal(other->wide, net->wide));
        }
      });
    }
}

// Objects that read themselves come first. This one damages the file, which has been verified and is read again after
// that.
struct Saboteur {
  std::function<void()> when_loaded = [] {};
  void save(torch::serialize::OutputArchive& archive) const { archive.write("nothing", torch::zeros({1})); }
  void load(torch::serialize::InputArchive&) const { when_loaded(); }
};

TEST_P(SnapshotTest, AFileThatChangesWhileItIsReadIsRefusedByAll) {
  for (const bool own_folders : {false, true}) {
    SCOPED_TRACE(own_folders);
    fs::remove_all(folder_);
    run_threads(2, [&](World& world) {
      SnapshotOptions with = options();
      if (own_folders) with.folder = folder_ / text("rank-", world.rank());
      torch::nn::Linear net(300, 300);
      Saboteur saboteur;
      Snapshot snapshot(with);
      snapshot.add("saboteur", saboteur).add("model", net);
      EXPECT_EQ(snapshot.restore(), 0);
      snapshot.save(1);
      barrier();
      saboteur.when_loaded = [&] {
        barrier();
        if (world.rank() == 0)
          for (const auto& entry : fs::recursive_directory_iterator(folder_))
            if (entry.is_regular_file() && entry.file_size() > 300'000) flip(entry.path(), -100'000);
        barrier();
      };
      const auto message = message_of<CorruptError>([&] { snapshot.restore(); });
      EXPECT_CONTAINS(message, "tensor 'model/weight' is not as it was written");
      barrier();  // all ranks have taken part in everything
    });
  }
}

TEST_P(SnapshotTest, KeepsTheNewestTwo) {
  save_steps(2, {3, 10, 9, 40});
  std::set<std::string> snapshots;
  size_t shards = 0;
  for (const auto& name : files())
    if (name.find("shard") == std::string::npos) {
      snapshots.insert(name);
    } else {
      ++shards;
    }
  EXPECT_EQ(snapshots, (std::set<std::string>{"step-10.snapshot.safetensors", "step-40.snapshot.safetensors"}));
  EXPECT_EQ(shards, sharded() ? 4u : 0u);
  EXPECT_EQ(restored(2), 40);
}

TEST_P(SnapshotTest, AStepCanBeSavedAgain) {
  save_steps(2, {3, 10, 10, 10});
  EXPECT_EQ(files().size(), sharded() ? 6u : 2u);
  EXPECT_EQ(restored(2), 10);
}

TEST_P(SnapshotTest, LeavesAloneWhatIsNotItsOwnAndRemovesWhatTheDeadLeft) {
  const std::set<std::string> others{"notes.txt", "step-x.snapshot.safetensors", "step-03.snapshot.safetensors",
                                     "step-5.snapshot.safetensors.bak", "step-5.snapshot.safetensors.xyz.tmp"};
  const std::set<std::string> dead{"step-5.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-0-of-2.ab12.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-1-of-2.ab12.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-7-of-8.ab12.snapshot.safetensors.0a1b2c3d.tmp"};
  for (const auto& names : {others, dead})
    for (const auto& name : names) std::ofstream(folder_ / name) << "x";
  const std::string orphan = "step-5.shard-1-of-2.ab12.snapshot.safetensors";
  std::ofstream(folder_ / orphan) << "x";
  EXPECT_EQ(restored(2), 0);
  auto left = others;
  left.insert(orphan);  // nobody knows yet whether it is needed
  EXPECT_EQ(files(), left);
  save_steps(2, {9});
  EXPECT_FALSE(files().contains(orphan));
  for (const auto& name : others) EXPECT_TRUE(files().contains(name)) << name;
}

TEST_P(SnapshotTest, TheOneBeforeIsUsedByAllWhereOneRankFindsADamage) {
  for (const std::string damage : {"tensor", "header", "torn", "empty", "another", "gone"}) {
    SCOPED_TRACE(damage);
    fs::remove_all(folder_);
    save_steps(2, {10, 20});
    const auto path = data_file(20);
    if (damage == "tensor") flip(path, -100);
    if (damage == "header") flip(path, 80);
    if (damage == "torn") fs::resize_file(path, fs::file_size(path) - 1000);
    if (damage == "empty") fs::resize_file(path, 0);
    if (damage == "another") fs::copy_file(data_file(10), path, fs::copy_options::overwrite_existing);
    if (damage == "gone" && !sharded()) continue;  // then there is no such snapshot
    if (damage == "gone") fs::remove(path);
    testing::internal::CaptureStderr();
    const auto steps = restored(2);
    const auto said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(steps, 10);
    EXPECT_CONTAINS(said, "the snapshot of step 20 is refused: ");
    EXPECT_CONTAINS(said, path.string());
    if (damage == "tensor") {
      EXPECT_CONTAINS(said, ": tensor '");
      EXPECT_CONTAINS(said, ", byte ");
    }
  }
}

TEST_P(SnapshotTest, ADamagedHeaderIsRefusedThatOfAManifestToo) {
  save_steps(2, {10, 20});
  flip(folder_ / "step-20.snapshot.safetensors", 70);
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 10);
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "step-20.snapshot.safetensors, byte 0: the header");
}

TEST_P(SnapshotTest, WhereAllAreDamagedNothingIsRestoredAndNothingBeginsAnew) {
  save_steps(2, {10, 20});
  for (const int64_t step : {10, 20}) flip(data_file(step), -1);
  testing::internal::CaptureStderr();
  const auto message = restore_error<CorruptError>(2);
  testing::internal::GetCapturedStderr();
  for (const int64_t step : {10, 20}) EXPECT_CONTAINS(message, data_file(step).string() + ", byte ");
  EXPECT_CONTAINS(message, "name another folder to begin anew");
}

TEST_P(SnapshotTest, ARefusedOneDoesNotDisplaceGoodOnes) {
  save_steps(2, {10, 20, 30});
  flip(data_file(30), -1);
  testing::internal::CaptureStderr();
  save_steps(2, {25});  // restores 20
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(restored(2), 25);
  flip(data_file(25), -1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 20);
  testing::internal::GetCapturedStderr();
}

TEST_P(SnapshotTest, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  save_steps(2, {10});
  EXPECT_CONTAINS(restore_error<InvalidArgument>(1), "was written by 2 ranks, but this job has 1");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   static int64_t more = 0;
                                                   training.add_to(snapshot);
                                                   snapshot.add("more", more);
                                                 }),
                  "the snapshot has no 'more'");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2, [](Training& training, Snapshot& snapshot) { snapshot.add("model", *training.net); }),
                  "that was not added");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.net->c->weight.set_data(torch::zeros({3, 100}));
                                                   training.add_to(snapshot);
                                                 }),
                  "tensor 'model/c.weight' is Float [3 x 200] in the snapshot, and Float [3 x 100] here");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.optimizer = std::make_unique<torch::optim::SGD>(
                                                       training.net->parameters(), 0.1);
                                                   training.add_to(snapshot);
                                                 }),
                  "'optimizer' has 2 groups of parameters in the snapshot, and 1 here");
}

// A rank that was started again, among others that have trained.
TEST_P(SnapshotTest, RanksMayHaveDifferentStatesBeforeTheyRestore) {
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    snapshot.restore();
    training.step();
    snapshot.save(1);
    const std::string state = training.state();
    Training again(world, 2, sgd());
    Snapshot of_again(options());
    again.add_to(of_again);
    if (world.rank() == 0) {
      for (auto& parameter : again.net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
      again.optimizer->step();
    }
    EXPECT_EQ(of_again.restore(), 1);
    EXPECT_TRUE(again.state() == state);
    EXPECT_EQ(again.optimizer->state().size(), training.optimizer->state().size());
  });
}

TEST_P(SnapshotTest, OtherRanksGoOnWithoutTheDefaultGenerator) {
  const auto with = [&](bool default_generator) {
    SnapshotOptions with = options();
    with.default_generator = default_generator;
    return with;
  };
  run_threads(2, [&](World&) {
    const auto net = make_net(1);
    Snapshot snapshot(with(true));
    snapshot.add("model", *net).restore();
    snapshot.save(10);
  });
  for (const int ranks : {1, 2, 3, 5})
    for (const bool default_generator : {true, false}) {
      SCOPED_TRACE(text(ranks, " ranks, ", default_generator));
      testing::internal::CaptureStderr();
      run_threads(ranks, [&](World&) {
        const auto net = make_net(2), saved = make_net(1);
        Snapshot snapshot(with(default_generator));
        EXPECT_EQ(snapshot.add("model", *net).restore(), 10);
        EXPECT_TRUE(bits(*net) == bits(*saved));
      });
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(said.find("keeps the state of its own default generator") != std::string::npos,
                ranks != 2 && default_generator)
          << said;
    }
}

TEST_P(SnapshotTest, AFolderWithSnapshotsIsNotOverwrittenUnasked) {
  save_steps(2, {10});
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(1); }), "has a snapshot of step 10");
    EXPECT_EQ(snapshot.restore(), 10);
    training.total = 11;
    snapshot.save(11);
  });
  EXPECT_EQ(restored(2), 11);
}

TEST_P(SnapshotTest, RanksThatDisagreeAreTold) {
  run_threads(3, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(5));
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    EXPECT_CONTAINS(message_of<Mismatch>([&] { (void)snapshot.step(world.rank() == 1 ? 4 : 3); }),
                    "the ranks are at different steps, from 3 to 4");
    int64_t odd = 1;
    if (world.rank() == 2) snapshot.add("odd", odd);
    EXPECT_CONTAINS(message_of<Mismatch>([&] { snapshot.save(5); }), "rank 2 and rank 0 have added different things");
  });
  EXPECT_TRUE(files().empty());
}

TEST_P(SnapshotTest, SavesWhenItIsTime) {
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(4));
    training.add_to(snapshot);
    for (int64_t step = snapshot.restore(); step < 9; ++step) {
      training.step();
      EXPECT_FALSE(snapshot.step(step + 1));
    }
  });
  EXPECT_EQ(restored(2), 8);
}

TEST_P(SnapshotTest, OneRanksWishStopsAllAtTheSameStep) {
  for (const int asked : {0, 2}) {
    fs::remove_all(folder_);
    const auto said = said_by(3, 0, [&](World& world, Training& training, Snapshot& snapshot) {
      EXPECT_FALSE(snapshot.step(1));
      EXPECT_FALSE(snapshot.stop_requested());
      if (world.rank() == asked) snapshot.request_stop();
      EXPECT_EQ(snapshot.stop_requested(), world.rank() == asked);
      training.total = 2;
      EXPECT_TRUE(snapshot.step(2));
    });
    EXPECT_EQ(said, text("rank 0: saved step 2 in ", folder_.string(), "; run again to go on\n"));
    EXPECT_EQ(restored(3), 2);
  }
}

// A stop that is requested between epochs (in an evaluation, for example) takes effect there, not after one more step.
TEST_P(SnapshotTest, AWishIsGrantedAtABoundaryThatIsNoStepToo) {
  for (const int asked : {0, 2}) {
    fs::remove_all(folder_);
    const auto said = said_by(3, 0, [&](World& world, Training& training, Snapshot& snapshot) {
      EXPECT_FALSE(snapshot.stop_here(0));
      EXPECT_FALSE(snapshot.step(1));
      training.total = 1;
      EXPECT_FALSE(snapshot.stop_here(1));
      if (world.rank() == asked) snapshot.request_stop();
      EXPECT_TRUE(snapshot.stop_here(1));
    });
    EXPECT_EQ(said, text("rank 0: saved step 1 in ", folder_.string(), "; run again to go on\n"));
    EXPECT_EQ(restored(3), 1);
    said_by(3, 1, [&](World&, Training&, Snapshot& snapshot) {  // before the first step of the next run
      snapshot.request_stop();
      EXPECT_TRUE(snapshot.stop_here(1));
    });
    EXPECT_EQ(restored(3), 1);
  }
}

TEST_P(SnapshotTest, BeforeTheFirstStepThereIsNothingToSave) {
  const auto said = said_by(2, 0, [&](World& world, Training&, Snapshot& snapshot) {
    if (world.rank() == 1) snapshot.request_stop();
    EXPECT_TRUE(snapshot.stop_here(0));
    EXPECT_THROW(static_cast<void>(snapshot.stop_here(-1)), InvalidArgument);
  });
  EXPECT_EQ(said, "rank 0: asked to stop before the first step; there is nothing to save\n");
  EXPECT_TRUE(fs::is_empty(folder_));
}

// A signal that comes before there is a Snapshot, or between two of them, is not lost and kills nothing.
TEST_P(SnapshotTest, ASigtermWaitsForTheNextSnapshotWhereAStopSignalCoversTheWay) {
  std::atomic<int> stopped{0};
  const StopSignal covers;
  EXPECT_FALSE(covers.requested());
  const auto phase = [&](bool expected, bool raise) {
    run_threads(2, [&](World& world) {
      Snapshot snapshot(options());
      Training training(world, 2, sgd());
      training.add_to(snapshot);
      const auto steps = snapshot.restore();
      EXPECT_EQ(snapshot.step(steps + 1), expected);
      if (expected) ++stopped;
    });
    if (raise) ::raise(SIGTERM);
  };
  phase(false, false);
  phase(false, true);
  EXPECT_TRUE(covers.requested());
  phase(true, false);
  EXPECT_EQ(stopped, 2);
}

std::atomic<int> others_signals{0};

TEST_P(SnapshotTest, SigtermIsAWishWhileASnapshotLivesAndWhatItWasBeforeThen) {
  struct sigaction mine {};
  struct sigaction before {};
  mine.sa_handler = [](int) { ++others_signals; };
  others_signals = 0;
  ASSERT_EQ(::sigaction(SIGTERM, &mine, &before), 0);
  run_threads(2, [&](World& world) {
    auto one = std::make_unique<Snapshot>(options()), two = std::make_unique<Snapshot>(options());
    barrier();
    EXPECT_FALSE(one->stop_requested());
    barrier();
    if (world.rank() == 0) ::raise(SIGTERM);
    barrier();
    EXPECT_TRUE(one->stop_requested());
    EXPECT_TRUE(two->stop_requested());
    one.reset();  // not the last
    barrier();
    if (world.rank() == 0) ::raise(SIGTERM);
    barrier();
  });
  EXPECT_EQ(others_signals, 0);
  ::raise(SIGTERM);
  EXPECT_EQ(others_signals, 1);
  run_threads(1, [&](World&) {
    const Snapshot next(options());  // the signals before it were not for it
    EXPECT_FALSE(next.stop_requested());
    auto deaf = options();
    deaf.on_sigterm = false;
    const Snapshot other(deaf);
    ::raise(SIGTERM);
    EXPECT_TRUE(next.stop_requested());
    EXPECT_FALSE(other.stop_requested());
  });
  EXPECT_EQ(others_signals, 1);
  ::sigaction(SIGTERM, &before, nullptr);
}

// While it lives, no file of this process can become longer than `bytes`, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);  // write(2) then fails with EFBIG
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST_P(SnapshotTest, AFullDiskCostsNeitherTheTrainingNorTheOldSnapshot) {
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(2));
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 2;
    EXPECT_FALSE(snapshot.step(2));
    const auto before = files();
    barrier();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      EXPECT_FALSE(snapshot.step(4));
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(5); }), "File too large");
      barrier();
      EXPECT_EQ(files(), before);
      snapshot.request_stop();
      EXPECT_CONTAINS(message_of<Unavailable>([&] { (void)snapshot.step(5); }), "File too large");
      barrier();
    }
    barrier();
    training.total = 6;
    EXPECT_TRUE(snapshot.step(6));
  });
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "no snapshot of step 4: ");
  EXPECT_CONTAINS(said, "The training goes on; the newest snapshot is that of step 2");
  EXPECT_EQ(restored(2), 6);
}

TEST_P(SnapshotTest, KeepsTheBestToo) {
  auto with = options();
  with.keep = 1;
  with.keep_best = 2;
  const std::vector<double> scores{0.5, -1, 0.7, 0.1, 0.6, 0.2};
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    for (int64_t step = 1; step <= std::ssize(scores); ++step) {
      training.total = step;
      snapshot.score(scores[static_cast<size_t>(step - 1)]);
      snapshot.save(step);
    }
    training.total = 7;
    snapshot.save(7);  // without one
    barrier();
    EXPECT_EQ(snapshot.best(), (std::vector<int64_t>{3, 5}));
    for (const double bad : {NAN, INFINITY}) EXPECT_THROW(snapshot.score(bad), InvalidArgument);
  });
  std::set<std::string> snapshots;
  for (const auto& name : files())
    if (name.find("shard") == std::string::npos) snapshots.insert(name);
  EXPECT_EQ(snapshots, (std::set<std::string>{"step-3.snapshot.safetensors", "step-5.snapshot.safetensors",
                                              "step-7.snapshot.safetensors"}));
  EXPECT_EQ(files().size(), sharded() ? 9u : 3u);
  EXPECT_EQ(restored(2), 7);
}

// --- asynchronous ---

// What is stored is what was there when step() returned, whatever the training does while it is written.
TEST_P(SnapshotTest, AnAsynchronousSaveIsOfItsStep) {
  auto with = options(2);
  with.asynchronous = true;
  run_threads(3, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    for (int64_t step = 1; step <= 7; ++step) {
      training.step();  // whose collectives and those of the thread may come in any order
      EXPECT_FALSE(snapshot.step(step));
    }
    const auto before = training.state();
    training.step();
    snapshot.save(8);
    const auto saved = training.state();
    for (int i = 0; i < 3; ++i) training.step();
    snapshot.wait();
    EXPECT_FALSE(before == saved);
    Training again(world, 9, sgd());
    Snapshot second(options());
    again.add_to(second);
    EXPECT_EQ(second.restore(), 8);
    EXPECT_TRUE(again.state() == saved);
  });
  EXPECT_EQ(files().size(), sharded() ? 8u : 2u);  // those of steps 6 and 8
}

// Large enough that it is still being written when the training changes it.
TEST_P(SnapshotTest, AnAsynchronousSaveHasMemoryOfItsOwn) {
  auto with = options();
  with.asynchronous = true;
  run_threads(2, [&](World&) {
    torch::Tensor large = torch::full({16 << 20}, 3.0F), other = torch::full({4 << 20}, 4.0F);
    Snapshot snapshot(with);
    snapshot.add("large", large, {.per_rank = false}).add("other", other);
    for (const int64_t step : {1, 2}) {
      large.fill_(3);
      other.fill_(4);
      snapshot.save(step);
      large.fill_(7);
      other.fill_(8);
      snapshot.wait();
      EXPECT_EQ(snapshot.restore(), step);
      EXPECT_TRUE(large.eq(3).all().item<bool>());
      EXPECT_TRUE(other.eq(4).all().item<bool>());
    }
  });
}

// Threads of this process that write a snapshot.
size_t writers() {
  size_t count = 0;
  std::error_code ended;  // of a thread meanwhile
  for (const auto& task : fs::directory_iterator("/proc/self/task", ended)) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    count += std::getline(file, name) && name == "muster-snapshot" ? 1 : 0;
  }
  return count;
}

// A stop is saved, whatever went wrong before.
TEST_P(SnapshotTest, AStopIsSavedAfterAnAsynchronousFailure) {
  auto with = options(2);
  with.asynchronous = true;
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    snapshot.save(1);  // makes the group of the threads, which needs a file, too
    snapshot.wait();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      EXPECT_FALSE(snapshot.step(2));
      while (writers() > 0) std::this_thread::yield();
      barrier();
    }
    snapshot.request_stop();
    training.total = 3;
    EXPECT_TRUE(snapshot.stop_here(3));
  });
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "no snapshot of step 2: ");
  EXPECT_EQ(restored(2), 3);
}

TEST_P(SnapshotTest, AnAsynchronousSaveIsOverBeforeTheNextAndAtTheEnd) {
  auto with = options();
  with.asynchronous = true;
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    for (const int64_t step : {1, 2, 3}) {
      training.total = step;
      snapshot.save(step);
    }
  });
  EXPECT_EQ(restored(2), 3);
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 3);
    training.total = 4;
    snapshot.save(4);
    EXPECT_EQ(snapshot.restore(), 4);  // waits
    training.total = 5;
    snapshot.save(5);
    if (world.rank() == 1) snapshot.request_stop();
    training.total = 6;
    EXPECT_TRUE(snapshot.step(6));
    EXPECT_TRUE(fs::exists(folder_ / "step-6.snapshot.safetensors"));  // not later
    EXPECT_TRUE(fs::exists(folder_ / "step-5.snapshot.safetensors"));
  });
}

TEST_P(SnapshotTest, WhatGoesWrongAsynchronouslySurfacesAtTheNextCall) {
  auto with = options(2);
  with.asynchronous = true;
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 2;
    EXPECT_FALSE(snapshot.step(2));
    snapshot.wait();
    const auto before = files();
    barrier();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      snapshot.save(4);
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.wait(); }), "File too large");
      snapshot.wait();  // it has been said
      snapshot.save(5);
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(6); }), "File too large");
      EXPECT_FALSE(snapshot.step(6));
      EXPECT_FALSE(snapshot.step(8));  // says it of 6
      snapshot.request_stop();
      EXPECT_CONTAINS(message_of<Unavailable>([&] { (void)snapshot.step(9); }), "File too large");
      barrier();
      EXPECT_EQ(files(), before);
    }
    barrier();
    training.total = 10;
    EXPECT_TRUE(snapshot.step(10));
  });
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "no snapshot of step 6: ");
  EXPECT_CONTAINS(said, "no snapshot of step 8: ");
  EXPECT_EQ(restored(2), 10);
}

// When the last sync fails, everything is already written and renamed: the snapshot may exist after all.
TEST_P(SnapshotTest, AFolderThatCannotBeSyncedTakesNothingFromTheSnapshotInIt) {
  const auto file = folder_ / "step-10.snapshot.safetensors";
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    if (world.rank() == 0) spoils_folders = &file;
    barrier();
    training.total = 10;
    EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(10); }), "cannot sync the folder");
    barrier();
    if (world.rank() == 0) spoils_folders = nullptr;
    barrier();
    training.total = 20;
    snapshot.save(20);
  });
  EXPECT_EQ(files().size(), sharded() ? 6u : 2u);
  EXPECT_EQ(restored(2), 20);
  fs::remove(folder_ / "step-20.snapshot.safetensors");
  EXPECT_EQ(restored(2), 10);
}

// From now on the calling thread cannot list folders; returns false if it still can.
bool lists_no_folders() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getdents64, 0, 1),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EIO),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  return test::filter_calls(code);
}

TEST_P(SnapshotTest, WhereItIsNotKnownWhatIsNeededEverythingStays) {
  bool could_not_list = false;
  testing::internal::CaptureStderr();
  run_threads(3, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 10;
    snapshot.save(10);
    if (world.rank() == 0) could_not_list = lists_no_folders();
    training.total = 20;
    snapshot.save(20);
  });
  const auto said = testing::internal::GetCapturedStderr();
  if (!could_not_list) GTEST_SKIP() << "no filter of system calls here";
  EXPECT_CONTAINS(said, "older snapshots stay in ");
  EXPECT_EQ(restored(3), 20);
}

TEST_P(SnapshotTest, SharesWhatIsSharedAndKeepsApartWhatIsNot) {
  run_threads(2, [&](World& world) {
    const auto rank = static_cast<double>(world.rank());
    auto shared = torch::full({300, 300}, 7.0), apart = torch::full({3}, rank);
    Snapshot snapshot(options());
    snapshot.add("shared", shared, {.per_rank = false}).add("apart", apart);
    snapshot.save(1);
    shared.zero_();
    apart.zero_();
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_TRUE(torch::equal(shared, torch::full({300, 300}, 7.0)));
    EXPECT_TRUE(torch::equal(apart, torch::full({3}, rank)));
  });
  size_t bytes = 0;
  for (const auto& name : files()) bytes += fs::file_size(folder_ / name);
  EXPECT_LT(bytes, 2 * 300 * 300 * 4u);  // once
}

TEST_P(SnapshotTest, AModuleWithoutTensorsIsOneOfThem) {
  run_threads(2, [&](World&) {
    torch::nn::Sequential empty(torch::nn::ReLU{});
    int64_t number = 7;
    Snapshot snapshot(options());
    snapshot.add("empty", *empty).add("number", number);
    snapshot.save(1);
    number = 0;
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_EQ(number, 7);
  });
}

struct Everything {  // everything that an archive of a user's class may hold
  int64_t number = 0;
  std::string words;
  std::vector<torch::Tensor> list;

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("number", c10::IValue(number));
    archive.write("a/b:c%d", c10::IValue(words));
    archive.write("list", c10::IValue(list));
    archive.write("none", c10::IValue());
    archive.write("yes", c10::IValue(true));
    archive.write("ints", c10::IValue(std::vector<int64_t>{1, 2, 3}));
    archive.write("doubles", c10::IValue(std::vector<double>{0.1, -1}));
    archive.write("pair", c10::IValue(std::tuple<double, int64_t>(0.5, 7)));
    torch::serialize::OutputArchive nested(archive.compilation_unit()), empty(archive.compilation_unit());
    nested.write("empty", empty);
    nested.write("tensor", torch::ones({2}, torch::kBFloat16));
    archive.write("nested", nested);
  }
  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      c10::IValue value;
      archive.read(key, value);
      return value;
    };
    number = read("number").toInt();
    words = read("a/b:c%d").toStringRef();
    list = read("list").toTensorVector();
    EXPECT_TRUE(read("none").isNone());
    EXPECT_TRUE(read("yes").toBool());
    EXPECT_EQ(read("ints").toIntVector(), (std::vector<int64_t>{1, 2, 3}));
    EXPECT_EQ(read("doubles").toDoubleVector(), (std::vector<double>{0.1, -1}));
    EXPECT_EQ((read("pair").to<std::tuple<double, int64_t>>()), (std::tuple<double, int64_t>(0.5, 7)));
    torch::serialize::InputArchive nested, empty;
    archive.read("nested", nested);
    nested.read("empty", empty);
    EXPECT_TRUE(empty.keys().empty());
    torch::Tensor tensor;
    nested.read("tensor", tensor);
    EXPECT_TRUE(torch::equal(tensor, torch::ones({2}, torch::kBFloat16)));
  }
};

struct Unstorable {
  void save(torch::serialize::OutputArchive& archive) const {
    c10::Dict<std::string, int64_t> dictionary;
    archive.write("dictionary", c10::IValue(dictionary));
  }
  void load(torch::serialize::InputArchive&) {}
};

TEST_P(SnapshotTest, AUsersClassKeepsAllThatItWrites) {
  run_threads(2, [&](World& world) {
    Everything thing;
    thing.number = 100 + world.rank();
    thing.words = std::string("zero \0 and more", 15);
    thing.list = {torch::arange(3), torch::zeros({0})};
    Snapshot snapshot(options());
    snapshot.add("thing", thing);
    snapshot.save(1);
    thing = {};
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_EQ(thing.number, 100 + world.rank());
    EXPECT_EQ(thing.words, std::string("zero \0 and more", 15));
    ASSERT_EQ(thing.list.size(), 2u);
    EXPECT_TRUE(torch::equal(thing.list[0], torch::arange(3)));
  });
}

TEST_P(SnapshotTest, WhatCannotBeStoredIsSaidByName) {
  run_threads(2, [&](World&) {
    Unstorable thing;
    Snapshot snapshot(options(1));
    snapshot.add("thing", thing);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { (void)snapshot.step(1); }),
                    "'dictionary' is of type Dict(str, int), which a snapshot cannot hold");
  });
}

TEST_P(SnapshotTest, ChecksItsArguments) {
  run_threads(1, [&](World&) {
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { Snapshot({}); }), "needs a folder");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot({.folder = folder_, .every = -1}); }),
                    ".every must be at least 0, got -1");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot({.folder = folder_, .keep = 0}); }),
                    ".keep must be at least 1, got 0");
    EXPECT_CONTAINS(message_of<Unavailable>([] { Snapshot({.folder = "/proc/none/here"}); }), "cannot make the folder");
    Snapshot snapshot({.folder = folder_ / "a" / "b"});
    EXPECT_TRUE(fs::is_directory(folder_ / "a" / "b"));
    int64_t number = 0;
    snapshot.add("number", number);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("number", number); }), "has a 'number' already");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("default generator", number); }), "already");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("a/b", number); }), "without a slash");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(0); }), "Count from 1");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { (void)snapshot.step(0); }), "Count from 1");
  });
}

}  // namespace
}  // namespace muster
