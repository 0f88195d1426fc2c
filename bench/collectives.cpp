// All-reduce over Muster: muster run -n 2 bench_collectives. One JSON object a line.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <cstdio>

#include "measure.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

int main() {
  at::set_num_threads(1);
  auto world = muster::init();
  for (size_t bytes = 16; bytes <= size_t{64} << 20; bytes = bytes == 16 ? 1 << 10 : bytes * 4)
    for (const bool heap : {false, true}) {
      const auto count = static_cast<int64_t>(bytes / sizeof(float));
      const at::Tensor tensor = heap ? world.heap().zeros({count}) : at::zeros({count});
      const double seconds = bench::best_mean(
          bench::calls_for(bytes), [&] { muster::all_reduce(tensor); }, [] { muster::barrier(); });
      if (world.rank() == 0) {
        std::printf(
            R"({"bench": "all_reduce", "op": "all_reduce", "bytes": %zu, "ranks": %d, "impl": "%s", "us": %.3f})"
            "\n",
            bytes, world.world_size(), heap ? "muster-heap" : "muster", seconds * 1e6);
        std::fflush(stdout);
      }
    }
}
