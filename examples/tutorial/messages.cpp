// Point-to-point messages: blocking, non-blocking, and from any rank.
//
//   muster run -n 2 tutorial_messages
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>

#include <cstdio>

int main() {
  auto world = muster::init();
  const int rank = world.rank(), last = world.world_size() - 1;
  const at::Tensor box = at::zeros({1});

  // Blocking: send() returns when the tensor may be changed again, recv() when the message has arrived.
  if (rank == 0 && last > 0) muster::send(at::full({1}, 1.0), 1);
  if (rank == 1) muster::recv(box, 0);
  std::printf("blocking: rank %d has %g\n", rank, box.item<double>());

  // Non-blocking: the call returns immediately. Do not touch the tensors until wait() returns.
  const at::Tensor outgoing = at::full({1}, rank + 10.0), incoming = at::zeros({1});
  auto sent = muster::isend(outgoing, (rank + 1) % (last + 1));
  auto received = muster::irecv(incoming, (rank + last) % (last + 1));
  // … compute something here …
  sent.wait();
  received.wait();
  std::printf("around the ring: rank %d has %g\n", rank, incoming.item<double>());

  // From any rank. The tag tells these messages from the others.
  constexpr int kReport = 7;
  if (rank != 0) {
    muster::send(at::full({1}, rank * 100.0), 0, {.tag = kReport});
  } else {
    double sum = 0;
    for (int i = 0; i < last; ++i) {
      muster::recv(box, muster::kAnySource, {.tag = kReport});
      sum += box.item<double>();
    }
    std::printf("reports: rank 0 has %g\n", sum);
  }
}
