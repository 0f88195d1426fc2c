"""Answers what PyTorch's communication hooks make of given gradients, one line per question:

    <processes> <hook> <rank> <steps> <start> <feedback> <warm> <dtype>

The answer has the gradients of all parameters after each step, of one process alone or of two over Gloo.
"""
import datetime
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

SHAPES = [(12, 20), (7,), (9, 4, 3), (16, 8)]


def gradient(parameter, step, dtype):
    """The same numbers as numbers_of() of comm_hook_fixture.h."""
    elements = torch.Size(SHAPES[parameter]).numel()
    i = torch.arange(elements, dtype=torch.float64)
    values = torch.sin(i * (0.37 + 0.11 * parameter) + step) + 0.25 * torch.cos(i * i * 0.013 + parameter)
    return values.view(SHAPES[parameter]).to(dtype)


class Net(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.p = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES])
        self.dtype = dtype

    def forward(self, step):
        share = 1 + 0.5 * (2 * dist.get_rank() - dist.get_world_size() + 1)  # as HookNet::wanted()
        return sum((p * (gradient(i, step, self.dtype) * share)).sum() for i, p in enumerate(self.p))


def answer(hook, rank, steps, start, feedback, warm, dtype):
    net = Net(getattr(torch, dtype))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    state = None
    if "power" in hook:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=int(start),
            use_error_feedback=feedback == "1", warm_start=warm == "1")
    call = {
        "power": powerSGD_hook.powerSGD_hook,
        "bf16_power": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }[hook]
    # By another name, because PyTorch allows bfloat16 on GPUs only, and asks for names.
    ddp.register_comm_hook(state, lambda state, bucket: call(state, bucket))
    numbers = []
    for step in range(int(steps)):
        net.zero_grad()
        ddp(step).backward()
        for p in net.p:
            numbers += p.grad.to(torch.float64).reshape(-1).tolist()
    return numbers


def answers(lines, processes, rank, folder):
    """By line, on rank `rank`."""
    store = "file://" + os.path.join(folder, f"store{processes}")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes,
                            timeout=datetime.timedelta(minutes=2))
    found = {line: answer(*line.split()[1:]) for line in lines if int(line.split()[0]) == processes}
    dist.destroy_process_group()
    return found


def main():
    lines = sys.stdin.read().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answers(lines, 2, 1, folder)
                status = 0
            finally:
                os._exit(status)
        found = answers(lines, 1, 0, folder) | answers(lines, 2, 0, folder)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("the second process has failed")
    for line in lines:
        print(*[repr(number) for number in found[line]])


if __name__ == "__main__":
    main()
