// What any launcher may start: joins the job, reduces, and says what it found.
#include <ATen/ops/full.h>

#include <cstdio>
#include <string>

#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

int main() {
  const auto world = muster::init();
  const at::Tensor sum = at::full({20'000}, world.rank() + 1.0);
  muster::all_reduce(sum);
  std::printf("rank %d of %d, local %d of %d, sum %g, backend %s\n", world.rank(), world.world_size(),
              world.local_rank(), world.local_world_size(), sum[19'999].item<double>(),
              std::string(world.group().backend_name()).c_str());
  muster::barrier();  // whoever serves the store stays until all are through
}
