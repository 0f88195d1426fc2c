"""DistributedDataParallel on models as people have them, with the communication hooks and divided states.

What the training is compared to is in compared.py.
"""
from __future__ import annotations

import os
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import muster
from compared import (
    Batch, Compared, generator, images, Lstm, on_both, Parameters, perceptron, RANKS, resnet18, seeded, STEPS, train,
    Transformer, vectors, wide_convolutions, words)
from ranks import run


class Models(Compared):
    def test_resnet_with_batch_norm(self):
        """Ranks normalize by their own batches, so no single process trains alike; DDP broadcasts rank 0's statistics."""
        self.assertEqual(sum(p.numel() for p in resnet18().parameters()), 11_689_512)

        def train_over(rank: int, group: dist.ProcessGroup) -> Parameters:
            net = DistributedDataParallel(seeded(resnet18), process_group=group)
            return train(net, (images(rank, step) for step in range(STEPS)))

        trained = self.assert_equals_gloo(train_over)
        self.assertTrue(all(t.isfinite().all() for t in trained))

    def test_resnet_with_given_statistics(self):
        self.assert_equals_one_process(lambda: resnet18().eval(), images, steps=2)

    def test_transformer_with_tied_embeddings(self):
        self.assert_equals_one_process(Transformer, words)

    def test_lstm(self):
        self.assert_equals_one_process(Lstm, words)

    def test_wide_convolutions(self):
        self.assert_equals_one_process(wide_convolutions, lambda rank, step: images(rank, step, 12))

    def test_wide_convolutions_in_channels_last(self):
        """In floats, rounding turns a unit on or off in the sixth step: 8e-8 apart before it, 5e-6 after it, and 1e-3 after
        twenty steps, in one process that adds up halves as well. In doubles 4e-16."""
        for dtype, steps in ((torch.float32, 3), (torch.float64, STEPS)):
            def make() -> nn.Module:
                return wide_convolutions().to(dtype=dtype, memory_format=torch.channels_last)

            def pictures(rank: int, step: int) -> Batch:
                x, y = images(rank, step, 12)
                return x.to(dtype=dtype, memory_format=torch.channels_last), y

            self.assertFalse(seeded(make)[2].weight.is_contiguous())
            self.assert_equals_one_process(make, pictures, steps=steps)

    def test_bfloat16(self):
        """Sums of two bfloat16 are rounded once, over any backend. One process rounds at other places."""
        for make, batch in ((lambda: resnet18().eval().bfloat16(), images), (lambda: Transformer().bfloat16(), words)):
            def train_over(rank: int, group: dist.ProcessGroup) -> Parameters:
                net = DistributedDataParallel(seeded(make), process_group=group)
                inputs = (batch(rank, step) for step in range(2))
                return train(net, ((x.bfloat16() if x.is_floating_point() else x, y) for x, y in inputs))

            trained = self.assert_equals_gloo(train_over)
            self.assertTrue(all(t.isfinite().all() for t in trained))
            self.assertTrue(any(t.dtype == torch.bfloat16 for t in trained))

    def test_parameters_on_the_heap(self):
        def moved(net: nn.Module) -> nn.Module:
            for parameter in net.parameters():
                parameter.data = muster.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter.data)
                assert muster.is_on_heap(parameter)
            return DistributedDataParallel(net)

        self.assert_equals_one_process(Transformer, words, wrap=moved)
        self.assert_equals_one_process(wide_convolutions, lambda rank, step: images(rank, step, 12), wrap=moved, steps=2)

    @unittest.skipUnless("MUSTER_TEST_FULL" in os.environ, "takes 6 GB of memory: set MUSTER_TEST_FULL to run it")
    def test_a_parameter_of_512_mb(self):
        """The rows of a table. Each rank's words are those of a few, the first and the last one among them."""
        rows, width = 1 << 15, 1 << 12

        def vocabulary(rank: int, step: int) -> torch.Tensor:
            chosen = torch.randint(rows, (6,), generator=generator(rank, step))
            return torch.cat([torch.tensor([0, rows - 1]), chosen])

        def train_on(net: nn.Module, batches: Iterator[torch.Tensor]) -> torch.Tensor:
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            for batch in batches:
                optimizer.zero_grad()
                net(batch).square().mean().mul(width).backward()
                optimizer.step()
            table, = net.parameters()
            return table.detach()

        def body(rank: int) -> tuple[torch.Tensor, bool]:
            def table() -> nn.Module:
                return nn.Embedding(rows, width, _weight=torch.full((rows, width), 0.5))

            ours = train_on(DistributedDataParallel(table()), (vocabulary(rank, step) for step in range(2)))
            whole_batches = (torch.cat([vocabulary(r, step) for r in range(RANKS)]) for step in range(2))
            expected = train_on(table(), whole_batches)
            close = torch.allclose(ours, expected, rtol=0, atol=1e-6)
            return ours[:: rows - 1, ::100].clone(), close

        (zero, zero_is_close), (one, one_is_close) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assertTrue(zero_is_close and one_is_close)
        self.assertTrue((zero < 0.49).all(), "nothing was trained")

    def test_wide_convolutions_with_gradients_in_the_buckets(self):
        self.assert_equals_one_process(wide_convolutions, lambda rank, step: images(rank, step, 12), steps=2,
                                       wrap=lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True))


def one_bucket(net: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """The first bucket has a size of its own, 1 MiB, until the buckets are rebuilt."""
    assert sum(p.numel() * p.element_size() for p in net.parameters()) < 1 << 20
    return DistributedDataParallel(net, process_group=group)


class Hooks(Compared):
    """Hooks chain futures, whose callbacks run in the backend's threads, and those of PowerSGD start the next collective.

    Where DDP has several buckets, such a callback races with the next bucket, and ranks call in different orders: gloo hangs,
    Muster says so. Hooks that call in callbacks have one bucket here.
    """

    def assert_hook_equals_gloo(self, make_state: Callable[[dist.ProcessGroup], Any], hook: Callable, steps: int = STEPS,
                                make: Callable[[], nn.Module] = perceptron, batch: Callable[[int, int], Batch] = vectors,
                                same: bool = True, bucket_cap_mb: float | None = None) -> Parameters:
        def train_over(rank: int, group: dist.ProcessGroup) -> Parameters:
            net = one_bucket(seeded(make), group) if bucket_cap_mb is None else DistributedDataParallel(
                seeded(make), process_group=group, bucket_cap_mb=bucket_cap_mb)
            net.register_comm_hook(make_state(group), hook)
            return train(net, (batch(rank, step) for step in range(steps)))

        (zero, zero_gloo), (one, one_gloo) = on_both(train_over)
        self.assert_same_bits(zero, zero_gloo)
        self.assert_same_bits(one, one_gloo)
        if same:
            self.assert_same_bits(zero, one)
        return zero

    @staticmethod
    def power(warm_start: bool = True, rank: int = 2) -> Callable[[dist.ProcessGroup], Any]:
        return lambda group: power_sgd.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2,
                                                     min_compression_rate=1, warm_start=warm_start)

    def test_allreduce(self):
        hooked = self.assert_hook_equals_gloo(lambda group: group, default_hooks.allreduce_hook, bucket_cap_mb=0.05)

        def body(rank: int) -> Parameters:
            return train(DistributedDataParallel(seeded(perceptron)), (vectors(rank, step) for step in range(STEPS)))

        self.assert_close(hooked, run(RANKS, body)[0])

    def test_fp16_compress(self):
        self.assert_hook_equals_gloo(lambda group: group, default_hooks.fp16_compress_hook, bucket_cap_mb=0.05)

    def test_bf16_compress(self):
        """DDP accepts this hook for CUDA alone, and knows it by its name."""
        def unnamed(group, bucket):
            return default_hooks.bf16_compress_hook(group, bucket)

        self.assert_hook_equals_gloo(lambda group: group, unnamed, bucket_cap_mb=0.05)

    def test_power_sgd(self):
        for warm_start in (True, False):
            compressed = self.assert_hook_equals_gloo(self.power(warm_start), power_sgd.powerSGD_hook, 4 + STEPS)
        plain = self.assert_hook_equals_gloo(lambda group: group, default_hooks.allreduce_hook, 4 + STEPS)
        self.assertFalse(torch.equal(compressed[0], plain[0]), "nothing was compressed")

    def test_power_sgd_on_a_transformer(self):
        self.assert_hook_equals_gloo(self.power(), power_sgd.powerSGD_hook, 2 + STEPS, Transformer, words)

    def test_batched_power_sgd(self):
        """Its callback waits for the collective that it starts.

        The hook of torch 2.13 gives _orthogonalize() a matrix, which since then takes only batches of them: the hook fails
        with any backend. Here it gets a batch of one.
        """
        inner = power_sgd._orthogonalize
        outer = mock.patch.object(power_sgd, "_orthogonalize", lambda m, *rest: inner(m if m.dim() == 3 else m[None], *rest))
        outer.start()
        self.addCleanup(outer.stop)
        self.assert_hook_equals_gloo(self.power(rank=1), power_sgd.batched_powerSGD_hook, 4 + STEPS)

    def test_power_sgd_in_fp16_and_bf16(self):
        for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
            wrapped = wrapper(power_sgd.powerSGD_hook)
            wrapped.__name__ = "unnamed"
            self.assert_hook_equals_gloo(self.power(), wrapped, 3 + STEPS)

    def test_post_local_sgd(self):
        """From the third step on each rank keeps its own gradients."""
        def make_state(group: dist.ProcessGroup) -> Any:
            alone = [dist.new_group([r], backend=dist.get_backend(group)) for r in range(RANKS)][dist.get_rank()]
            return post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=2)

        self.assert_hook_equals_gloo(make_state, post_localSGD_hook.post_localSGD_hook, 2 + STEPS, same=False)

    def test_power_sgd_gives_the_mean_of_equal_rows(self):
        """PyTorch's test_ddp_hook_parity_powerSGD, which itself asks for GPUs: one column is its own approximation."""
        def body(rank: int) -> list[Parameters]:
            grads = []
            for warm_start in (True, False):
                net = DistributedDataParallel(nn.Linear(1, 5))
                net.register_comm_hook(power_sgd.PowerSGDState(None, 1, 2, warm_start=warm_start), power_sgd.powerSGD_hook)
                for _ in range(100):
                    net.zero_grad()
                    net(torch.tensor([float(rank)])).sum().backward()
                    grads.append(net.module.weight.grad.clone())
            return grads

        for grads in run(4, body):
            self.assertEqual(len(grads), 200)
            for grad in grads:
                torch.testing.assert_close(grad, torch.full((5, 1), 1.5))


class Sharding(Compared):
    def test_zero_redundancy_optimizer(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def train_over(rank: int, group: dist.ProcessGroup) -> tuple[Parameters, int, int]:
            net = DistributedDataParallel(seeded(Transformer), process_group=group)
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group,
                                                parameters_as_bucket_view=True, lr=1e-3)
            trained = train(net, (words(rank, step) for step in range(STEPS)), optimizer)
            optimizer.consolidate_state_dict(to=0)
            mine = len(optimizer.optim.state_dict()["state"])
            return trained, mine, len(optimizer.state_dict()["state"]) if rank == 0 else 0

        (zero, zero_gloo), (one, one_gloo) = on_both(train_over)
        self.assert_same_bits([zero, one], [zero_gloo, one_gloo])
        self.assert_same_bits(zero[0], one[0])
        self.assertEqual(zero[1] + one[1], zero[2])
        self.assertGreater(min(zero[1], one[1]), 0)

    def test_checkpoint(self):
        """Of a sharded model, its optimizer and a number: a second model that reads it goes on in the same bits."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        def body(rank: int, folder: str) -> tuple[Parameters, Parameters, int]:
            mesh = init_device_mesh("cpu", (RANKS,))

            def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
                net = seeded(perceptron, seed)
                fully_shard(net, mesh=mesh)
                return net, torch.optim.Adam(net.parameters(), lr=1e-2)

            def go_on(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Parameters:
                train(net, (vectors(rank, step) for step in steps), optimizer)
                return [p.full_tensor().detach().clone() for p in net.parameters()]

            net, optimizer = sharded(1)
            go_on(net, optimizer, range(2))
            model_state, optimizer_state = get_state_dict(net, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state, "step": 2}, checkpoint_id=folder)
            ours = go_on(net, optimizer, range(2, 4))
            net, optimizer = sharded(2)
            model_state, optimizer_state = get_state_dict(net, optimizer)
            read = {"model": model_state, "optimizer": optimizer_state, "step": 0}
            dcp.load(read, checkpoint_id=folder)
            set_state_dict(net, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
            return ours, go_on(net, optimizer, range(2, 4)), read["step"]

        with tempfile.TemporaryDirectory() as folder:
            for ours, again, step in run(RANKS, lambda rank: body(rank, folder)):
                self.assertEqual(step, 2)
                self.assert_same_bits(again, ours)


if __name__ == "__main__":
    unittest.main(verbosity=2)
