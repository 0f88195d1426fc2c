"""Answers what PyTorch's communication hooks make of given gradients, one line per question:

    <processes> <hook> <rank> <steps> <start> <feedback> <warm> <dtype>

The answer has the gradients of all parameters after each step, of one process alone or of two over Gloo. A hook may
also be the name of an averager of models ("periodic", "hierarchical"): then SGD with momentum trains the net, each
process by itself from step <start> on, and the answer has its parameters.
"""
import collections
import functools
import types

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks, post_localSGD_hook, powerSGD_hook, quantization_hooks)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer

import two_processes

# batched_powerSGD_hook of torch 2.13 always fails: it gives this function, which wants a batch of matrices, one matrix.
of_a_batch = powerSGD_hook._orthogonalize
powerSGD_hook._orthogonalize = lambda matrix, epsilon=0: of_a_batch(matrix.view(-1, *matrix.shape[-2:]), epsilon)



class GatherInOneTensor:
    """The quantization hooks expect that the future of all_gather has one tensor, with a row for each process. That of
    Gloo's has a list of tensors."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_gather(self, outputs, tensor, group, async_op):
        work = dist.all_gather(outputs, tensor, group=group, async_op=async_op)
        stacked = work.get_future().then(lambda future: [torch.stack(future.wait())])
        return types.SimpleNamespace(get_future=lambda: stacked)


quantization_hooks.dist = GatherInOneTensor()

SHAPES = [(12, 20), (7,), (9, 4, 3), (16, 8), (1,)]  # together a square; all hooks but one leave out the last
WITHOUT_GAPS = [(16, 20), (32,), (9, 4, 8), (16, 8)]  # multiples of 32 elements: Muster's buckets are PyTorch's


def gradient(parameter, shape, step, dtype):
    """The same numbers as numbers_of() of comm_hook_fixture.h."""
    elements = torch.Size(shape).numel()
    i = torch.arange(elements, dtype=torch.float64)
    values = torch.sin(i * (0.37 + 0.11 * parameter) + step) + 0.25 * torch.cos(i * i * 0.013 + parameter)
    return values.view(shape).to(dtype)


class Net(torch.nn.Module):
    def __init__(self, group, shapes, dtype):
        super().__init__()
        self.share = 1 + 0.5 * (2 * group.rank() - group.size() + 1)  # as HookNet::wanted()
        self.p = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
        self.dtype = dtype

    def forward(self, step):
        return sum((p * (gradient(i, p.shape, step, self.dtype) * self.share)).sum() for i, p in enumerate(self.p))


def averager_of(name, start):
    if name == "periodic":
        return averagers.PeriodicModelAverager(period=3, warmup_steps=start)
    periods = collections.OrderedDict([(2, 1), (4, 2)])  # by period, the number of processes that average
    return hierarchical_model_averager.HierarchicalModelAverager(periods, warmup_steps=start)


def answer(group, alone, hook, rank, steps, start, feedback, warm, dtype):
    shapes = {"batched_power": SHAPES, "quantize_blocks": WITHOUT_GAPS}.get(hook, SHAPES[:-1])
    net = Net(group, shapes, getattr(torch, dtype))
    ddp = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    state = group
    averages_models = hook in ("periodic", "hierarchical")
    if hook == "post_local" or averages_models:
        state = post_localSGD_hook.PostLocalSGDState(
            group, alone, int(start), post_local_gradient_allreduce=not averages_models)
    if averages_models:
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
                                          averager_of(hook, int(start)))
    if "power" in hook:
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=int(rank), start_powerSGD_iter=int(start),
            use_error_feedback=feedback == "1", warm_start=warm == "1")
    call = {
        "power": powerSGD_hook.powerSGD_hook,
        "batched_power": powerSGD_hook.batched_powerSGD_hook,
        "bf16_power": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        "fp16_power": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        "fp16_average": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        "bf16_average": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        "post_local": post_localSGD_hook.post_localSGD_hook,
        "periodic": post_localSGD_hook.post_localSGD_hook,
        "hierarchical": post_localSGD_hook.post_localSGD_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "quantize": quantization_hooks.quantization_pertensor_hook,
        "quantize_blocks": functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=int(rank)),
    }[hook]
    # By another name, because PyTorch allows bfloat16 on GPUs only, and asks for names.
    ddp.register_comm_hook(state, lambda state, bucket: call(state, bucket))
    numbers = []
    for step in range(int(steps)):
        net.zero_grad()
        ddp(step).backward()
        if averages_models:
            optimizer.step()
        if hook == "quantize_blocks" and step == 0:
            continue  # PyTorch's first bucket has the parameters in another order
        for p in net.p:
            numbers += (p.detach() if averages_models else p.grad).to(torch.float64).reshape(-1).tolist()
    return numbers


def answer_all(rank, questions):
    groups = {"1": dist.new_group([0]), "2": dist.new_group([0, 1])}
    alone = [groups["1"], dist.new_group([1])][rank]
    for line in questions:
        processes, *question = line.split()
        if processes == "2" or rank == 0:
            numbers = answer(groups[processes], alone, *question)
            if rank == 0:
                print(*[repr(number) for number in numbers], flush=True)


if __name__ == "__main__":
    two_processes.run(answer_all)
