// What any launcher may start: joins the job, reduces, and says what it found.
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

namespace {

__attribute__((noipa)) int follow(const volatile int* pointer) { return *pointer; }

// A thread of libtorch releases a tensor whose memory malloc() has never given out.
int abort_in_libtorch() {
  static float room[8];
  at::launch([tensor = at::from_blob(room + 4, {4}, std::free)]() mutable { tensor.reset(); });
  for (;;) ::pause();
}

}  // namespace

//   crash   the last rank dies of a bad pointer as soon as it has joined
//   abort   the last rank aborts within libtorch as soon as it has joined
//   hold    all ranks say that they are ready and wait for SIGUSR2 before they end
int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  sigset_t end;
  ::sigemptyset(&end);
  ::sigaddset(&end, SIGUSR2);
  if (how == "hold") ::sigprocmask(SIG_BLOCK, &end, nullptr);
  const auto world = muster::init();
  const bool last = world.rank() == world.world_size() - 1;
  if (how == "crash" && last) return follow(nullptr);
  if (how == "abort" && last) return abort_in_libtorch();
  const at::Tensor sum = at::full({20'000}, world.rank() + 1.0);
  muster::all_reduce(sum);
  std::printf("rank %d of %d, local %d of %d, sum %g, backend %s\n", world.rank(), world.world_size(),
              world.local_rank(), world.local_world_size(), sum[19'999].item<double>(),
              std::string(world.group().backend_name()).c_str());
  if (how == "hold") {
    std::puts("ready");
    std::fflush(stdout);
    int signal = 0;
    ::sigwait(&end, &signal);
  }
  muster::barrier();  // whoever serves the store stays until all are through
}
