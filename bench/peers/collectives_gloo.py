"""Collectives over PyTorch's Gloo. torchrun --nproc-per-node 2 collectives_gloo.py OP… -- BYTES….

Measures as ../measure.h does, with the sizes of ../collectives.cpp. One JSON object per line.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

REPEATS = 5


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

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather_into_tensor(every, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, every),
        "all_to_all": lambda: dist.all_to_all_single(other, every),
        "send_recv": send_recv,
    }[op]


def main():
    split = sys.argv.index("--")
    ops, sizes = sys.argv[1:split], [int(n) for n in sys.argv[split + 1:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for op in ops:
        for size in sizes:
            call = call_of(op, max(1, size // 4), rank, world)
            # Gloo takes a millisecond per call, however small the call is: fewer calls give the same mean.
            calls = 10 if size >= 1 << 22 else 100
            best = float("inf")
            for _ in range(REPEATS):
                call()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                best = min(best, (time.perf_counter() - start) / calls)
            if rank == 0:
                row = {"bench": "collectives", "op": op, "bytes": size, "ranks": world, "impl": "gloo", "us": round(best * 1e6, 3)}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


main()
