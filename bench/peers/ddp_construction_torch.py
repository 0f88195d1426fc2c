"""The construction of PyTorch's DistributedDataParallel over Gloo. torchrun --nproc-per-node 2 ddp_construction_torch.py.

The same model as `bench_ddp_costs construction`. One JSON object, with the milliseconds of the slowest rank.
"""

import argparse
import json
import os
import time

import torch
import torch._dynamo  # the first DistributedDataParallel of a process imports it, which is not measured
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32, help="of 16 MiB each")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(args.layers)))
dist.barrier()
start = time.perf_counter()
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
slowest = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64)
dist.all_reduce(slowest, dist.ReduceOp.MAX)
if rank == 0:
    print(json.dumps({"bench": "ddp_construction", "impl": "pytorch", "ranks": world, "model_mib": args.layers * 16, "ms": round(slowest.item(), 1)}), flush=True)
dist.barrier()
os._exit(0)  # as ddp_torch.py ends
