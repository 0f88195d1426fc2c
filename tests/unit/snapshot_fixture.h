// What the tests of snapshots have in common: a training whose whole state is in a snapshot, and ranks that are
// threads, which save and restore it.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/muster.h"
#include "support/ranks.h"

namespace muster::test::snapshots {

namespace fs = std::filesystem;

struct SnapshotNet : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 200)),
                    b = register_module("b", torch::nn::Linear(200, 200)),
                    c = register_module("c", torch::nn::Linear(200, 3));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(200));
  torch::Tensor forward(torch::Tensor x) { return c(torch::relu(norm(b(torch::relu(a(x)))))); }
};

inline std::string bits(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  return {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()};
}
inline std::string bits(const torch::nn::Module& module) {
  std::string all;
  for (const auto& tensor : module.parameters()) all += bits(tensor);
  for (const auto& tensor : module.buffers()) all += bits(tensor);
  return all;
}

inline std::shared_ptr<SnapshotNet> make_net(uint64_t seed) {  // the default generator is the process's
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

inline MakeOptimizer sgd() { return optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9)); }

inline std::map<std::string, MakeOptimizer> optimizers() {
  namespace torchs = torch::optim;  // Muster has optimizers of these names too
  return {{"SGD", sgd()},
          {"Adam", optimizer<torchs::Adam>(torchs::AdamOptions(0.01).amsgrad(true).betas({0.8, 0.9}))},
          {"AdamW", optimizer<torchs::AdamW>(torchs::AdamWOptions(0.01))},
          {"RMSprop", optimizer<torchs::RMSprop>(torchs::RMSpropOptions(0.01).centered(true).momentum(0.5))},
          {"Adagrad", optimizer<torchs::Adagrad>(torchs::AdagradOptions(0.01).lr_decay(0.01))},
          {"LBFGS", [](std::vector<torch::Tensor> parameters) {
             return std::make_unique<torchs::LBFGS>(
                 parameters, torchs::LBFGSOptions(0.1).max_iter(3).line_search_fn("strong_wolfe"));
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
  void save_steps(int n, const std::vector<int64_t>& steps) const { go_on_from({}, steps, n, 1); }
  // Ranks restore this step, and save snapshots of later ones.
  void go_on_from(std::optional<int64_t> restored, const std::vector<int64_t>& steps, int n = 2,
                  uint64_t seed = 2) const {
    run_threads(n, [&](World& world) {
      Training training(world, seed, sgd());
      Snapshot snapshot(options());
      training.add_to(snapshot);
      const int64_t found = snapshot.restore();
      if (restored) {
        EXPECT_EQ(found, *restored);
      }
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
  std::string restore_error(int n, const std::function<void(Training&, Snapshot&)>& change = {},
                            const SnapshotRestoreOptions& with = {}) const {
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
      messages[static_cast<size_t>(world.rank())] = message_of<Kind>([&] { snapshot.restore(with); });
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
  std::map<std::string, std::string> contents() const {  // of the files
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      std::ifstream stream(entry.path(), std::ios::binary);
      all[entry.path().filename()] = {std::istreambuf_iterator<char>(stream), {}};
    }
    return all;
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

}  // namespace muster::test::snapshots
