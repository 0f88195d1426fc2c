// What any launcher may start: joins the job, reduces, and says what it found.
#include <ATen/ops/full.h>

#include <cstdio>

#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

int main() {
  const auto world = muster::init();
  const at::Tensor sum = at::full({20'000}, world.rank() + 1.0);
  muster::all_reduce(sum);
  std::printf("rank %d of %d, local %d of %d, sum %g\n", world.rank(), world.world_size(), world.local_rank(),
              world.local_world_size(), sum[19'999].item<double>());
  muster::barrier();  // whoever serves the store stays until all are through
}
