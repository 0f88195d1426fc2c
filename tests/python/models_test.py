"""DistributedDataParallel on models as people have them, with the communication hooks and what else comes with it.

Two ranks take a few steps. Their parameters must be equal to each other in every bit; and equal to those of one process that
takes the whole batch, to 1e-6 of the largest one, or in every bit to those of the same ranks over gloo: two numbers have one
sum, so two backends differ in nothing. MUSTER_TEST_FULL takes more steps.
"""
from __future__ import annotations

import gc
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
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import muster
from ranks import raised, run

RANKS = 2
STEPS = 20 if "MUSTER_TEST_FULL" in os.environ else 3
VOCABULARY = 300

Batch = tuple[torch.Tensor, torch.Tensor]
Parameters = list[torch.Tensor]


# -------------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet18() -> nn.Module:
    """The layers and the 11,689,512 parameters of torchvision's."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        layers += [Block(inputs, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Transformer(nn.Module):
    """The output's weight is the embedding's: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.positions = nn.Parameter(torch.randn(16, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, VOCABULARY)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x) + self.positions)).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0]).transpose(1, 2)


def wide_convolutions() -> nn.Module:
    """Two weights of 2.25 MiB, which exceed the first bucket, and one of 4.5 MiB."""
    return nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(),
                         nn.Conv2d(256, 512, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 1000))


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def images(rank: int, step: int, size: int = 32) -> Batch:
    g = generator(rank, step)
    return torch.randn(2, 3, size, size, generator=g), torch.randint(1000, (2,), generator=g)


def words(rank: int, step: int) -> Batch:
    g = generator(rank, step)
    return torch.randint(VOCABULARY, (4, 16), generator=g), torch.randint(VOCABULARY, (4, 16), generator=g)


def vectors(rank: int, step: int) -> Batch:
    g = generator(rank, step)
    return torch.randn(6, 64, generator=g), torch.randint(1000, (6,), generator=g)


# ------------------------------------------------------------------------------------------------------------ training


def state(net: nn.Module) -> Parameters:
    """Parameters and buffers, the same for a model and its DDP."""
    return [tensor.detach().clone() for tensor in net.state_dict().values()]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def whole(batch: Callable[[int, int], Batch], step: int) -> Batch:
    parts = [batch(rank, step) for rank in range(RANKS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def train(net: nn.Module, batches: Iterator[Batch], optimizer: torch.optim.Optimizer | None = None) -> Parameters:
    optimizer = optimizer or sgd(net)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return state(net)


kept: list[dist.ProcessGroup] = []  # until the rank ends: a hook's callback may hold the last reference, in a thread that gloo joins


def on_both(train_over: Callable[[int, dist.ProcessGroup], Any]) -> list[tuple[Any, Any]]:
    """What train_over(rank, group) gave over muster and over gloo, of each rank."""
    def body(rank: int) -> tuple[Any, Any]:
        groups = dist.group.WORLD, dist.new_group(backend="gloo")
        assert [dist.get_backend(group) for group in groups] == ["muster", "gloo"]
        kept.extend(groups)
        return tuple(train_over(rank, group) for group in groups)

    return run(RANKS, body)


class Compared(unittest.TestCase):
    def assert_same_bits(self, ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def assert_equals_gloo(self, train_over: Callable[[int, dist.ProcessGroup], Any]) -> Any:
        (zero, zero_gloo), (one, one_gloo) = on_both(train_over)
        self.assert_same_bits(zero, zero_gloo)
        self.assert_same_bits(one, one_gloo)
        return zero

    def assert_close(self, ours: Parameters, one_process: Parameters) -> None:
        largest = max(t.abs().max().item() for t in one_process if t.is_floating_point() and t.numel())
        torch.testing.assert_close(ours, one_process, rtol=0, atol=1e-6 * largest)

    def assert_equals_one_process(self, make: Callable[[], nn.Module], batch: Callable[[int, int], Batch],
                                  wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel, steps: int = STEPS) -> None:
        def body(rank: int) -> tuple[Parameters, Parameters | None, Parameters]:
            start = state(seeded(make))
            ours = train(wrap(seeded(make)), (batch(rank, step) for step in range(steps)))
            expected = train(seeded(make), (whole(batch, step) for step in range(steps))) if rank == 0 else None
            return ours, expected, start

        (zero, expected, start), (one, _, _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, expected)
        self.assertFalse(all(torch.equal(a, b) for a, b in zip(zero, start)), "nothing was trained")


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
        def make() -> nn.Module:
            return wide_convolutions().to(memory_format=torch.channels_last)

        def pictures(rank: int, step: int) -> Batch:
            x, y = images(rank, step, 12)
            return x.contiguous(memory_format=torch.channels_last), y

        self.assertFalse(seeded(make)[2].weight.is_contiguous())
        self.assert_equals_one_process(make, pictures)

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
