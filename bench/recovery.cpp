// The time until the first all_reduce, from the start of a job and after the death of a rank. bench/run.py runs this
// program. It knows when it started it, and reads the times that the ranks print.
//
//   bench_recovery start     ends after the first all_reduce
//   bench_recovery barrier   ends after the first barrier
//   bench_recovery restart   rank 1 kills itself after the first all_reduce of the first attempt: all ranks start again
//   bench_recovery elastic   rank 1 kills itself in the tenth step: only rank 1 starts again
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "event.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/train/elastic.h"

namespace {

void die() {
  tell("kill");
  ::raise(SIGKILL);
}

int start(const std::string& mode) {
  const auto world = muster::init();
  const at::Tensor t = at::ones({16});
  if (mode == "barrier") {
    muster::barrier();
  } else {
    muster::all_reduce(t);
  }
  if (world.rank() == 0) tell("first");
  if (mode != "restart" || std::string(std::getenv("TORCHELASTIC_RESTART_COUNT")) != "0") return 0;
  muster::barrier();
  if (world.rank() == 1) die();
  for (;;) muster::all_reduce(t);
}

int elastic() {
  torch::nn::Linear net(64, 64);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  muster::elastic::TrainingState state(*net, sgd);
  bool told = false;
  muster::elastic::run(state, [&](muster::World& world) -> muster::elastic::Step {
    return [&state, &told, rank = world.rank()] {
      const bool first_process = !std::getenv("MUSTER_EPOCH");
      if (state.step() == 10 && rank == 1 && first_process) die();
      muster::all_reduce(at::ones({16}));
      if (state.step() == 10 && rank == 0 && !told) {
        tell("first");
        told = true;
      }
      return state.step() < 12;
    };
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  return mode == "elastic" ? elastic() : start(mode);
}
