"""PyTorch's FSDP2. torchrun --nproc-per-node 2 fsdp_torch.py [--backend gloo|muster] [--no-sync] [--checkpoint] [--hybrid] [--mixed] [--device cuda].

The same net, data shapes, optimizer and steps as ../fsdp.cpp. One JSON object. With --device, parameters and states are on the CPU (CPUOffloadPolicy), except with --no-sync.
"""

import argparse
import json
import os
import resource
import time

import torch
import torch.distributed as dist
from measure import proportional_set_size
from nets import transformer
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--backend", default="gloo")
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--hybrid", action="store_true", help="shard within each host and replicate between hosts")
parser.add_argument("--mixed", action="store_true", help="compute in bfloat16, with gradients reduced in float32")
parser.add_argument("--checkpoint", action="store_true", help="compute activations again in backward")
parser.add_argument("--device", default="cpu", help="that computes")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--vocabulary", type=int, default=0, help="words of an embedding of width 512; 0: there is none")
args = parser.parse_args()
if args.backend == "muster":
    import muster  # noqa: F401, registers the backend

torch.set_num_threads(args.threads)
on_device = args.device != "cpu"
dist.init_process_group("cuda:nccl,cpu:" + args.backend if on_device else args.backend)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = transformer(args.blocks)
if args.vocabulary:
    net.insert(0, torch.nn.Embedding(args.vocabulary, 512))
parameters = sum(p.numel() for p in net.parameters())
if not args.no_sync:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = dist.device_mesh.init_device_mesh(args.device, (world // local, local), mesh_dim_names=("replicate", "shard")) if args.hybrid else dist.device_mesh.init_device_mesh(args.device, (world,))
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if args.mixed else {}
    if on_device:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in net:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
elif on_device:
    net.to(args.device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=on_device)
torch.manual_seed(5 + rank)
shape = (args.length, args.batch)
x = (torch.randint(args.vocabulary, shape) if args.vocabulary else torch.randn(*shape, 512)).to(args.device)
WARMUP = 2
for step in range(args.steps + WARMUP):
    if step == WARMUP:
        dist.barrier()
        start = time.perf_counter()
    optimizer.zero_grad()
    y = x
    if args.checkpoint:
        for layer in net:
            y = checkpoint(layer, y, use_reentrant=False) if y.is_floating_point() else layer(y)
    else:
        y = net(x)
    loss = y.float().square().mean()
    loss.backward()
    optimizer.step()
    if on_device:
        loss.item()  # as ../fsdp.cpp
dist.barrier()
ms = (time.perf_counter() - start) / args.steps * 1e3
of_rank = proportional_set_size()
memory = torch.tensor([of_rank, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024], dtype=torch.float64)
dist.all_reduce(memory)
most = torch.tensor([of_rank], dtype=torch.float64)
dist.all_reduce(most, op=dist.ReduceOp.MAX)
if rank == 0:
    impl = ("fsdp2-" + args.backend + ("-hybrid" if args.hybrid else "") if not args.no_sync else "pytorch-none") + ("-mixed" if args.mixed else "") + ("-checkpoint" if args.checkpoint else "")
    device = {"device": args.device, "device_mib": torch.cuda.max_memory_allocated() >> 20} if on_device else {}
    print(json.dumps({"bench": "fsdp", "impl": impl, "ranks": world, "parameters": parameters, "tokens": args.batch * args.length, "ms": round(ms, 1), "vocabulary": args.vocabulary, "host_mib": round(memory[0].item()), "rank_mib": round(most.item()), "peak_mib": round(memory[1].item()), **device, "loss": round(loss.item(), 6)}), flush=True)
dist.destroy_process_group()
