// The cost of a snapshot: saving and restoring 100 MB of parameters and 100 MB of SGD's momentum, and a step() that
// saves nothing. For comparison, torch::save of the same objects, which has no checksums, does not sync and does not
// replace a file atomically. Then 512 MB of parameters, sharded: saving, restoring, and how long an asynchronous save
// stops the training. For comparison, the limits: reading the files once into the parameters' memory, without a look at
// any byte; and a copy of the bytes that a rank stores, into memory that is there already.
//
//     muster run --no-prefix -n 2 bench_snapshot [FOLDER]
#include <fcntl.h>
#include <muster/checkpoint/snapshot.h>
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "measure.h"

namespace {

namespace fs = std::filesystem;

struct Parameters : torch::nn::Module {
  explicit Parameters(int count = 25) {
    for (int i = 0; i < count; ++i)
      register_parameter(std::string("p").append(std::to_string(i)), torch::rand({1000, 1000}));
  }
};

void report(const muster::World& world, const std::string& op, const std::string& impl, double seconds) {
  if (world.rank() == 0)
    std::printf(R"({"bench": "snapshot", "op": "%s", "impl": "%s", "ranks": %d, "us": %.2f})"
                "\n",
                op.c_str(), impl.c_str(), world.world_size(), seconds * 1e6);
}

// Reads all files of a folder, one after another, into the memory of tensors.
void read_files(const fs::path& folder, const std::vector<torch::Tensor>& to) {
  size_t next = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    for (ssize_t got = 1; fd >= 0 && got > 0; ++next) {
      const torch::Tensor& tensor = to[next % to.size()];
      got = ::read(fd, tensor.mutable_data_ptr(), tensor.nbytes());
    }
    if (fd >= 0) ::close(fd);
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto world = muster::init();
  const fs::path folder = fs::path(argc > 1 ? argv[1] : fs::temp_directory_path()) / "muster-bench-snapshot";
  const auto align = [] { muster::barrier(); };
  auto net = std::make_shared<Parameters>();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  sgd.step();

  for (const bool momentum : {false, true}) {
    for (const bool sharded : {false, true}) {
      const std::string what = momentum ? "+momentum" : "", impl = sharded ? "muster-sharded" : "muster";
      muster::Snapshot snapshot({.folder = folder / (impl + what), .sharded = sharded});
      snapshot.add("model", net);
      if (momentum) snapshot.add("optimizer", sgd);
      int64_t steps = snapshot.restore();
      report(world, "save" + what, impl,
             bench::best_mean(
                 2, [&] { snapshot.save(++steps); }, align));
      report(world, "restore" + what, impl,
             bench::best_mean(
                 2, [&] { snapshot.restore(); }, align));
      if (!sharded && !momentum)
        report(world, "step", impl,
               bench::best_mean(
                   10'000, [&] { (void)snapshot.step(++steps); }, align));
    }
    const auto save = [&] {
      torch::serialize::OutputArchive archive, state(archive.compilation_unit());
      net->save(archive);
      if (momentum) {
        sgd.save(state);
        archive.write("optimizer", state);
      }
      archive.save_to((folder / "torch").string());
    };
    if (world.rank() == 0)
      report(world, momentum ? "save+momentum" : "save", "torch-unsynced", bench::best_mean(2, save, [] {}));
    muster::barrier();
  }
  muster::barrier();
  {
    const auto large = std::make_shared<Parameters>(128);
    int64_t steps = 0;
    {
      muster::Snapshot snapshot({.folder = folder / "large", .sharded = true, .keep = 1});
      snapshot.add("model", large);
      steps = snapshot.restore();
      report(world, "save 512 MB", "muster-sharded",
             bench::best_mean(
                 1, [&] { snapshot.save(++steps); }, align));
      report(world, "load 512 MB", "muster-sharded",
             bench::best_mean(
                 1, [&] { snapshot.restore(); }, align));
      const auto parameters = large->parameters();
      report(world, "load 512 MB", "read",
             bench::best_mean(
                 1, [&] { read_files(folder / "large", parameters); }, align));
      snapshot.restore();
    }
    muster::Snapshot snapshot({.folder = folder / "large", .sharded = true, .asynchronous = true, .keep = 1});
    snapshot.add("model", large);
    steps = snapshot.restore();
    double best = 1e30;
    for (int i = 0; i < 9; ++i) {
      // As in a training, where minutes pass between two saves: the files of the last one's predecessor are gone.
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      muster::barrier();
      const auto start = std::chrono::steady_clock::now();
      snapshot.save(++steps);
      const std::chrono::duration<double> stall = std::chrono::steady_clock::now() - start;
      if (i > 0) best = std::min(best, stall.count());  // the first one takes new memory
      snapshot.wait();
    }
    report(world, "stall 512 MB", "muster-sharded", best);
    std::vector<torch::Tensor> from, to;
    for (size_t i = 0; i < 128 / static_cast<size_t>(world.world_size()); ++i) {
      from.push_back(large->parameters()[i].detach());
      to.push_back(torch::zeros({1000, 1000}));
    }
    const auto copy = [&] {
      for (size_t i = 0; i < from.size(); ++i)
        std::memcpy(to[i].mutable_data_ptr(), from[i].const_data_ptr(), from[i].nbytes());
    };
    report(world, "stall 512 MB", "memcpy", bench::best_mean(1, copy, align));
  }
  muster::barrier();
  std::error_code ignored;
  if (world.rank() == 0) fs::remove_all(folder, ignored);
}
