"""PyTorch's DistributedDataParallel. torchrun --nproc-per-node 2 ddp_torch.py --net small|resnet18|transformer|wide
[--backend gloo|muster|nccl] [--no-sync] [--hook power] [--optimizer adamw|zero].

The same nets, data shapes, optimizer and steps as ../ddp.cpp. One JSON object.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from measure import proportional_set_size_in_use
from nets import Workload
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--net", choices=["small", "resnet18", "transformer", "wide"], default="small")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=0, help="samples of each rank and step; 0: as ../ddp.cpp")
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
work = Workload(args.net, "cuda:0" if args.backend == "nccl" else "cpu")
net, batch = work.net, args.batch or work.batch
# The hook's later collectives begin in the order in which earlier ones end, which differs between ranks: with several buckets,
# Gloo fails.
one_bucket = {"bucket_cap_mb": 1000} if args.hook == "power" else {}
model = net if args.no_sync else DistributedDataParallel(net, gradient_as_bucket_view=True, **one_bucket)
if args.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, fused=True)
elif args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
else:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
if args.hook == "power":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
for step in range(args.steps + args.warmup):
    if step == args.warmup:
        dist.barrier()
        start = time.perf_counter()
    first = (step * world + rank) * batch % (work.samples() - batch)
    optimizer.zero_grad()
    work.loss(model, first, batch).backward()
    optimizer.step()
dist.barrier()
seconds = time.perf_counter() - start
mib = torch.tensor(proportional_set_size_in_use(), dtype=torch.float64, device=work.x.device)
dist.all_reduce(mib)
if rank == 0:
    impl = "pytorch-nosync" if args.no_sync else "pytorch-power" if args.hook == "power" else "pytorch"
    if args.optimizer != "sgd":
        impl = f"pytorch-{args.optimizer}-{args.backend}"
    elif args.backend == "muster":
        impl += "-muster"
    row = {"bench": "ddp", "device": work.x.device.type, "net": args.net, "impl": impl, "ranks": world, "batch": batch, "parameters": sum(p.numel() for p in net.parameters()), "samples_per_s": round(args.steps * batch * world / seconds, 1), "host_mib": round(mib.item(), 1)}
    print(json.dumps(row), flush=True)
dist.barrier()
# Without the interpreter's end: there Gloo's threads may abort the process ("terminate called without an active
# exception"): it did in two of three runs.
os._exit(0)
