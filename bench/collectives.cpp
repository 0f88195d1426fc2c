// Collectives over Muster: muster run -n 2 bench_collectives [--op NAME]… [--bytes N]… [--backend NAME].
// One JSON object per line.
//
// `bytes` is the size of a rank's larger tensor: the tensor of all_reduce and broadcast, the output of all_gather, the
// input of reduce_scatter and all_to_all. send_recv is a message and its answer; exchange is a message in each
// direction, for which both ranks have posted a receive before they send. A time is that of the slowest rank.
//
// With --serve, each rank first prints its pid, and then rank 0 reads what to measure from its standard input, a line
// "OP BYTES" at a time, and prints {"done": true} after the rows (bench/rounds.py).
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>

#include "measure.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

namespace {

using Tensor = at::Tensor;

const std::vector<std::string> kOps = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "scan",
                                       "all_to_all", "send_recv", "exchange",   "barrier",        "floor"};

// Does the same memory traffic as an all_reduce of two ranks on the heap, without another rank: reads two halves of a
// tensor and writes their sum into both.
void sum_into_both(const Tensor& a, const Tensor& b) {
  auto* const left = a.mutable_data_ptr<float>();
  auto* const right = b.mutable_data_ptr<float>();
  const int64_t count = a.numel();
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) left[i] = right[i] = left[i] + right[i];
}

// The call to measure, on tensors of this size.
std::function<void()> call_of(const std::string& op, int64_t count, muster::World& world, bool heap) {
  const auto make = [&](int64_t n) { return heap ? world.heap().zeros({n}) : at::zeros({n}); };
  const int64_t n = world.world_size(), part = std::max<int64_t>(1, count / n);
  const Tensor whole = make(count);
  if (op == "all_reduce") return [whole] { muster::all_reduce(whole); };
  if (op == "scan") return [whole] { muster::scan(whole); };
  if (op == "broadcast") return [whole] { muster::broadcast(whole, 0); };
  if (op == "barrier") return [] { muster::barrier(); };
  if (op == "floor") return [a = make(part), b = make(part)] { sum_into_both(a, b); };
  if (op == "send_recv")
    return [whole, rank = world.rank()] {
      if (rank > 1) return;
      if (rank == 0) muster::send(whole, 1);
      muster::recv(whole, 1 - rank);
      if (rank == 1) muster::send(whole, 0);
    };
  if (op == "exchange")
    return [whole, in = make(count), rank = world.rank()] {
      if (rank > 1) return;
      muster::Work receive = muster::irecv(in, 1 - rank);
      muster::send(whole, 1 - rank);
      receive.wait();
    };
  const Tensor all = make(part * n), mine = make(part), other = make(part * n);
  if (op == "all_gather") return [all, mine] { muster::all_gather_into_tensor(all, mine); };
  if (op == "reduce_scatter") return [all, mine] { muster::reduce_scatter_tensor(mine, all); };
  return [all, other] { muster::all_to_all_single(other, all); };
}

// Measures the operation with tensors on the heap and with others. Rank 0 prints the rows.
void measure(const std::string& op, size_t bytes, muster::World& world) {
  for (const bool heap : {false, true}) {
    if (op == "floor" && !heap) continue;
    const auto call = call_of(op, static_cast<int64_t>(std::max<size_t>(1, bytes / sizeof(float))), world, heap);
    const auto slowest = [](double seconds) {
      const Tensor all = at::full({}, seconds, at::kDouble);
      muster::all_reduce(all, {.op = muster::ReduceOp::MAX});
      return all.item<double>();
    };
    const double seconds = bench::best_mean(
        bench::calls_for(bytes), call, [] { muster::barrier(); }, slowest);
    if (world.rank() != 0) continue;
    const char* const impl = op == "floor" ? "floor" : heap ? "muster-heap" : "muster";
    std::printf(R"({"bench": "collectives", "op": "%s", "bytes": %zu, "ranks": %d, "impl": "%s", "us": %.3f})"
                "\n",
                op.c_str(), bytes, world.world_size(), impl, seconds * 1e6);
    std::fflush(stdout);
  }
}

// Measures what rank 0 reads, until the end of its input.
void serve(muster::World& world) {
  std::printf("{\"pid\": %d}\n", ::getpid());
  std::fflush(stdout);
  for (;;) {
    const Tensor request = at::zeros({2}, at::kLong);  // the operation's index, or -1 for the end; bytes
    int64_t* const words = request.mutable_data_ptr<int64_t>();
    if (world.rank() == 0) {
      std::string op;
      words[0] = -1;
      if (std::cin >> op >> words[1]) words[0] = std::find(kOps.begin(), kOps.end(), op) - kOps.begin();
    }
    muster::broadcast(request, 0);
    if (words[0] < 0) return;
    measure(kOps.at(static_cast<size_t>(words[0])), static_cast<size_t>(words[1]), world);
    if (world.rank() == 0) std::printf("{\"done\": true}\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> ops = {"all_reduce"};
  std::vector<size_t> sizes;
  bool serves = false;
  muster::WorldOptions options;
  CLI::App app{"Collectives over Muster"};
  app.add_option("--op", ops)->check(CLI::IsMember(kOps));
  app.add_option("--bytes", sizes);
  app.add_option("--backend", options.backend);
  app.add_flag("--serve", serves);
  CLI11_PARSE(app, argc, argv);
  if (sizes.empty())
    for (size_t bytes = 16; bytes <= size_t{64} << 20; bytes = bytes == 16 ? 1 << 10 : bytes * 4)
      sizes.push_back(bytes);

  at::set_num_threads(1);
  if (serves) options.timeout = std::chrono::hours(6);  // the ranks are stopped while others are measured
  auto world = muster::init(options);
  if (serves) {
    serve(world);
    return 0;
  }
  for (const auto& op : ops)
    for (const size_t bytes : sizes) measure(op, bytes, world);
}
