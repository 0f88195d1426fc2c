// Collectives over MPI. mpicxx -O3; mpirun -n 2 peer_collectives_mpi OP… -- BYTES…. Measures as ../measure.h does, with
// the sizes of ../collectives.cpp. One JSON object per line.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../measure.h"

namespace {

std::function<void()> call_of(const std::string& op, int count, int rank, int world) {
  static std::vector<float> whole, all, mine, other;
  const int part = std::max(1, count / world);
  whole.assign(count, 0.f), all.assign(part * world, 0.f), mine.assign(part, 0.f), other = all;
  if (op == "all_reduce")
    return [=] { MPI_Allreduce(MPI_IN_PLACE, whole.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (op == "broadcast") return [=] { MPI_Bcast(whole.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); };
  if (op == "barrier") return [] { MPI_Barrier(MPI_COMM_WORLD); };
  if (op == "all_gather")
    return [=] { MPI_Allgather(mine.data(), part, MPI_FLOAT, all.data(), part, MPI_FLOAT, MPI_COMM_WORLD); };
  if (op == "reduce_scatter")
    return [=] { MPI_Reduce_scatter_block(all.data(), mine.data(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (op == "all_to_all")
    return [=] { MPI_Alltoall(all.data(), part, MPI_FLOAT, other.data(), part, MPI_FLOAT, MPI_COMM_WORLD); };
  return [=] {  // send_recv
    if (rank > 1) return;
    if (rank == 0) MPI_Send(whole.data(), count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(whole.data(), count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1) MPI_Send(whole.data(), count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
  };
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world, i = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  std::vector<std::string> ops;
  for (; i < argc && std::string(argv[i]) != "--"; ++i) ops.push_back(argv[i]);
  for (const auto& op : ops)
    for (int s = i + 1; s < argc; ++s) {
      const size_t bytes = std::strtoull(argv[s], nullptr, 10);
      const auto call = call_of(op, static_cast<int>(std::max<size_t>(1, bytes / sizeof(float))), rank, world);
      const double seconds = bench::best_mean(bench::calls_for(bytes), call, [] { MPI_Barrier(MPI_COMM_WORLD); });
      if (rank == 0) {
        std::printf(R"({"bench": "collectives", "op": "%s", "bytes": %zu, "ranks": %d, "impl": "openmpi", "us": %.3f})"
                    "\n",
                    op.c_str(), bytes, world, seconds * 1e6);
        std::fflush(stdout);
      }
    }
  MPI_Finalize();
}
