// A step of optim::DistributedOptimizer over three owners: muster run -n 3 bench_optim. One JSON object per line.
// Worker 0 steps. Each worker, worker 0 included, owns the same number of parameters. The gradients exist before the
// step, in one context, as in peers/optim_torch.py.
//
//   sgd_small   4 parameters of 16 floats on each owner, SGD with momentum
//   adam_small  the same with Adam
//   adam_many   64 parameters of 16 floats on each owner
//   adam_1M     one parameter of 1 Mi floats on each owner: the arithmetic dominates
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cstdio>
#include <string>
#include <vector>

#include "measure.h"
#include "muster/autograd/context.h"
#include "muster/comm/world.h"
#include "muster/optim/distributed_optimizer.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"

namespace {

namespace optim = muster::optim;
namespace rpc = muster::rpc;
using at::Tensor;

struct Layer {
  Layer(int count, int64_t size) {
    for (int i = 0; i < count; ++i) parameters.push_back(at::ones({size}).set_requires_grad(true));
  }
  std::vector<optim::ParameterRef> rrefs() { return optim::parameter_rrefs(parameters); }
  Tensor loss() {
    Tensor sum = at::zeros({});
    for (const Tensor& one : parameters) sum = sum + (one * one).sum();
    return sum;
  }
  std::vector<Tensor> parameters;
};

template <typename O>
void time_steps(const std::string& name, typename O::Options options, int count, int64_t size, int calls) {
  std::vector<rpc::RRef<Layer>> layers;
  std::vector<optim::ParameterRef> parameters;
  for (int owner = 0; owner < 3; ++owner) {
    layers.push_back(rpc::remote<Layer>(owner, count, size));
    for (auto& one : layers.back().sync<&Layer::rrefs>()) parameters.push_back(std::move(one));
  }
  optim::DistributedOptimizer<O> optimizer(options, parameters);
  muster::autograd::Context context;
  Tensor loss = at::zeros({});
  for (const auto& layer : layers) loss = loss + layer.sync<&Layer::loss>();
  muster::autograd::backward(context, {loss});
  const double seconds = bench::best_mean(
      calls, [&] { optimizer.step(context); }, [] {});
  std::printf("{\"bench\": \"optim\", \"case\": \"%s\", \"impl\": \"muster\", \"us\": %.3f}\n", name.c_str(),
              1e6 * seconds);
  std::fflush(stdout);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  auto world = muster::init();
  if (world.world_size() != 3) {
    std::fprintf(stderr, "bench_optim: needs 3 ranks (muster run -n 3 …)\n");
    return 2;
  }
  rpc::init();
  if (world.rank() == 0) {
    time_steps<optim::SGD>("sgd_small", {.lr = 1e-6, .momentum = 0.9}, 4, 16, 300);
    time_steps<optim::Adam>("adam_small", {.lr = 1e-6}, 4, 16, 300);
    time_steps<optim::Adam>("adam_many", {.lr = 1e-6}, 64, 16, 100);
    time_steps<optim::Adam>("adam_1M", {.lr = 1e-6}, 1, int64_t{1} << 20, 10);
  }
  rpc::shutdown();
}
