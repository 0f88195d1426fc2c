// Collectives over an MPI: mpirun -n 2 peer_collectives_openmpi NAME. Speaks as ../collectives.cpp --serve does, with
// the same sizes, and measures as ../measure.h does. NAME is the implementation's in the rows.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "../measure.h"

namespace {

// Memory that begins on 64 bytes, as that of tensors does.
template <typename T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};
  Aligned() = default;
  template <typename Other>
  Aligned(const Aligned<Other>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlignment)); }
  void deallocate(T* data, size_t) { ::operator delete(data, kAlignment); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
using Floats = std::vector<float, Aligned<float>>;

std::function<void()> call_of(const std::string& op, int count, int rank, int world) {
  static Floats whole, all, mine, other, in;
  const int part = std::max(1, count / world);
  whole.assign(count, 0.f), all.assign(part * world, 0.f), mine.assign(part, 0.f), other = all, in = whole;
  if (op == "all_reduce")
    return [=] { MPI_Allreduce(MPI_IN_PLACE, whole.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (op == "scan") return [=] { MPI_Scan(MPI_IN_PLACE, whole.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (op == "broadcast") return [=] { MPI_Bcast(whole.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); };
  if (op == "barrier") return [] { MPI_Barrier(MPI_COMM_WORLD); };
  if (op == "all_gather")
    return [=] { MPI_Allgather(mine.data(), part, MPI_FLOAT, all.data(), part, MPI_FLOAT, MPI_COMM_WORLD); };
  if (op == "reduce_scatter")
    return [=] { MPI_Reduce_scatter_block(all.data(), mine.data(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  if (op == "all_to_all")
    return [=] { MPI_Alltoall(all.data(), part, MPI_FLOAT, other.data(), part, MPI_FLOAT, MPI_COMM_WORLD); };
  if (op == "exchange")
    return [=] {
      if (rank > 1) return;
      MPI_Request receive;
      MPI_Irecv(in.data(), count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, &receive);
      MPI_Send(whole.data(), count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD);
      MPI_Wait(&receive, MPI_STATUS_IGNORE);
    };
  return [=] {  // send_recv
    if (rank > 1) return;
    if (rank == 0) MPI_Send(whole.data(), count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(whole.data(), count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1) MPI_Send(whole.data(), count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
  };
}

struct Request {
  char op[24] = {};  // empty: the end
  unsigned long long bytes = 0;
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  std::printf("{\"pid\": %d}\n", ::getpid());
  std::fflush(stdout);
  for (;;) {
    Request request;
    std::string op;
    if (rank == 0 && std::cin >> op >> request.bytes) std::strncpy(request.op, op.c_str(), sizeof request.op - 1);
    MPI_Bcast(&request, sizeof request, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (!request.op[0]) break;
    const size_t bytes = request.bytes;
    const auto call = call_of(request.op, static_cast<int>(std::max<size_t>(1, bytes / sizeof(float))), rank, world);
    const auto slowest = [](double seconds) {
      MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      return seconds;
    };
    const double seconds = bench::best_mean(
        bench::calls_for(bytes), call, [] { MPI_Barrier(MPI_COMM_WORLD); }, slowest);
    if (rank != 0) continue;
    std::printf(R"({"bench": "collectives", "op": "%s", "bytes": %zu, "ranks": %d, "impl": "%s", "us": %.3f})"
                "\n{\"done\": true}\n",
                request.op, bytes, world, argc > 1 ? argv[1] : "mpi", seconds * 1e6);
    std::fflush(stdout);
  }
  MPI_Finalize();
}
