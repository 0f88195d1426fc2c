"""What PyTorch builds on a backend: DDP, FSDP2, DTensor, functional collectives, the profiler."""
from __future__ import annotations

import unittest

import torch
import torch.distributed as dist

from ranks import run


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def train(net: torch.nn.Module, rank: int, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Ddp(unittest.TestCase):
    def test_equals_gloo(self):
        def body(rank):
            results = []
            for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
                net = torch.nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.0005)
                losses = train(net, rank)
                results.append((losses, [p.detach().clone() for p in net.parameters()]))
                name = net._get_ddp_logging_data()["backend_name"]
                assert name == ("muster" if group is dist.group.WORLD else "gloo"), name
            return results

        for ours, theirs in run(2, body):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    def test_unused_parameters_buffers_and_no_sync(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
                self.norm = torch.nn.BatchNorm1d(4)

            def forward(self, x):
                return self.norm(self.used(x))

        def body(rank):
            net = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
            with net.no_sync():
                net(batch(rank, 0)[0][:, :4]).square().sum().backward()
            net(batch(rank, 1)[0][:, :4]).square().sum().backward()
            return net.module.used.weight.grad, net.module.norm.running_mean

        (grad0, mean0), (grad1, _) = run(2, body)
        torch.testing.assert_close(grad0, grad1, rtol=0, atol=0)
        self.assertTrue(mean0.abs().sum() > 0)

    def test_uneven_inputs_and_comm_hook(self):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def body(rank):
            net = torch.nn.parallel.DistributedDataParallel(model())
            net.register_comm_hook(None, default_hooks.fp16_compress_hook)
            with net.join():
                for step in range(2 + rank):
                    net(batch(rank, step)[0]).sum().backward()
            return [p.detach().clone() for p in net.parameters()]

        zero, one = run(2, body)
        torch.testing.assert_close(zero, one, rtol=0, atol=0)


class Sharded(unittest.TestCase):
    def test_fsdp2_equals_one_process(self):
        def body(rank):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (2,))
            net = model()
            for layer in net:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            train(net, rank, steps=2)
            sharded = [p.full_tensor().detach().clone() for p in net.parameters()]
            plain = model()
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(2):
                optimizer.zero_grad()
                for r in range(2):
                    x, y = batch(r, step)
                    (torch.nn.functional.mse_loss(plain(x), y) / 2).backward()
                optimizer.step()
            return sharded, [p.detach().clone() for p in plain.parameters()]

        for sharded, plain in run(2, body):
            torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)

    def test_dtensor(self):
        def body(rank):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor

            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            whole = torch.arange(24.0).reshape(6, 4)
            t = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
            sizes = tuple(t.to_local().shape)
            moved = t.redistribute(mesh, [Shard(1), Shard(0)]).redistribute(mesh, [Replicate(), Replicate()])
            product = (t @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])).full_tensor()
            partial = DTensor.from_local(torch.ones(2), mesh["a"], [Partial()]).redistribute(mesh["a"], [Replicate()])
            return sizes, torch.equal(moved.to_local(), whole), torch.equal(product, whole @ whole.t()), partial.to_local().tolist()

        self.assertEqual(run(4, body), [((3, 2), True, True, [2.0, 2.0])] * 4)

    def test_functional_collectives(self):
        def body(rank):
            import torch.distributed._functional_collectives as functional

            group = dist.group.WORLD
            t = torch.arange(4.0) + rank
            return [functional.all_reduce(t, "sum", group).tolist(),
                    functional.all_gather_tensor(t, 0, group).tolist(),
                    functional.reduce_scatter_tensor(t, "sum", 0, group).tolist(),
                    functional.all_to_all_single(t, None, None, group).tolist(),
                    functional.broadcast(t, 1, group).tolist()]

        zero, one = run(2, body)
        self.assertEqual(zero, [[1, 3, 5, 7], [0, 1, 2, 3, 1, 2, 3, 4], [1, 3], [0, 1, 1, 2], [1, 2, 3, 4]])
        self.assertEqual(one, [[1, 3, 5, 7], [0, 1, 2, 3, 1, 2, 3, 4], [5, 7], [2, 3, 3, 4], [1, 2, 3, 4]])


class Profiling(unittest.TestCase):
    def test_titles_and_shapes(self):
        def body(rank):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
                dist.all_reduce(torch.ones(3, 5))
                dist.all_reduce(torch.ones(7), async_op=True).wait()
                dist.all_gather([torch.ones(2) for _ in range(2)], torch.ones(2))
                dist.barrier()
                dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
            return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("muster:")]

        for rank, events in enumerate(run(2, body)):
            names = [name for name, _ in events]
            for name in ("muster:all_reduce", "muster:all_gather", "muster:barrier", "muster:send" if rank == 0 else "muster:recv"):
                self.assertIn(name, names)
            self.assertIn(("muster:all_reduce", [[3, 5]]), events)
            self.assertIn(("muster:all_reduce", [[7]]), events)


if __name__ == "__main__":
    unittest.main(verbosity=2)
