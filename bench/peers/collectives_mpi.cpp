// All-reduce over MPI. mpicxx -O3; mpirun -n 2. Measured as measure.h does; one JSON object a line.
#include <mpi.h>

#include <cstdio>
#include <vector>

#include "../measure.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  for (size_t bytes = 16; bytes <= size_t{64} << 20; bytes = bytes == 16 ? 1 << 10 : bytes * 4) {
    std::vector<float> data(bytes / sizeof(float), 0.f);
    const double seconds = bench::best_mean(
        bench::calls_for(bytes),
        [&] {
          MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        },
        [] { MPI_Barrier(MPI_COMM_WORLD); });
    if (rank == 0) {
      std::printf(
          R"({"bench": "all_reduce", "op": "all_reduce", "bytes": %zu, "ranks": %d, "impl": "openmpi", "us": %.3f})"
          "\n",
          bytes, world, seconds * 1e6);
      std::fflush(stdout);
    }
  }
  MPI_Finalize();
}
