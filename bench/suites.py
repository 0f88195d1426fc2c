"""The benchmarks: which programs each one runs, with which arguments, and which of their rows count."""

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from rounds import Server, measure_cases
from runner import peer_script
from sandbox import TwoHosts
from training_suites import TrainingSuites

SIZES = (16, 4 << 10, 64 << 10, 256 << 10, 4 << 20)
ALL_SIZES = [16, *(1 << shift for shift in range(10, 27, 2))]


class Suites(TrainingSuites):
    """A method is a benchmark if tables.SHOW has its name. It returns rows."""

    def collectives(self, cases, ranks=None, bound="none", launcher=None, gloo=True, most_calls=None):
        """Measures cases, (op, bytes). `bound`: whether each rank is bound to a core. `launcher`: "openmpi" starts
        Muster's ranks. `most_calls`: of which a time is the mean."""
        ranks = ranks or self.args.ranks
        program = [self.program("bench_collectives"), "--serve"]
        if launcher:
            ours = self.mpi_command(launcher, *program, ranks=ranks, bound=bound)
        else:
            impl = "muster-bound" if bound == "core" and ranks <= os.cpu_count() else "muster"
            ours = self.command(impl, *program, ranks=ranks)
        commands = [ours, *self.mpi_peers(ranks, bound)]
        if gloo:
            commands.append(self.torchrun("collectives_gloo.py", ranks=ranks))
        few = {"MUSTER_BENCH_MOST_CALLS": str(most_calls)} if most_calls else {}
        return self.measured(commands, cases, ranks, {**self.env, **few})

    def measured(self, commands, cases, ranks, env):
        """Measures cases with all implementations whose commands are not None. The first is Muster."""
        servers = []
        try:
            for command in commands:
                if command:
                    servers.append(Server(command, ranks, env))
            return measure_cases(lambda op: servers[:1] if op == "floor" else servers, self.reference, cases,
                                 self.args.rounds)
        finally:
            for server in servers:
                server.close()

    def all_reduce(self):
        return self.collectives([(op, n) for op in ("all_reduce", "floor") for n in ALL_SIZES])

    def messages(self):
        return self.collectives([(op, n) for op in ("send_recv", "exchange") for n in ALL_SIZES])

    def crowd(self):
        """More ranks than cores."""
        ops = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        cases = [(op, n) for op in ops for n in SIZES]
        return [row for ranks, calls in ((4, 100), (8, 20))  # MPICH's ranks spin, and wait for a turn in each call
                for row in self.collectives(cases, ranks=ranks, most_calls=calls)]

    def pinned(self):
        """Ranks that are bound to cores and ranks that are not, started by muster run and by mpirun."""
        ops = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
        cases = [(op, n) for op in ops for n in SIZES] + [("barrier", 8)]
        rows = []
        for launcher, bound in ((None, "core"), ("openmpi", "none"), ("openmpi", "core")):
            if launcher and self.mpi_command(launcher, ranks=2) is None:
                continue
            found = self.collectives(cases, bound=bound, launcher=launcher, gloo=False)
            rows += [dict(row, bound=bound, launcher=launcher or "muster") for row in found]
        return rows

    def others(self):
        ops = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
        cases = [(op, n) for op in ops for n in (*SIZES, 64 << 20)]
        rows = self.collectives([*cases, *(("send_recv", n) for n in SIZES), ("barrier", 8)])
        return rows + self.collectives([("scan", n) for n in SIZES], gloo=False)  # Gloo has none

    def hosts_collectives(self):
        """Collectives over two hosts of two ranks each: over a gigabit per second, and over a link that is as fast as
        the cores."""
        rows = []
        for rate in ("1gbit", None):
            with TwoHosts(rate) as hosts:
                if hosts.missing:
                    self.missing["two hosts"] = hosts.missing
                    return []
                jobs = ((hosts.muster(self.muster, 2), [self.program("bench_collectives"), "--serve"]),
                        (hosts.torchrun(2), [peer_script("collectives_gloo.py")]))
                commands = [hosts.job(launcher, program) for launcher, program in jobs]
                cases = [("all_reduce", n) for n in (16, 256 << 10, 4 << 20, 64 << 20)]
                cases += [(op, n) for op in ("all_gather", "reduce_scatter") for n in (256 << 10, 4 << 20, 64 << 20)]
                found = self.measured(commands, cases, 4, hosts.environment(self.env))
            rows += [dict(row, bench="hosts_collectives", hosts=2, link=rate or "unlimited") for row in found]
        return rows

    def launch(self):
        """The start and end of a job; and the time from the start of a job to what its ranks do first together, beside
        the start of libtorch alone."""
        libtorch, ranks = self.program("bench_libtorch"), self.args.ranks
        start_all = f"for rank in $(seq {ranks}); do {shlex.quote(libtorch)} & all=\"$all $!\"; done; "
        wait_for_all = "for one in $all; do wait $one || exit 1; done"
        alone, as_many = "libtorch alone, to its first tensor", "libtorch alone in as many processes"
        job, many = "a job, to its first all_reduce", "a job, to its first barrier"
        light = "a job without libtorch, to its first barrier"
        starts = {  # the command, how many processes take part, and the bound for their time
            alone: ([libtorch], 1, None),
            as_many: (["/bin/sh", "-c", start_all + wait_for_all], ranks, None),
            job: (self.job("bench_recovery", "start"), ranks, None),
            many: (self.job("bench_recovery", "barrier", ranks=64), 64, None),
            light: (self.job("bench_meet", ranks=64), 64, 2000),
        }
        empty = self.build / "bench" / "empty.py"
        empty.write_text("")
        jobs = {"muster": self.job("bench_nothing"), "torchrun": self.command("torchrun", str(empty))}
        taken = {name: [] for name in (*starts, *jobs)}
        for _ in range(self.args.rounds):
            for impl in ("muster",) * 7 + ("torchrun",):
                if jobs[impl]:
                    start = time.perf_counter()
                    subprocess.run(jobs[impl], env=self.env, check=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    taken[impl].append((time.perf_counter() - start) * 1e3)
            for name in (alone, job, as_many, as_many, job, alone) * 3 + (many, light):
                command = starts[name][0]
                start, events = self.events(command)
                if events is None:
                    sys.exit(f"{' '.join(command)} took more than ten minutes")
                first = max(event["t"] for event in events if event["event"] == "first")
                taken[name].append((first - start) * 1e3)
        found = [(name, processes, taken[name], bound) for name, (_, processes, bound) in starts.items()]
        for name in (alone, as_many):
            above = [ours - theirs for ours, theirs in zip(taken[job], taken[name])]
            found.append((f"{job}: above {name}", ranks, above, 150))
        rows = [{"bench": "launch", "impl": impl, "ranks": ranks, "ms": round(statistics.median(taken[impl]), 2)}
                for impl in jobs if taken[impl]]
        for what, processes, values, bound in found:
            rows.append({"bench": "launch", "what": what, "ranks": processes,
                         "typical": round(statistics.median(values), 1), "worst": round(max(values), 1),
                         "bound": bound, "unit": "ms"})
        return rows

    def snapshot(self):
        """Muster's snapshots, torch.distributed.checkpoint, and dd."""
        folder = tempfile.mkdtemp(prefix="muster-bench-")
        command = self.job("bench_snapshot", folder)
        peer = self.torchrun("snapshot_torch.py", os.path.join(folder, "torch"))
        dd = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=1M", "count=512", "conv=fsync"]
        try:
            commands = [command, *([peer] if peer else [])]
            rows = self.best_of_rounds(commands, lambda row: (row["op"], row["impl"]), "us", min)
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                subprocess.run(dd, check=True, stderr=subprocess.DEVNULL)
                best = min(best, time.perf_counter() - start)
            row = {"bench": "snapshot", "op": "save 512 MB", "impl": "dd", "ranks": 1, "us": round(best * 1e6, 1)}
            return [*rows, row]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def recovery(self):
        """The time from the start of a job, and from the death of a rank, to an all_reduce of all ranks."""
        program, ranks = self.program("bench_recovery"), self.args.ranks
        run = [str(self.muster), "run", "--no-prefix", "--max-restarts", "1", "-n", str(ranks)]
        torchrun = self.torchrun("recovery_torch.py")
        cases = [("load", "muster", [self.program("bench_libtorch")], 5),
                 ("restart", "muster", [*run, program, "restart"], 5),
                 ("elastic", "muster", [*run, program, "elastic"], 5)]
        if torchrun:
            flags = ["--max-restarts", "5", "--monitor-interval", "0.1"]
            cases.append(("restart", "torchrun", [*torchrun[:-1], *flags, torchrun[-1]], 2))
        rows = []
        for what, impl, command, times in cases:
            taken = {}
            for _ in range(times):
                start, events = self.events(command, 60)
                if events is None:
                    if impl == "muster":
                        sys.exit(f"{' '.join(command)} took more than a minute")
                    self.missing[f"a run of {impl}"] = "it hung for a minute in its restart"
                    continue
                first, kill = ([event["t"] for event in events if event["event"] == name] for name in ("first", "kill"))
                if what == "load":
                    taken.setdefault("load", []).append(first[0] - start)
                elif what == "restart":
                    taken.setdefault("start", []).append(first[0] - start)
                if kill:
                    taken.setdefault(what, []).append(first[-1] - kill[0])
            for name, values in taken.items():
                rows.append({"bench": "recovery", "what": name, "impl": impl, "ranks": ranks,
                             "ms": round(statistics.median(values) * 1e3, 1)})
        return rows

    def rpc(self):
        """Calls on one host and over TLS on the loopback interface; PyTorch's and gRPC's calls, and the messages of
        UCX."""
        over_tls = ["--impl=muster-tls", "--transport=tcp",
                    *(f"--case={case}" for case in ("echo_4B", "echo_int", "pipelined", "echo_1MB", "echo_16MB"))]
        secret = {"MUSTER_SECRET": "5ec7e75ec7e75ec7e75ec7e75ec7e75e"}

        def rows():
            yield from self.rows(self.job("bench_rpc", ranks=2))
            yield from self.rows(self.job("bench_rpc", *over_tls, ranks=2), **secret)
            for ranks in (16, 64):  # PyTorch's, below, with 16 only
                yield from self.rows(self.job("bench_rpc", "--case=mesh", ranks=ranks))
            yield from self.rows(self.torchrun("rpc_torch.py", "--mesh", ranks=16))
            yield from self.rows(self.torchrun("rpc_torch.py", ranks=2))
            for peer, package in (("grpc", "libgrpc++-dev"), ("ucx", "libucx-dev")):
                yield from self.rows(self.built(f"peer_rpc_{peer}", peer, package))
        return self.best_rows(rows)

    def transport(self):
        """The transports between hosts, without calls above them, over the loopback interface: TCP plain, under TLS,
        and UCX."""
        return self.best_rows(lambda: self.rows([self.program("bench_transport_tcp"), "1"]))

    def optim(self):
        """A step of DistributedOptimizer over three owners, and a step of PyTorch's."""
        def rows():
            yield from self.rows(self.job("bench_optim", ranks=3))
            yield from self.rows(self.torchrun("optim_torch.py", ranks=3))
        return self.best_rows(rows)

    def optimizers(self):
        """A step of an optimizer over 25 million parameters, on one thread and on two: Muster's, libtorch's C++ and
        Python's."""
        def rows():
            for threads in ("1", "2"):
                peer = self.command("torchrun") and [sys.executable, peer_script("optimizers_torch.py"), threads]
                for command in ([self.program("bench_optimizers"), threads], peer):
                    for row in self.rows(command):
                        yield {**row, "case": f"{row['case']}, threads {threads}"}
        return self.best_rows(rows)

    def meta(self):
        """Meta-steps in one process and over two workers, and TorchOpt's."""
        def rows():
            for ranks in (1, 2):
                yield from self.rows(self.job("bench_meta", ranks=ranks))
            if subprocess.run([sys.executable, "-c", "import torchopt"], capture_output=True).returncode:
                self.missing["torchopt"] = "pip install torchopt==0.7.3"
            else:
                yield from self.rows([sys.executable, "-W", "ignore", peer_script("meta_torchopt.py")])
        return self.best_rows(rows)

    def autograd(self):
        """Gradients through remote calls. The steps run on two workers, because more would take their cores; the
        sleepers run on five."""
        def rows():
            for ranks in (2, 5):
                yield from self.rows(self.job("bench_autograd", ranks=ranks))
                yield from self.rows(self.torchrun("autograd_torch.py", ranks=ranks))
        return self.best_rows(rows)

    def bounds(self, name):
        return self.rows([self.program("bench_bounds"), name])

    def fault(self):
        return self.bounds("fault")

    def idle(self):
        return self.bounds("idle")

    def memory(self):
        return self.bounds("memory")

    def copy(self):
        return self.bounds("copy")
