"""torch.distributed.autograd: the peer of bench_autograd. See bench/autograd.cpp for the cases.

torchrun --nproc-per-node 5 bench/peers/autograd_torch.py
"""

import os
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from measure import best_us, row


class SleepsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.01)
        return gradient * 2


def sleeps_backward(x):
    return SleepsBackward.apply(x)


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        x, plain = torch.ones(10, requires_grad=True), torch.ones(10)
        row("autograd", "round_trip", us=best_us(100, lambda: rpc.rpc_sync("worker1", torch.mul, (plain, 2))))
        row("autograd", "local_step", us=best_us(100, lambda: (x * 2).sum().backward()))

        def step():
            with dist_autograd.context() as context:
                y = rpc.rpc_sync("worker1", torch.mul, (x, 2))
                dist_autograd.backward(context, [y.sum()])

        row("autograd", "step_context", us=best_us(100, step))  # without a context there are no gradients

        def four():
            with dist_autograd.context() as context:
                loss = sum(rpc.rpc_sync(f"worker{worker}", sleeps_backward, (x,)) for worker in range(1, 5)).sum()
                start = time.perf_counter()
                dist_autograd.backward(context, [loss])
                return time.perf_counter() - start

        if world_size >= 5:
            row("autograd", "four_sleepers", ms=min(four() for _ in range(20)) * 1e3)
    rpc.shutdown()


if __name__ == "__main__":
    main()
