"""Every collective and form of messages of torch.distributed, compared with gloo in the same processes."""
from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import muster
from ranks import hear, raised, run, run_threads, say

Op = dist.ReduceOp
Group = dist.ProcessGroup


def beside_gloo(n: int, case: Callable[[int, Group], Any]) -> list[tuple[Any, Any]]:
    """Returns what case(rank, group) returns on each rank, with Muster and with gloo."""

    def body(rank: int) -> tuple[Any, Any]:
        gloo = dist.new_group(backend="gloo")
        answers = case(rank, dist.group.WORLD), case(rank, gloo)
        dist.barrier()
        return answers

    return run(n, body)


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    raw = torch.randint(1, 4, shape, generator=generator)
    if dtype == torch.bool:
        return raw > 2
    if dtype.is_complex:
        return torch.complex(raw.double(), raw.double().flip(0)).to(dtype)
    return raw.to(dtype)


class Case(unittest.TestCase):
    def same(self, ours: Any, theirs: Any) -> None:
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        elif isinstance(ours, (list, tuple)):
            self.assertEqual(len(ours), len(theirs))
            for one, other in zip(ours, theirs):
                self.same(one, other)
        else:
            self.assertEqual(ours, theirs)

    def as_gloo(self, n: int, case: Callable[[int, Group], Any]) -> None:
        for ours, theirs in beside_gloo(n, case):
            self.same(ours, theirs)


class Reductions(Case):
    def test_operations_and_dtypes(self):
        floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
        integers = [torch.uint8, torch.int8, torch.int32, torch.int64]

        def case(rank, group):
            results = []
            for dtype in floats + integers:
                for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX):
                    if dtype == torch.bfloat16:  # not all versions of gloo support it
                        continue
                    t = values(rank, dtype)
                    dist.all_reduce(t, op, group=group)
                    results.append(t)
            for dtype in integers:
                for op in (Op.BAND, Op.BOR, Op.BXOR):
                    t = values(rank, dtype)
                    dist.all_reduce(t, op, group=group)
                    results.append(t)
            return results

        self.as_gloo(3, case)

    def test_bool_complex_and_bfloat16(self):
        def body(rank):
            results = []
            for dtype in (torch.bool, torch.complex64, torch.complex128, torch.bfloat16):
                for op in (Op.SUM,) + ((Op.MAX, Op.MIN, Op.BAND, Op.BOR) if dtype == torch.bool else ()):
                    t = values(rank, dtype)
                    dist.all_reduce(t, op)
                    results.append((dtype, op, t))
            return results

        a, b = (lambda dtype: values(0, dtype)), (lambda dtype: values(1, dtype))
        expected = {Op.MAX: torch.logical_or, Op.BOR: torch.logical_or, Op.MIN: torch.logical_and, Op.BAND: torch.logical_and}
        for results in run(2, body):
            for dtype, op, t in results:
                wanted = expected[op](a(dtype), b(dtype)) if op in expected else a(dtype) + b(dtype)
                self.same(t, wanted)

    def test_average_and_premultiplied_sum(self):
        def body(rank):
            mean, scaled = torch.full((4,), float(rank)), torch.full((4,), 2.0)
            dist.all_reduce(mean, Op.AVG)
            dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5 + rank))
            return mean[0].item(), scaled[0].item()

        self.assertEqual(run(2, body), [(0.5, 4.0)] * 2)

    def test_reduce_and_reduce_scatter(self):
        def case(rank, group):
            t = values(rank, torch.float32)
            dist.reduce(t, 1, group=group)
            own = torch.zeros(2)
            dist.reduce_scatter_tensor(own, values(rank, torch.float32, (6,)), group=group)
            listed = torch.zeros(2, 2)
            dist.reduce_scatter(listed, [values(rank + i, torch.float32, (2, 2)) for i in range(3)], group=group)
            return t if rank == 1 else None, own, listed

        self.as_gloo(3, case)

    def test_unequal_reduce_scatter(self):
        def body(rank):
            own = torch.zeros(rank + 1)
            dist.reduce_scatter(own, [torch.full((r + 1,), float(rank + r)) for r in range(3)])
            return own.tolist()

        self.assertEqual(run(3, body), [[3.0], [6.0] * 2, [9.0] * 3])

    def test_sparse(self):
        def case(rank, group):
            t = torch.sparse_coo_tensor(torch.tensor([[rank, rank + 1]]), torch.ones(2, 3), (5, 3))
            dist.all_reduce(t, group=group)
            return t.to_dense()

        self.as_gloo(3, case)

    def test_empty_strided_and_large(self):
        def case(rank, group):
            results = [torch.zeros(0), values(rank, torch.float64, (7, 4)).t(), values(rank, torch.float32, (300, 1000))]
            for t in results:
                if t.is_contiguous() or group is dist.group.WORLD:
                    dist.all_reduce(t, group=group)
                else:
                    copy = t.contiguous()  # gloo takes only contiguous tensors
                    dist.all_reduce(copy, group=group)
                    t.copy_(copy)
            return results

        self.as_gloo(2, case)

    def test_coalesced(self):
        def case(rank, group):
            tensors = [values(rank, torch.float32), values(rank, torch.float32, (2,))]
            dist.all_reduce_coalesced(tensors, group=group)
            gathered = [[torch.zeros(3, 5), torch.zeros(2)] for _ in range(2)]
            dist.all_gather_coalesced(gathered, [values(rank, torch.float32), values(rank, torch.float32, (2,))], group=group)
            return tensors, gathered

        self.as_gloo(2, case)


class Movement(Case):
    def test_broadcast_gather_scatter(self):
        def case(rank, group):
            t = values(rank, torch.int64)
            dist.broadcast(t, 1, group=group)
            gathered = [torch.zeros(3, 5) for _ in range(3)] if rank == 2 else None
            dist.gather(values(rank, torch.float32), gathered, 2, group=group)
            mine = torch.zeros(3, 5)
            dist.scatter(mine, [values(i, torch.float32) for i in range(3)] if rank == 0 else None, 0, group=group)
            return t, gathered, mine

        self.as_gloo(3, case)

    def test_all_gather(self):
        def case(rank, group):
            parts = [torch.zeros(3, 5) for _ in range(3)]
            dist.all_gather(parts, values(rank, torch.float32), group=group)
            flat = torch.zeros(9, 5)
            dist.all_gather_into_tensor(flat, values(rank, torch.float32), group=group)
            flags = [torch.zeros(3, 5, dtype=torch.bool) for _ in range(3)]
            dist.all_gather(flags, values(rank, torch.bool), group=group)
            return parts, flat, flags

        self.as_gloo(3, case)

    def test_unequal_all_gather(self):
        def body(rank):
            parts = [torch.zeros(r + 1, 2) for r in range(3)]
            dist.all_gather(parts, torch.full((rank + 1, 2), float(rank)))
            return [part.tolist() for part in parts]

        self.assertEqual(run(3, body), [[[[float(r)] * 2] * (r + 1) for r in range(3)]] * 3)

    def test_all_to_all(self):
        def case(rank, group):
            out = torch.zeros(6, 2)
            dist.all_to_all_single(out, values(rank, torch.float32, (6, 2)), group=group)
            splits = [1, 2, 3]
            cut = torch.zeros(3 * (rank + 1), 2)
            dist.all_to_all_single(cut, values(rank, torch.float32, (6, 2)), [rank + 1] * 3, splits, group=group)
            return out, cut

        self.as_gloo(3, case)

    def test_list_all_to_all(self):
        def body(rank):
            inputs = [torch.full((rank + r + 1,), float(10 * rank + r)) for r in range(3)]
            outputs = [torch.zeros(rank + r + 1) for r in range(3)]
            dist.all_to_all(outputs, inputs)
            return [(len(t), t[0].item()) for t in outputs]

        self.assertEqual(run(3, body), [[(rank + r + 1, float(10 * r + rank)) for r in range(3)] for rank in range(3)])

    def test_messages(self):
        def case(rank, group):
            t = torch.zeros(4)
            if rank == 0:
                dist.send(values(0, torch.float32, (4,)), 1, group=group, tag=3)
                source = dist.recv(t, None, group=group)
            else:
                dist.recv(t, 0, group=group, tag=3)
                dist.send(t + 1, 0, group=group)
                source = 0
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1 - rank, group),
                                            dist.P2POp(dist.irecv, got := torch.zeros(4), 1 - rank, group)])
            for work in works:
                work.wait()
            return t, source, got

        self.as_gloo(2, case)

    def test_send_to_oneself(self):
        def body(rank):
            got = torch.zeros(3)
            group = dist.distributed_c10d._get_default_group()
            work = group.recv([got], rank, 0)
            group.send([torch.full((3,), float(rank))], rank, 0).wait()
            work.wait()
            return got.tolist()

        self.assertEqual(run(2, body), [[0.0] * 3, [1.0] * 3])

    def test_objects(self):
        def case(rank, group):
            everybody = [None] * 3
            dist.all_gather_object(everybody, {"rank": rank, "text": "x" * (100 * rank)}, group=group)
            listed = [rank, "text"] if rank == 1 else [None, None]
            dist.broadcast_object_list(listed, 1, group=group)
            mine = [None]
            dist.scatter_object_list(mine, [{"to": r} for r in range(3)] if rank == 0 else None, 0, group=group)
            gathered = [None] * 3 if rank == 0 else None
            dist.gather_object(("from", rank), gathered, 0, group=group)
            return everybody, listed, mine, gathered

        self.as_gloo(3, case)

    def test_object_messages(self):
        def body(rank):
            listed = [{"a": 1}, [2, 3]] if rank == 0 else [None, None]
            dist.send_object_list(listed, 1) if rank == 0 else dist.recv_object_list(listed, 0)
            return listed

        self.assertEqual(run(2, body), [[{"a": 1}, [2, 3]]] * 2)

    def test_a_message_that_does_not_fit_names_the_line_of_its_recv(self):
        def body(rank):
            if rank == 1:
                return raised(dist.DistBackendError, lambda: dist.recv(torch.ones(4), 0))
            dist.send(torch.ones(3), 1)
            return raised(dist.DistBackendError, lambda: dist.barrier())

        for text in run(2, body):
            self.assertIn("recv on rank 1 (collectives_test.py:", text)
            self.assertIn("but rank 0 sent 3 x Float (12 bytes)", text)


def staged_bytes() -> int:
    """How much memory this process's groups have taken. A tensor that is not on a heap makes a rank take its staging."""
    taken = 0
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if "memfd:muster-group" in (os.readlink(path) if os.path.islink(path) else ""):
            taken += os.stat(path).st_blocks * 512
    return taken


class Heap(Case):
    def test_collectives_copy_nothing(self):
        def body(rank):
            count = 100_003
            ours, theirs = muster.empty(count), torch.empty(count)
            ours.copy_(torch.arange(count) % 1000 + rank)
            theirs.copy_(ours)
            dist.barrier()
            before = staged_bytes()
            dist.all_reduce(ours)
            all_of_ours = muster.empty(2, count)
            dist.all_gather_into_tensor(all_of_ours, ours)
            after = staged_bytes()
            dist.all_reduce(theirs)
            self.assertTrue(torch.equal(ours, theirs))
            self.assertTrue(torch.equal(all_of_ours, torch.stack([ours, ours])))
            self.assertEqual(before, after)
            self.assertGreater(staged_bytes(), after, "this test cannot see whether staging is used")

        run(2, body)

    def test_subgroup_and_threads(self):
        def body(rank):
            group = dist.new_group([0, 2])
            if rank == 1:
                return
            tensor = muster.zeros(70_000, dtype=torch.float64).add_(rank + 1)
            dist.all_reduce(tensor, group=group)
            self.assertTrue(torch.equal(tensor, torch.full((70_000,), 4.0, dtype=torch.float64)))

        run(3, body)

        def thread(rank, backend):
            tensor = muster.zeros(70_000).add_(rank + 1)
            backend.allreduce([tensor]).wait()
            return bool((tensor == 3).all())

        self.assertEqual(run_threads(2, thread), [True, True])

    def test_tensors_are_ordinary(self):
        def body(rank):
            tensor = muster.empty(3, 5)
            self.assertEqual((tensor.shape, tensor.dtype, tensor.is_contiguous()), ((3, 5), torch.float32, True))
            self.assertEqual(muster.empty((2, 3), dtype=torch.bfloat16).dtype, torch.bfloat16)
            self.assertEqual(muster.zeros(0, 4).numel(), 0)
            self.assertTrue(muster.is_on_heap(tensor) and muster.is_on_heap(tensor[1:, 2]))
            self.assertFalse(muster.is_on_heap(torch.empty(3)) or muster.is_on_heap(tensor + 1))
            raised(torch.OutOfMemoryError, lambda: muster.empty(1 << 50))
            parameter = torch.nn.Parameter(muster.zeros(4))
            (parameter * torch.arange(4.0)).sum().backward()
            self.assertTrue(torch.equal(parameter.grad, torch.arange(4.0)))
            dist.destroy_process_group()
            self.assertTrue(bool((muster.zeros(9).add_(rank) == rank).all()))

        run(2, body, destroy=False)

    def test_a_fork_has_a_heap_of_its_own(self):
        def body(rank):
            tensor = muster.zeros(1000)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                mine = muster.zeros(1000).add_(7)
                os.write(writer, b"1" if bool((mine == 7).all()) else b"0")
                os._exit(0)
            self.assertEqual(os.read(reader, 1), b"1")
            os.waitpid(pid, 0)
            self.assertTrue(bool((tensor == 0).all()))
            tensor.add_(rank)
            dist.all_reduce(tensor)
            self.assertTrue(bool((tensor == 1).all()))

        run(2, body)


class Asynchronous(Case):
    def test_works_and_futures(self):
        def case(rank, group):
            tensors = [torch.full((10,), float(rank + i)) for i in range(20)]
            works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
            doubled = works[-1].get_future().then(lambda future: future.value()[0] * 2)
            for work in works:
                work.wait()
            return tensors, doubled.wait(), all(work.is_completed() for work in works)

        self.as_gloo(2, case)

    def test_completes_without_a_wait(self):
        def body(rank):
            future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
            return future.wait()[0].tolist(), future.done()

        self.assertEqual(run(2, body), [([2.0] * 3, True)] * 2)

    def test_callbacks_see_the_result(self):
        def body(rank):
            seen = []
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.get_future().add_done_callback(lambda future: seen.append(future.value()[0].tolist()))
            work.wait()
            dist.barrier()
            return seen

        self.assertEqual(run(2, body), [[[2.0] * 3]] * 2)


class Groups(Case):
    def test_subgroups(self):
        def body(rank):
            evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
            mine, others = (evens, odds) if rank % 2 == 0 else (odds, evens)
            t = torch.full((1,), float(rank))
            dist.all_reduce(t, group=mine)
            dist.broadcast(root := torch.full((1,), float(rank)), 2 if rank % 2 == 0 else 3, group=mine)
            halves, _ = dist.new_subgroups(2)
            dist.all_reduce(pair := torch.full((1,), float(rank)), group=halves)
            outside = raised(ValueError, lambda: dist.get_group_rank(others, rank))
            return t.item(), root.item(), pair.item(), dist.get_rank(mine), bool(outside)

        self.assertEqual(run(4, body), [(2.0, 2.0, 1.0, 0, True), (4.0, 3.0, 1.0, 0, True),
                                        (2.0, 2.0, 5.0, 1, True), (4.0, 3.0, 5.0, 1, True)])

    def test_a_world_of_one(self):
        def body(rank):
            t = torch.ones(2)
            dist.all_reduce(t)
            dist.all_gather(parts := [torch.zeros(2)], t)
            dist.barrier()
            return parts[0].tolist()

        self.assertEqual(run(1, body), [[1.0, 1.0]])

    def test_debug_detail(self):
        def body(rank):
            import os

            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            dist.set_debug_level_from_env()
            group = dist.new_group([0, 1])
            dist.all_reduce(t := torch.ones(2), group=group)
            report = muster.straggler_report(group)
            text = raised(RuntimeError, lambda: dist.all_reduce(torch.ones(1 + rank), group=group))
            return t.tolist(), report, text

        for values_, report, text in run(2, body):
            self.assertEqual(values_, [2.0, 2.0])
            self.assertIsInstance(report, str)
            self.assertIn("mismatch", text.lower())

    def test_the_sequence_number_counts_calls(self):
        """Not what is complete, which differs between ranks: with TORCH_DISTRIBUTED_DEBUG=DETAIL they compare it."""
        def body(rank):
            group = dist.group.WORLD
            if rank == 1:
                hear("rank 0 has called")
            before = group._get_sequence_number_for_group()
            work = dist.all_reduce(torch.ones(2), async_op=True)
            grown = group._get_sequence_number_for_group() - before
            if rank == 0:
                say("rank 0 has called")  # rank 1 has not, so it is not complete
            work.wait()
            dist.barrier()
            return grown, group._get_sequence_number_for_group() - before

        self.assertEqual(run(2, body), [(1, 2)] * 2)

    def test_inference_mode_is_a_mode_of_the_caller(self):
        """What is not contiguous is written by another thread."""
        def body(rank):
            with torch.inference_mode():
                received, summed = torch.zeros(4, 6).t(), torch.ones(4, 6).t()
                if rank == 0:
                    work = dist.irecv(received, 1)
                    say("rank 0 receives")
                    work.wait()
                else:
                    hear("rank 0 receives")
                    dist.send(torch.arange(24.0).view(6, 4), 0)
                work = dist.all_reduce(summed, async_op=True)
                while not work.is_completed():  # so that no waiting thread runs it
                    pass
                return received.tolist(), summed.sum().item()

        expected = torch.arange(24.0).view(6, 4).tolist()
        self.assertEqual(run(2, body), [(expected, 48.0), (torch.zeros(6, 4).tolist(), 48.0)])


if __name__ == "__main__":
    unittest.main(verbosity=2)
