// A training that muster::elastic::run() runs: elastic_program STEPS [RANK@STEP:PHASE[+]]…. A rank kills itself where
// its argument says, in the first process of its rank; with a + at the end, in a later one, unless that began with this
// step. Phases: setup, before, forward, between (of backward and the update), after, barrier. With another phase,
// "hold", or with "setup-hold", it does not kill itself but waits until the file ELASTIC_GO is there. With "start:hold"
// a process that was started in the place of another does so before all else. With "fail" it writes its error file, as
// Python's record() does, and exits with status 1.
//
// Prints each step's loss (rank 0), checksums of the last parameters and buffers (all; buffers differ between ranks),
// how often this process began an epoch, and each time the rank and world size that it has there.
//
// ELASTIC_BACKEND: the World's. ELASTIC_SNAPSHOT: a folder for a snapshot every three steps. ELASTIC_SAME: all ranks
// have the same data, so that losses do not depend on how many there are. ELASTIC_LEDGER: which samples enter which
// step, of an epoch of 96 samples in four steps. The training itself does not use them.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <poll.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>

#include "muster/checkpoint/stop_signal.h"
#include "muster/data/ledger.h"
#include "muster/data/sampler.h"
#include "muster/parallel/ddp.h"
#include "muster/train/elastic.h"

namespace {

struct Net : torch::nn::Module {
  Net() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) { return out->forward(torch::relu(norm->forward(in->forward(x)))); }
  torch::nn::Linear in{8, 16}, out{16, 1};
  torch::nn::BatchNorm1d norm{16};
};

constexpr int64_t kEpoch = 4, kBatch = 24;  // steps; samples of all ranks

uint64_t checksum(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 1469598103934665603u;
  for (const auto& tensor : tensors) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  }
  return hash;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = std::stoll(argv[1]);
  std::set<std::string> deaths(argv + 2, argv + argc);
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const bool first_process = !std::getenv("MUSTER_EPOCH") && (!restarts || std::atoi(restarts) == 0);
  torch::manual_seed(std::getenv("RANK") && first_process ? std::atoi(std::getenv("RANK")) : 1234);  // differ at first
  const auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  muster::elastic::TrainingState state(*net, sgd);
  int epochs = 0;
  int64_t began = 0;
  muster::elastic::Options options;
  if (const char* backend = std::getenv("ELASTIC_BACKEND")) options.world.backend = backend;
  if (const char* folder = std::getenv("ELASTIC_SNAPSHOT")) {
    // The last two are ignored.
    options.snapshot = {.folder = folder, .every = 3, .sharded = true, .shard_folders = {"/nowhere"}};
  }
  const bool same = std::getenv("ELASTIC_SAME");
  const auto await_go = [](const char* who) {
    std::printf("%s holds\n", who);
    std::fflush(stdout);
    while (!std::filesystem::exists(std::getenv("ELASTIC_GO"))) ::poll(nullptr, 0, 5);
  };
  std::printf("started\n");
  std::fflush(stdout);
  if (!first_process && deaths.count("start:hold")) {
    await_go("a new one");
    std::printf("a new one goes on\n");
    std::fflush(stdout);
  }
  const auto setup = [&](muster::World& world) -> muster::elastic::Step {
    if (++epochs == 1) began = state.step();
    std::printf("rank %d of %d from step %ld\n", world.rank(), world.world_size(), static_cast<long>(state.step()));
    std::fflush(stdout);
    const auto die = [&deaths, &state, &began, first_process, rank = world.rank()](const char* phase) {
      const auto here = std::to_string(rank) + '@' + std::to_string(state.step()) + ':' + phase;
      if (first_process ? deaths.count(here) : state.step() > began && deaths.count(here + '+')) ::raise(SIGKILL);
    };
    const auto hold = [&deaths, &state, await_go, rank = world.rank()](const char* phase) {
      if (deaths.erase(std::to_string(rank) + '@' + std::to_string(state.step()) + ':' + phase) == 0) return;
      await_go(("rank " + std::to_string(rank)).c_str());
      if (!std::string_view(phase).ends_with("told")) return;
      const muster::StopSignal told;  // not before the launcher has passed it on
      while (!told.requested()) ::poll(nullptr, 0, 1);
    };
    const auto fail = [&deaths, &state, rank = world.rank()] {
      if (deaths.count(std::to_string(rank) + '@' + std::to_string(state.step()) + ":fail") == 0) return;
      std::ofstream(std::getenv("TORCHELASTIC_ERROR_FILE")) << R"({"message": "RuntimeError: no more paper"})";
      std::_Exit(1);
    };
    die("setup");
    hold("setup-hold");
    hold("setup-hold-told");
    const auto ddp = std::make_shared<muster::DistributedDataParallel<Net>>(net);
    std::shared_ptr<muster::Ledger> ledger;
    if (const char* file = std::getenv("ELASTIC_LEDGER"))
      ledger = std::make_shared<muster::Ledger>(
          file, muster::LedgerOptions{.dataset_size = kEpoch * kBatch, .steps = state.step()});
    return [&, ddp, ledger, die, hold, fail] {
      die("before");
      hold("hold");
      hold("hold-told");
      fail();
      torch::manual_seed(static_cast<uint64_t>(state.step() * 1000 + (same ? 0 : world.rank())));
      const auto x = torch::randn({32, 8}), y = x.sum(1, true);
      if (ledger) {
        muster::DistributedSampler sampler(kEpoch * kBatch);
        const auto share = static_cast<size_t>(kBatch / world.world_size());
        sampler.seek(state.step() / kEpoch, static_cast<size_t>(state.step() % kEpoch) * share);
        ledger->enter(sampler.epoch(), sampler.next(share).value());
      }
      sgd.zero_grad();
      const auto out = ddp->forward(x);
      die("forward");
      const auto loss = torch::nn::functional::mse_loss(out, y);
      loss.backward();
      die("between");
      sgd.step();
      die("after");
      if (ledger) ledger->step();
      if (world.rank() == 0) std::printf("step %ld loss %.9g\n", static_cast<long>(state.step()), loss.item<double>());
      std::fflush(stdout);
      const bool more = state.step() + 1 < steps;
      if (!more) die("barrier");
      return more;
    };
  };
  if (!muster::elastic::run(state, setup, options)) {
    std::printf("asked to stop after %ld steps\n", static_cast<long>(state.step()));
    return 0;
  }
  std::printf("final %016lx buffers %016lx after %d epochs\n", static_cast<unsigned long>(checksum(net->parameters())),
              static_cast<unsigned long>(checksum(net->buffers())), epochs);
}
