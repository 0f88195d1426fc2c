"""Ways to use DistributedDataParallel on models: parameters that are unused, frozen or shared, accumulation, clipping, uneven
inputs, exceptions, and DDPs that are made again.

What the training is compared to is in compared.py.
"""
from __future__ import annotations

import gc
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compared import (
    Batch, Compared, Lstm, on_both, Parameters, perceptron, RANKS, seeded, sgd, state, STEPS, train,
    Transformer, vectors, whole, words)
from ranks import raised, run


class Branches(nn.Module):
    """Each input takes one of the branches: a rank does not use the others."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.head = nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](x).tanh())


class Recomputed(nn.Module):
    """A layer that runs twice, each time in a reentrant checkpoint: DDP takes it only as a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: self.middle(y).tanh(), x, use_reentrant=True)
        return self.head(x)


class Odd(nn.Module):
    """A frozen layer, one that is used twice, a parameter without elements, one that nobody uses, and tied biases."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.twice, self.unused = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(64, 1000)
        self.twice.bias = self.unused.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(self.twice(self.frozen(x)).tanh()).tanh()
        return self.head(y) + self.nothing.sum()


class Forger(nn.Module):
    """Both halves of a GAN on points in eight dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


class Broken(Exception):
    pass


class Fuse(torch.autograd.Function):
    """Passes everything on, and raises in backward if it is lit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lit: bool) -> torch.Tensor:
        ctx.lit = lit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.lit:
            raise Broken("in the middle of backward")
        return grad, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1000)
        self.lit = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(Fuse.apply(self.first(x), self.lit)).tanh())


class Ways(Compared):
    def test_static_graph(self):
        self.assert_equals_one_process(Recomputed, vectors,
                                       wrap=lambda net: DistributedDataParallel(net, static_graph=True))

    def test_unused_parameters(self):
        """Each step each rank uses another branch; the last branch first of all by nobody, so it keeps its value."""
        def body(rank: int) -> tuple[list[torch.Tensor | None], Parameters, Parameters]:
            net = DistributedDataParallel(seeded(Branches), find_unused_parameters=True, bucket_cap_mb=0.01)
            plain = seeded(Branches)
            optimizers = sgd(net), sgd(plain)
            unused = []
            for step in range(STEPS):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x, y = vectors(rank, step)
                cross_entropy(net(x, (rank + step) % (2 + (step > 0))), y).backward()
                unused.append(net.module.branches[2].weight.grad)
                for r in range(RANKS):
                    x, y = vectors(r, step)
                    (cross_entropy(plain(x, (r + step) % (2 + (step > 0))), y) / RANKS).backward()
                for optimizer in optimizers:
                    optimizer.step()
            return unused, state(net), state(plain)

        (unused, zero, plain), (_, one, _) = run(RANKS, body)
        self.assertIsNone(unused[0])
        self.assertIsNotNone(unused[1])
        self.assert_same_bits(zero, one)
        self.assert_close(zero, plain)

    def test_frozen_shared_unused_and_empty_parameters(self):
        self.assert_equals_one_process(Odd, vectors, lambda net: DistributedDataParallel(net, find_unused_parameters=True))

    def test_clipped_gradients(self):
        """The norm is that of the mean of all ranks' gradients."""
        def clipped(net: nn.Module, batches: Iterator[Batch]) -> tuple[Parameters, list[torch.Tensor]]:
            optimizer, norms = sgd(net), []
            for x, y in batches:
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                optimizer.step()
            return state(net), norms

        def body(rank: int) -> Any:
            net = DistributedDataParallel(seeded(Transformer))
            return (clipped(net, (words(rank, step) for step in range(STEPS))),
                    clipped(seeded(Transformer), (whole(words, step) for step in range(STEPS))) if rank == 0 else None)

        ((zero, norms), (plain, plain_norms)), ((one, _), _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, plain)
        self.assert_close(norms, plain_norms)
        self.assertTrue(all(norm > 0.1 for norm in norms), "nothing was clipped")

    def test_two_models_that_play_against_each_other(self):
        """A GAN: two optimizers, three backward passes per step, and one model's gradient through the other."""
        def play(generator: nn.Module, critic: nn.Module, rows: slice) -> Parameters:
            optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3) for net in (generator, critic)]
            for step in range(4 * STEPS):
                g = torch.Generator().manual_seed(step)
                real, noise = (torch.randn(12, n, generator=g)[rows] for n in (8, 4))
                optimizers[1].zero_grad()
                nn.functional.softplus(-critic(real + 2)).mean().backward()
                nn.functional.softplus(critic(generator(noise).detach())).mean().backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                nn.functional.softplus(-critic(generator(noise))).mean().backward()
                optimizers[0].step()
            return state(generator) + state(critic)

        def body(rank: int) -> Any:
            both, alone = seeded(Forger), seeded(Forger)
            ours = play(DistributedDataParallel(both.generator), DistributedDataParallel(both.critic),
                        slice(6 * rank, 6 * rank + 6))
            return ours, play(alone.generator, alone.critic, slice(None)) if rank == 0 else None

        (zero, plain), (one, _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, plain)

    def test_gradient_accumulation(self):
        parts = 3

        def accumulate(net: nn.Module, batch: Callable[[int], Batch], silent: Callable[[], Any]) -> Parameters:
            optimizer = sgd(net)
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in range(parts):
                    x, y = batch(parts * step + part)
                    if part < parts - 1:
                        with silent():
                            (cross_entropy(net(x), y) / parts).backward()
                    else:
                        (cross_entropy(net(x), y) / parts).backward()
                optimizer.step()
            return state(net)

        def body(rank: int) -> tuple[Parameters, Parameters]:
            net = DistributedDataParallel(seeded(Transformer))
            return (accumulate(net, lambda step: words(rank, step), net.no_sync),
                    accumulate(seeded(Transformer), lambda step: whole(words, step), torch.enable_grad))

        (zero, plain), (one, _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, plain)

    def test_uneven_inputs(self):
        def train_over(rank: int, group: dist.ProcessGroup) -> Parameters:
            net = DistributedDataParallel(seeded(Lstm), process_group=group)
            with net.join():
                train(net, (words(rank, step) for step in range(STEPS + 3 * rank)))
            return state(net)

        self.assert_equals_gloo(train_over)
        zero, one = (ours for ours, _ in on_both(train_over))
        self.assert_same_bits(zero, one)  # join() ends with a broadcast of the last one's parameters

    def test_uneven_inputs_that_are_an_error(self):
        def train_over(rank: int, group: dist.ProcessGroup) -> str:
            net = DistributedDataParallel(seeded(perceptron), process_group=group)

            def uneven() -> None:
                with net.join(throw_on_early_termination=True):
                    train(net, (vectors(rank, step) for step in range(STEPS + rank)))

            return raised(RuntimeError, uneven)

        for ours, theirs in on_both(train_over):
            self.assertEqual(ours, theirs)
            self.assertIn("exhausted", ours)

    def test_an_exception_in_backward(self):
        """The layers behind the exception have begun their collectives; the steps after it are as if it had not been."""
        def plainly() -> Parameters:
            net = seeded(Fused)
            train(net, (whole(vectors, step) for step in range(2)))
            return train(net, (whole(vectors, step) for step in range(2, 2 + STEPS)))

        def train_over(rank: int, group: dist.ProcessGroup) -> tuple[str, Parameters, Parameters]:
            module = seeded(Fused)
            net = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01)
            train(net, (vectors(rank, step) for step in range(2)))  # buckets are rebuilt after the first
            module.lit = True
            raised(Broken, lambda: train(net, iter([vectors(rank, 77)])))
            module.lit = False
            refused = raised(RuntimeError, lambda: net(vectors(rank, 78)[0]))  # DDP's own rule, whatever the backend
            net = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01)
            return refused.splitlines()[0], train(net, (vectors(rank, step) for step in range(2, 2 + STEPS))), plainly()

        (ours, theirs), (one, _) = on_both(train_over)
        self.assertEqual(ours[0], theirs[0])
        self.assertIn("Expected to have finished reduction", ours[0])
        self.assert_same_bits(ours[1], theirs[1])
        self.assert_same_bits(ours[1], one[1])
        self.assert_close(ours[1], ours[2])

    def test_made_again(self):
        def train_over(rank: int, group: dist.ProcessGroup) -> tuple[Parameters, Parameters]:
            module = seeded(perceptron)
            optimizer = sgd(module)
            for step in range(2 * STEPS):
                net = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=bool(step % 2))
                train(net, iter([vectors(rank, step)]), optimizer)
                del net
                gc.collect()
            return state(module), train(seeded(perceptron), (whole(vectors, step) for step in range(2 * STEPS)))

        trained, plain = self.assert_equals_gloo(train_over)
        self.assert_close(trained, plain)

    def test_made_again_with_another_group(self):
        def body(rank: int) -> tuple[Parameters, Parameters]:
            module = seeded(perceptron)
            optimizer = sgd(module)
            for step in range(STEPS):
                group = dist.new_group()
                net = DistributedDataParallel(module, process_group=group)
                train(net, iter([vectors(rank, step)]), optimizer)
                del net
                dist.destroy_process_group(group)
            return state(module), train(seeded(perceptron), (whole(vectors, step) for step in range(STEPS)))

        (zero, plain), (one, _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, plain)


if __name__ == "__main__":
    unittest.main(verbosity=2)
