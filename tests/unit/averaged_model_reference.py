"""Averages of torch.optim.swa_utils.AveragedModel, for unit/averaged_model_test.cpp.

Reads lines "dtype|average function|use_buffers", and prints the averages of weight, bias and running mean of a batch norm
of five channels after 50 updates. (get_swa_multi_avg_fn() would compute its weights in float32.)
"""
import sys

import no_dynamo  # noqa: F401
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn  # noqa: F401 (named by the lines)


def main():
    for line in sys.stdin:
        dtype, average, buffers = line.strip().split("|")
        net = torch.nn.BatchNorm1d(5).to(getattr(torch, dtype))
        net.num_batches_tracked = None  # an integer, of which there is no average
        averaged = AveragedModel(net, avg_fn=eval(average), use_buffers=buffers == "True")
        for step in range(50):
            at = torch.arange(5, dtype=torch.double) * 1.3 + step  # averaged_model_test.cpp has the same
            with torch.no_grad():
                net.weight.copy_(at.sin())
                net.bias.copy_(at.cos())
                net.running_mean.copy_((at * 2).sin())
            averaged.update_parameters(net)
        module = averaged.module
        values = torch.cat([module.weight.detach(), module.bias.detach(), module.running_mean])
        print(" ".join(repr(value) for value in values.double().tolist()), flush=True)


if __name__ == "__main__":
    main()
