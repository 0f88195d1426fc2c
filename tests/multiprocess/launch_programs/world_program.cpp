// What any launcher may start: joins the job, reduces, and says what it found.
#include <ATen/ops/full.h>

#include <cstdio>
#include <string>

#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

namespace {
__attribute__((noipa)) int follow(const volatile int* pointer) { return *pointer; }
}  // namespace

// With an argument, the last rank dies of a bad pointer as soon as it has joined.
int main(int argc, char**) {
  const auto world = muster::init();
  if (argc > 1 && world.rank() == world.world_size() - 1) return follow(nullptr);
  const at::Tensor sum = at::full({20'000}, world.rank() + 1.0);
  muster::all_reduce(sum);
  std::printf("rank %d of %d, local %d of %d, sum %g, backend %s\n", world.rank(), world.world_size(),
              world.local_rank(), world.local_world_size(), sum[19'999].item<double>(),
              std::string(world.group().backend_name()).c_str());
  muster::barrier();  // whoever serves the store stays until all are through
}
