"""All-reduce over PyTorch's Gloo. torchrun --nproc-per-node 2. Measured as ../measure.h does; one JSON object a line."""

import json
import time

import torch
import torch.distributed as dist

REPEATS = 5

torch.set_num_threads(1)
dist.init_process_group("gloo")
size = 16
while size <= 64 << 20:
    tensor = torch.zeros(size // 4)
    # Gloo takes a millisecond a call however small: fewer calls give the same mean.
    calls = 10 if size >= 1 << 22 else 100
    best = float("inf")
    for _ in range(REPEATS):
        dist.all_reduce(tensor)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        best = min(best, (time.perf_counter() - start) / calls)
    if dist.get_rank() == 0:
        row = {"bench": "all_reduce", "op": "all_reduce", "bytes": size, "ranks": dist.get_world_size(), "impl": "gloo", "us": round(best * 1e6, 3)}
        print(json.dumps(row), flush=True)
    size = 1 << 10 if size == 16 else size * 4
dist.destroy_process_group()
