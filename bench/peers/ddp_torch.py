"""PyTorch's DistributedDataParallel over Gloo. torchrun --nproc-per-node 2 ddp_torch.py --net small|wide [--no-sync] [--hook power]
[--optimizer adamw|zero] [--backend gloo|muster|nccl].

The same nets, data shapes, optimizer and steps as ../ddp.cpp. One JSON object.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [784, 4096, 4096, 1320, 10]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


parser = argparse.ArgumentParser()
parser.add_argument("--net", choices=["small", "wide"], default="small")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--hook", choices=["none", "power"], default="none")
parser.add_argument("--optimizer", choices=["sgd", "adamw", "zero"], default="sgd")
parser.add_argument("--backend", choices=["gloo", "muster", "nccl"], default="gloo")
parser.add_argument("--warmup", type=int, default=20)
args = parser.parse_args()

torch.set_num_threads(1)
if args.backend == "muster":
    import muster  # noqa: F401
dist.init_process_group(args.backend)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
device = "cuda:0" if args.backend == "nccl" else "cpu"
net = {"small": Small, "wide": Wide}[args.net]().to(device)
# The hook's later collectives begin in the order in which earlier ones end, which differs between ranks: with several buckets,
# Gloo fails.
one_bucket = {"bucket_cap_mb": 1000} if args.hook == "power" else {}
model = net if args.no_sync else DistributedDataParallel(net, gradient_as_bucket_view=True, **one_bucket)
if args.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, fused=args.backend == "nccl")
elif args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
x, y = torch.rand(8192, 1, 28, 28).to(device), torch.randint(10, (8192,)).to(device)
if args.hook == "power":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
for step in range(args.steps + args.warmup):
    if step == args.warmup:
        dist.barrier()
        start = time.perf_counter()
    i = (step * world + rank) * args.batch % (len(x) - args.batch)
    optimizer.zero_grad()
    F.cross_entropy(model(x[i : i + args.batch]), y[i : i + args.batch]).backward()
    optimizer.step()
dist.barrier()
seconds = time.perf_counter() - start
if rank == 0:
    impl = "pytorch-nosync" if args.no_sync else "pytorch-power" if args.hook == "power" else "pytorch"
    if args.optimizer != "sgd":
        impl = f"pytorch-{args.optimizer}-{args.backend}"
    row = {"bench": "ddp", "device": device.split(":")[0], "net": args.net, "impl": impl, "ranks": world, "samples_per_s": round(args.steps * args.batch * world / seconds, 1)}
    print(json.dumps(row), flush=True)
dist.destroy_process_group()
