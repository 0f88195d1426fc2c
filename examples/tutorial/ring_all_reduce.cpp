// An all-reduce made of messages: each rank's tensor travels around the ring, and every rank adds its own to it. Then
// the library's all_reduce, which gives the same result.
//
//   muster run -n 4 tutorial_ring_all_reduce
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>

#include <cstdio>

namespace {

// The ring of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: the
// tensor is cut into N parts, one per rank. In N-1 steps each part goes around once and is added up. In N-1 more steps
// the sums go around. Every rank sends and receives 2 (N-1)/N of the tensor.
void ring_all_reduce(const at::Tensor& tensor, const muster::World& world) {
  const int n = world.world_size(), rank = world.rank();
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  const auto parts = tensor.tensor_split(n);
  const auto part = [&](int i) { return parts[static_cast<size_t>((i % n + n) % n)]; };
  for (int step = 0; step < n - 1; ++step) {
    const at::Tensor passing = at::empty_like(part(rank - step - 1));
    auto sent = muster::isend(part(rank - step), next);
    muster::recv(passing, previous);
    part(rank - step - 1).add_(passing);
    sent.wait();
  }
  for (int step = 0; step < n - 1; ++step) {
    auto sent = muster::isend(part(rank - step + 1), next);
    muster::recv(part(rank - step), previous);
    sent.wait();
  }
}

}  // namespace

int main() {
  auto world = muster::init();
  const at::Tensor by_hand = at::arange(10, at::kFloat).mul_(world.rank() + 1.0), by_muster = by_hand.clone();
  ring_all_reduce(by_hand, world);
  muster::all_reduce(by_muster);
  const bool same = at::allclose(by_hand, by_muster);
  if (world.rank() == 0) std::printf("the ring %s all_reduce\n", same ? "agrees with" : "DIFFERS FROM");
  muster::barrier();
  return same ? 0 : 1;
}
