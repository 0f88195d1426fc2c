"""Collectives over PyTorch's Gloo: torchrun --nproc-per-node 2 collectives_gloo.py.

Speaks as ../collectives.cpp --serve does, with the same sizes, and measures as ../measure.h does.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

REPEATS = 5
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "exchange", "barrier")


def call_of(op, count, rank, world):
    part = max(1, count // world)
    whole, every, other, mine = torch.zeros(count), torch.zeros(part * world), torch.zeros(part * world), torch.zeros(part)

    def send_recv():
        if rank > 1:
            return
        if rank == 0:
            dist.send(whole, 1)
        dist.recv(whole, 1 - rank)
        if rank == 1:
            dist.send(whole, 0)

    received = torch.zeros(count)

    def exchange():
        if rank > 1:
            return
        receive = dist.irecv(received, 1 - rank)
        dist.send(whole, 1 - rank)
        receive.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather_into_tensor(every, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, every),
        "all_to_all": lambda: dist.all_to_all_single(other, every),
        "send_recv": send_recv,
        "exchange": exchange,
    }[op]


def best_mean(size, call):
    # Gloo takes a tenth of a millisecond or more per call, however small the call is: fewer calls give the same mean.
    calls = 10 if size >= 1 << 22 else 100
    best = float("inf")
    for _ in range(REPEATS):
        call()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.double)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        best = min(best, seconds.item())
    return best


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(hours=6))  # the ranks are stopped while others are measured
    rank, world = dist.get_rank(), dist.get_world_size()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    while True:
        request = torch.tensor([-1, 0])  # the operation's index, or -1 for the end; bytes
        if rank == 0 and (line := sys.stdin.readline()):
            op, size = line.split()
            request = torch.tensor([OPS.index(op), int(size)])
        dist.broadcast(request, 0)
        index, size = request.tolist()
        if index < 0:
            break
        best = best_mean(size, call_of(OPS[index], max(1, size // 4), rank, world))
        if rank == 0:
            row = {"bench": "collectives", "op": OPS[index], "bytes": size, "ranks": world, "impl": "gloo", "us": round(best * 1e6, 3)}
            print(json.dumps(row), json.dumps({"done": True}), sep="\n", flush=True)
    dist.destroy_process_group()


main()
