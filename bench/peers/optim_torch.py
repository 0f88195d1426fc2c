"""torch.distributed.optim.DistributedOptimizer: the peer of bench_optim. See bench/optim.cpp for the cases.

torchrun --nproc-per-node 3 bench/peers/optim_torch.py
"""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from measure import best_us, row
from torch.distributed.optim import DistributedOptimizer


class Layer:
    def __init__(self, count, size):
        self.parameters = [torch.ones(size, requires_grad=True) for _ in range(count)]

    def rrefs(self):
        return [rpc.RRef(one) for one in self.parameters]

    def loss(self):
        return sum((one * one).sum() for one in self.parameters)


def time_steps(name, kind, options, count, size, calls):
    layers = [rpc.remote(f"worker{owner}", Layer, (count, size)) for owner in range(3)]
    parameters = [one for layer in layers for one in layer.rpc_sync().rrefs()]
    optimizer = DistributedOptimizer(kind, parameters, **options)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [sum(layer.rpc_sync().loss() for layer in layers)])
        row("optim", name, us=best_us(calls, lambda: optimizer.step(context)))


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        time_steps("sgd_small", torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}, 4, 16, 50)
        time_steps("adam_small", torch.optim.Adam, {"lr": 1e-6}, 4, 16, 50)
        time_steps("adam_many", torch.optim.Adam, {"lr": 1e-6}, 64, 16, 10)
        time_steps("adam_1M", torch.optim.Adam, {"lr": 1e-6}, 1, 1 << 20, 10)
    rpc.shutdown()


if __name__ == "__main__":
    main()
