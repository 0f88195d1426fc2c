"""Trainers that run over the backend: Lightning, Accelerate, DeepSpeed's ZeRO, torchft; and the pattern of torchft without it.

Each run's parameters are compared with those of the same run with gloo, or of one process. Trainers that are not installed
are skipped.
"""
from __future__ import annotations

import importlib.util
import logging
import os
import signal
import tempfile
import unittest
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import muster
from ranks import cpu, fork

LIMIT = timedelta(minutes=10)  # the timeout of a group, which no test waits for

Parameters = list[torch.Tensor]


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def parameters(net: torch.nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in net.parameters()]


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(i, 0)
        return x[0], y[0]


# ------------------------------------------------------------------------------------------------------------ trainers


def needs(module: str) -> Callable:
    return unittest.skipUnless(importlib.util.find_spec(module), f"{module} is not installed (pip install {module})")


def train_on_two(train: Callable[[str], Parameters], backend: str) -> list[Parameters]:
    """Runs train(backend) on two ranks, whose environment is that of torchrun's ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(rank: int) -> Parameters:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
                          TORCHELASTIC_RUN_ID="test", TORCHELASTIC_RESTART_COUNT="0")
        trained = train(backend)
        assert dist.get_backend() == backend, dist.get_backend()
        dist.destroy_process_group()
        return trained

    return fork(2, body)


class Trainers(unittest.TestCase):
    def assert_equals_gloo(self, train: Callable[[str], Parameters]) -> None:
        ours, theirs = train_on_two(train, "muster"), train_on_two(train, "gloo")
        torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        self.assertFalse(torch.equal(ours[0][0], model()[0].weight))

    @needs("lightning")
    def test_lightning(self):
        import lightning
        from lightning.pytorch.strategies import DDPStrategy

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model()

            def training_step(self, batch, _):
                return mse_loss(self.net(batch[0]), batch[1])

            def validation_step(self, batch, _):
                self.log("loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def train(backend):
            module, loader = Module(), torch.utils.data.DataLoader(Data(), batch_size=4)
            trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=2,
                                        strategy=DDPStrategy(process_group_backend=backend), logger=False,
                                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
            trainer.fit(module, loader, loader)
            return [*parameters(module), trainer.callback_metrics["loss"]]

        self.assert_equals_gloo(train)

    @needs("accelerate")
    def test_accelerate(self):
        import accelerate

        def train(backend):
            dist.init_process_group(backend)  # the Accelerator itself accepts only gloo for CPUs
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            net = model()
            net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1),
                                                         torch.utils.data.DataLoader(Data(), batch_size=4))
            for x, y in loader:
                with accelerator.accumulate(net):
                    loss = mse_loss(net(x), y)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.wait_for_everyone()
            return [*parameters(accelerator.unwrap_model(net)), accelerator.gather(loss.detach()),
                    accelerator.reduce(loss.detach(), "mean")]

        self.assert_equals_gloo(train)

    def zero(self, stage: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference only, and compiled at first use
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
                  "zero_optimization": {"stage": stage}}

        def train(backend):
            deepspeed.init_distributed(dist_backend=backend, verbose=False)
            net = model()
            engine, _, loader, _ = deepspeed.initialize(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
                                                        training_data=Data(), config=config)
            for x, y in loader:
                engine.backward(mse_loss(engine(x), y))
                engine.step()
            return parameters(engine.module)

        self.assert_equals_gloo(train)

    @needs("deepspeed")
    def test_deepspeed_zero_1(self):
        self.zero(1)

    @needs("deepspeed")
    def test_deepspeed_zero_2(self):
        self.zero(2)


# ---------------------------------------------------------------------------- a rank dies, and another takes its place later

MEMBERS = [(0, 1, 2), (0, 1), (0, 1, 3)]  # the processes of each successive group
STEPS = [range(4), range(3, 6), range(6, 9)]  # each group's steps: the first group fails in its last, which the second repeats
KILLED, IN_STEP = 2, 3

# (process, number of the group, model, store, rank, size) -> how the group failed
Stay = Callable[[int, int, torch.nn.Module, dist.Store, int, int], str]


def take_steps(me: int, group: int, net: torch.nn.Module, after_backward: Callable[[], None] = lambda: None) -> str:
    """Trains as a member of one group. Returns how the group failed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in STEPS[group]:
        x, y = batch(me, step)
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        if (me, step) == (KILLED, IN_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
            after_backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
    return ""


def in_world(backend: str) -> Stay:
    """torch.distributed's default group is destroyed and made again, with DDP over it."""
    def stay(me, group, net, store, rank, size):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)
        failure = take_steps(me, group, DistributedDataParallel(net))
        dist.destroy_process_group()
        return failure

    return stay


def in_own_group(create: Callable[[dist.Store, int, int], dist.ProcessGroup]) -> Stay:
    """Groups that torch.distributed does not know, like torchft's: they are aborted, then replaced."""
    def stay(me, number, net, store, rank, size):
        group = create(store, rank, size)
        for parameter in net.parameters():
            group.broadcast(parameter.detach(), 0).wait()

        def average():
            for work in [group.allreduce(parameter.grad) for parameter in net.parameters()]:
                work.wait()
            for parameter in net.parameters():
                parameter.grad /= size

        failure = take_steps(me, number, net, average)
        group.abort()
        return failure

    return stay


def muster_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    return muster.create_process_group(store, rank, size, LIMIT)


def gloo_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(cpu(), kind, dist.ProcessGroupGloo(store, rank, size, LIMIT))
    return group


class Reconfiguration(unittest.TestCase):
    def survivors(self, stay: Stay) -> list[tuple[Parameters, list[str]]]:
        """Returns, for each process that lives at the end, its parameters and how each of its groups failed."""
        with tempfile.TemporaryDirectory() as folder:

            def body(me):
                store, net, failures = dist.FileStore(f"{folder}/store", -1), model(), []
                if me not in MEMBERS[0]:
                    for parameter in net.parameters():  # the new process has to get them from the others
                        torch.nn.init.zeros_(parameter)
                for number, members in enumerate(MEMBERS):
                    if me in members:
                        place = dist.PrefixStore(f"group {number}", store)
                        failures.append(stay(me, number, net, place, members.index(me), len(members)))
                return parameters(net), failures

            answers = fork(1 + max(map(max, MEMBERS)), body)
        self.assertIsNone(answers.pop(KILLED))
        return answers

    def assert_equals_gloo(self, ours: Stay, theirs: Stay) -> None:
        survivors = self.survivors(ours)
        trained, failures = zip(*survivors)
        for mine in trained[1:]:
            torch.testing.assert_close(mine, trained[0], rtol=0, atol=0)
        for first, *later in failures[:2]:
            self.assertIn(f"rank {KILLED} (pid", first)
            self.assertEqual(later, ["", ""])
        self.assertEqual(failures[2], [""])
        torch.testing.assert_close(trained, tuple(answer[0] for answer in self.survivors(theirs)), rtol=0, atol=1e-6)

    def test_default_group_and_ddp(self):
        self.assert_equals_gloo(in_world("muster"), in_world("gloo"))

    def test_groups_of_ones_own(self):
        self.assert_equals_gloo(in_own_group(muster_group), in_own_group(gloo_group))

    @needs("torchft")
    def test_torchft(self):
        """The ranks that take part in a step depend on timing. The results are compared with the same steps of one process."""
        from torchft import Manager
        from torchft.coordination import LighthouseServer
        from torchft.process_group import ProcessGroupWrapper

        class ProcessGroupMuster(ProcessGroupWrapper):
            def _create_pg(self, store, rank, world_size):
                return muster.create_process_group(store, rank, world_size, self._timeout)

            def getBackendName(self):
                return "torchft-muster"

        lighthouse = 4

        def serve(store):
            server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=1000)
            store.set("lighthouse", server.address())
            store.wait(["end 0", "end 1", "end 3"])
            server.shutdown()

        def replica(me, store):
            net, taken, together = model(), [], 0
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.wait(["two are left" if me == 3 else "lighthouse"])
            manager = Manager(pg=ProcessGroupMuster(LIMIT), min_replica_size=2, use_async_quorum=False, timeout=LIMIT,
                              load_state_dict=net.load_state_dict, state_dict=net.state_dict, replica_id=str(me),
                              lighthouse_addr=store.get("lighthouse").decode(), rank=0, world_size=1,
                              store_addr="127.0.0.1", store_port=own_store.port)
            while together < 3:
                optimizer.zero_grad()
                manager.start_quorum()
                step, size = manager.current_step(), manager.num_participants()
                x, y = batch(me, step)
                mse_loss(net(x), y).backward()
                if me == KILLED and step >= IN_STEP and size == 3:
                    store.set("death", "")
                    os.kill(os.getpid(), signal.SIGKILL)
                for work in [manager.allreduce(parameter.grad) for parameter in net.parameters()]:
                    work.wait()
                if manager.should_commit():
                    optimizer.step()
                    store.set(f"step {step} of {me}", "")
                    taken.append((step, size))
                    if store.check(["death"]):
                        together += size == 3
                        store.set("two are left", "")
            store.set(f"end {me}", "")
            store.wait(["end 0", "end 1", "end 3"])
            manager.shutdown(wait=False)
            return parameters(net), taken

        with tempfile.TemporaryDirectory() as folder:

            def body(me):
                store = dist.FileStore(f"{folder}/store", -1)
                return serve(store) if me == lighthouse else replica(me, store)

            answers = fork(5, body)
            store = dist.FileStore(f"{folder}/store", -1)
            sizes = dict(entry for me in (0, 1, 3) for entry in answers[me][1])
            took = [[me for me in range(4) if store.check([f"step {step} of {me}"])] for step in range(len(sizes))]
        self.assertEqual([len(members) for members in took], [sizes[step] for step in range(len(sizes))])
        self.assertIn([0, 1], took)
        self.assertEqual(took[-3:], [[0, 1, 3]] * 3)

        alone = model()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step, members in enumerate(took):
            optimizer.zero_grad()
            for me in members:
                x, y = batch(me, step)
                (mse_loss(alone(x), y) / len(members)).backward()
            optimizer.step()
        for me in (0, 1, 3):
            torch.testing.assert_close(answers[me][0], parameters(alone), rtol=0, atol=1e-6)


if __name__ == "__main__":
    unittest.main(verbosity=2)
