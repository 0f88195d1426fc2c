// Gradients through remote calls: muster run -n 5 bench_autograd. One JSON object per line. Worker 0 calls the others.
//
//   round_trip     a remote multiply of 10 floats without gradients; a step makes two such round trips
//   local_step     multiply, sum and backward without a remote call
//   step           remote multiply, sum, backward
//   step_context   the same in a context that ends with the step
//   four_sleepers  backward through one call to each of 4 workers, each of which sleeps 10 ms in its part
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "measure.h"
#include "muster/autograd/context.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"

namespace {

namespace rpc = muster::rpc;
using at::Tensor;

Tensor twice(const Tensor& x) { return x * 2; }
Tensor sleeps_backward(const Tensor& x) {
  Tensor y = x * 2;
  y.register_hook([](Tensor gradient) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return gradient;
  });
  return y;
}

void row(const char* name, const char* unit, double value) {
  std::printf("{\"bench\": \"autograd\", \"case\": \"%s\", \"impl\": \"muster\", \"%s\": %.3f}\n", name, unit, value);
  std::fflush(stdout);
}
template <typename Call>
void time_us(const char* name, Call call) {
  row(name, "us", 1e6 * bench::best_mean(500, call, [] {}));
}

void measure() {
  const Tensor x = at::ones({10}).set_requires_grad(true), plain = at::ones({10});
  time_us("round_trip", [&] { rpc::sync<&twice>(1, plain); });
  time_us("local_step", [&] { twice(x).sum().backward(); });
  time_us("step", [&] { rpc::sync<&twice>(1, x).sum().backward(); });
  time_us("step_context", [&] {
    muster::autograd::Context context;
    muster::autograd::backward(context, {rpc::sync<&twice>(1, x).sum()});
  });
  if (rpc::all_workers().size() < 5) return;
  double best = 1e30;
  for (int repeat = 0; repeat < 20; ++repeat) {
    Tensor sum = at::zeros({10});
    for (int worker = 1; worker <= 4; ++worker) sum = sum + rpc::sync<&sleeps_backward>(worker, x);
    const auto start = std::chrono::steady_clock::now();
    sum.sum().backward();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  row("four_sleepers", "ms", best);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  auto world = muster::init();
  rpc::init();
  if (world.rank() == 0) measure();
  rpc::shutdown();
}
