// Meta-steps of MAML on sinusoids, in one process and over the workers of muster run -n N bench_meta. One JSON object
// per line. peers/meta_torchopt.py does the same with TorchOpt.
//
//   maml_sgd    8 tasks of 10 points, 5 inner steps of SGD each, a net 1-40-40-1; Adam outside
//   maml_adam   the same with Adam inside
//   maml_calls  of two workers: maml_sgd with a call per task, as tasks that take unequal times need it, instead of one
//               per worker
//   apart       of two workers: maml_sgd with 4 tasks on each, and none waits for the other. It is the limit that this
//               machine sets for maml_sgd of two workers
//   memory      by how many KB the process grows from the 200th to the 2,000th meta-step of maml_sgd; of two workers,
//               the one that grows more
//   adam_100    a step of differentiable Adam of 100 parameters of 64 floats, and its gradient
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "measure.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/optim/meta.h"
#include "muster/remote/remote_call.h"
#include "muster/rpc/worker.h"

namespace {

namespace optim = muster::optim;
namespace rpc = muster::rpc;
using at::Tensor;

struct Net : torch::nn::Module {
  torch::nn::Linear in{1, 40}, middle{40, 40}, out{40, 1};
  Net() {
    register_module("in", in);
    register_module("middle", middle);
    register_module("out", out);
  }
  Tensor forward(const Tensor& x) { return out(middle(in(x).relu()).relu()); }
};

Tensor loss(Net& net, const Tensor& x, const Tensor& y) { return torch::nn::functional::mse_loss(net.forward(x), y); }

// The loss on new points after adapting to a task: points to learn from and new ones, of shape [2 (x, y), 2, 10, 1].
template <typename Inner>
Tensor loss_after_adapting(optim::ModuleState state, Tensor task) {
  Net net;
  optim::recover_state_dict(net, state);
  Inner inner(net, {.lr = 0.01});
  for (int step = 0; step < 5; ++step) inner.step(loss(net, task[0][0], task[1][0]));
  return loss(net, task[0][1], task[1][1]);
}

template <typename Inner>
Tensor mean_after_adapting(optim::ModuleState state, Tensor tasks) {
  std::vector<Tensor> losses;
  for (const Tensor& task : tasks.unbind()) losses.push_back(loss_after_adapting<Inner>(state, task));
  return at::stack(losses).mean();
}

Tensor tasks(int64_t n) {
  const Tensor x = at::rand({n, 2, 10, 1}) * 10 - 5;
  return at::stack({x, (x + at::rand({n, 1, 1, 1}) * 3.14).sin() * (at::rand({n, 1, 1, 1}) * 4.9 + 0.1)}, 1);
}

void report(const char* name, const char* impl, double seconds) {
  std::printf("{\"bench\": \"meta\", \"case\": \"%s\", \"impl\": \"%s\", \"us\": %.3f}\n", name, impl, 1e6 * seconds);
  std::fflush(stdout);
}

template <typename Inner>
class Maml {
 public:
  explicit Maml(size_t workers, int64_t tasks = 8, bool call_per_task = false)
      : workers_(workers), tasks_(tasks), call_per_task_(call_per_task) {}
  void step() {
    const auto state = optim::extract_state_dict(net_);
    const Tensor batch = tasks(tasks_);
    Tensor total;
    if (workers_ == 1) {
      total = mean_after_adapting<Inner>(state, batch);
    } else if (call_per_task_) {
      total = muster::remote_sync_call<&loss_after_adapting<Inner>>(
          state, batch,
          {.partitioner = muster::dim_partitioner(0, {.exclusive = true, .keepdim = false}),
           .reducer = muster::mean_reducer});
    } else {
      total = muster::remote_sync_call<&mean_after_adapting<Inner>>(state, batch, {.reducer = muster::mean_reducer});
    }
    const auto parameters = net_.parameters();
    adam_.step(parameters, torch::autograd::grad({total}, parameters));
  }

 private:
  const size_t workers_;
  const int64_t tasks_;
  const bool call_per_task_;
  Net net_;
  optim::Adam adam_{{.lr = 1e-3}};
};

template <typename Inner>
void maml(const char* name, size_t workers, bool call_per_task = false) {
  Maml<Inner> maml(workers, 8, call_per_task);
  report(name, workers == 1 ? "muster" : "muster, 2 workers",
         bench::best_mean(
             30, [&] { maml.step(); }, [] {}));
}

void apart() {
  Maml<optim::MetaSGD> maml(1, 4);
  muster::barrier();
  const Tensor slowest = at::full({},
                                  bench::best_mean(
                                      30, [&] { maml.step(); }, [] {}),
                                  at::kDouble);
  muster::all_reduce(slowest, {.op = muster::ReduceOp::MAX});
  if (muster::World::current().rank() == 0) report("apart", "muster, 2 workers", slowest.item<double>());
}

int64_t resident_kb() {
  ::malloc_trim(0);  // what is free, but kept for the next allocation, does not leak
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * ::sysconf(_SC_PAGESIZE) / 1024;
}
void memory(size_t workers) {
  Maml<optim::MetaSGD> maml(workers);
  const auto resident = [&] {
    std::vector<int64_t> of;
    for (size_t worker = 0; worker < workers; ++worker)
      of.push_back(workers == 1 ? resident_kb() : rpc::sync<&resident_kb>(static_cast<int>(worker)));
    return of;
  };
  for (int i = 0; i < 200; ++i) maml.step();
  const auto before = resident();
  for (int i = 200; i < 2000; ++i) maml.step();
  const auto after = resident();
  int64_t most = after[0] - before[0];
  for (size_t i = 1; i < workers; ++i) most = std::max(most, after[i] - before[i]);
  std::printf("{\"bench\": \"meta\", \"case\": \"memory\", \"impl\": \"%s\", \"kb\": %lld}\n",
              workers == 1 ? "muster" : "muster, 2 workers", static_cast<long long>(most));
}

void adam_step(const char* impl, bool fused) {
  const auto adam = optim::adam({.lr = 1e-3, .fused = fused});
  std::vector<Tensor> parameters, gradients;
  for (int i = 0; i < 100; ++i) {
    parameters.push_back(at::rand({64}));
    gradients.push_back(at::rand({64}).set_requires_grad(true));
  }
  const auto state = adam.init(parameters);
  report("adam_100", impl,
         bench::best_mean(
             50,
             [&] {
               auto [updates, next] = adam.update(gradients, state, parameters);
               (void)torch::autograd::grad(updates, gradients, std::vector<Tensor>(100, at::ones({64})));
             },
             [] {}));
}

}  // namespace

int main() {
  at::set_num_threads(1);
  auto world = muster::init();
  if (world.world_size() == 1) {
    maml<optim::MetaSGD>("maml_sgd", 1);
    maml<optim::MetaAdam>("maml_adam", 1);
    adam_step("muster", true);
    adam_step("muster, not fused", false);
    memory(1);
    return 0;
  }
  apart();
  rpc::init({.max_threads = 1});  // each worker has one core, and tasks that compute: several at a time are slower
  if (world.rank() == 0) {
    maml<optim::MetaSGD>("maml_sgd", rpc::all_workers().size());
    maml<optim::MetaAdam>("maml_adam", rpc::all_workers().size());
    maml<optim::MetaSGD>("maml_calls", rpc::all_workers().size(), true);
    memory(rpc::all_workers().size());
  }
  rpc::shutdown();
}
