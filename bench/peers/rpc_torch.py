"""torch.distributed.rpc: the peer of bench_rpc. See bench/rpc.cpp for the cases.

torchrun --nproc-per-node 2 bench/peers/rpc_torch.py
torchrun --nproc-per-node 16 bench/peers/rpc_torch.py --mesh
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from measure import best_us, proportional_set_size, row


def echo(x):
    return x


def mesh():
    """All workers call all: the KiB that each takes for it, on top of PyTorch and its process group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.ones(3).sum()
    dist.barrier()
    before = proportional_set_size()
    dist.barrier()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    for _ in range(3):
        for future in [rpc.rpc_async(f"worker{to}", echo, (to,)) for to in range(world)]:
            future.wait()
    dist.barrier()
    grown = torch.tensor([proportional_set_size() - before])
    dist.all_reduce(grown)
    if rank == 0:
        row("rpc", f"{world} workers, all call all", kb=1024 * grown.item() / world)
    rpc.shutdown()


def main():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        small = torch.ones(1)
        row("rpc", "echo_4B", us=best_us(300, lambda: rpc.rpc_sync("worker1", echo, (small,))))

        def asleep():
            time.sleep(0.02)
            start = time.perf_counter()
            rpc.rpc_sync("worker1", echo, (small,))
            return time.perf_counter() - start

        row("rpc", "echo_4B_asleep", us=statistics.median(asleep() for _ in range(50)) * 1e6)
        for name, elements, calls in [("echo_1MB", 1 << 18, 50), ("echo_16MB", 1 << 22, 10)]:
            tensor = torch.ones(elements)
            row("rpc", name, us=best_us(calls, lambda tensor=tensor: rpc.rpc_sync("worker1", echo, (tensor,))))
        calls = 3000

        def pipelined():
            for future in [rpc.rpc_async("worker1", torch.add, (small, 1)) for _ in range(calls)]:
                future.wait()

        row("rpc", "pipelined", per_s=1e6 * calls / best_us(1, pipelined))

        x = torch.ones(10, requires_grad=True)

        def step():
            with dist_autograd.context() as context:
                y = rpc.rpc_sync("worker1", torch.mul, (x, 2))
                dist_autograd.backward(context, [y.sum()])

        row("rpc", "autograd_step", us=best_us(100, step))
    rpc.shutdown()


if __name__ == "__main__":
    if "--mesh" in sys.argv:
        mesh()
    else:
        main()
