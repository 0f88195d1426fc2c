#!/usr/bin/env python3
"""Runs Muster's benchmarks and the peers' in one go and prints them side by side.

    bench/run.py --build build/release [--json FILE] [--only all_reduce,messages,others,ddp,zero,slow_link,sync_batch_norm,launch,recovery,snapshot,crowd,pinned,rpc,autograd,optim,optimizers,meta,fsdp,hosts,limit,fault,idle,memory,copy]
                 [--ranks 2] [--rounds 3]

The implementations take turns, `rounds` times, so that a noisy minute affects all of them. Of collectives and messages the median of the rounds' ratios to the
fastest peer counts, from rounds in the machine's fast state (bench/rounds.py); of the others, the best round of each row. A peer that is not installed is left
out, and the output says so. fault, idle, memory and copy have no peers: each figure stands beside the bound that Muster promises, as do some of launch. --json writes one object per line,
after a first line about the machine.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from rounds import Reference, Server, measure_case

HERE = Path(__file__).resolve().parent
INTEL_MPI = Path(os.environ.get("I_MPI_ROOT", sys.prefix))  # its own variable, or where pip installs it
MPIS = {  # the launcher, and how to install it
    "openmpi": ("mpirun.openmpi", "apt-get install openmpi-bin libopenmpi-dev"),
    "mpich": ("mpiexec.mpich", "apt-get install mpich libmpich-dev"),
    "intelmpi": ("mpiexec.hydra", "pip install impi-rt impi-devel"),
}
SIZES = (16, 4 << 10, 64 << 10, 256 << 10, 4 << 20)


class TwoHosts:
    """Two network namespaces, with a link between them."""

    ADDRESSES = ("10.213.9.1", "10.213.9.2")

    def __init__(self, rate="1gbit"):
        self.rate = rate

    def __enter__(self):
        self.names = [f"muster-bench-{os.getpid()}-{side}" for side in "ab"]
        self.files = tempfile.TemporaryDirectory()
        self.secret = str(Path(self.files.name) / "secret")
        Path(self.secret).write_text("5ec7e75ec7e75ec7e75ec7e75ec7e75e")
        Path(self.secret).chmod(0o600)
        one, two = self.names
        script = f"ip netns add {one}; ip netns add {two}; ip -n {one} link add mu0 type veth peer name mu0 netns {two}"
        for name, address in zip(self.names, self.ADDRESSES):
            script += f"; ip -n {name} addr add {address}/24 dev mu0; ip -n {name} link set mu0 up; ip -n {name} link set lo up"
            script += f"; ip netns exec {name} tc qdisc add dev mu0 root tbf rate {self.rate} burst 256kb latency 50ms"
        made = subprocess.run(["/bin/sh", "-ec", script], capture_output=True, text=True)
        self.missing = f"it needs ip(8) and the right to make namespaces: {made.stderr.strip()}" if made.returncode else ""
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        self.files.cleanup()

    def row(self, env, launcher, program):
        """Runs a job on both hosts and returns the row that one of its ranks prints."""
        env = dict(env, GLOO_SOCKET_IFNAME="mu0")
        jobs = [subprocess.Popen(["ip", "netns", "exec", name, *launcher, "--nnodes", "2", "--node-rank", str(node), *program], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for node, name in enumerate(self.names)]
        said = [job.communicate(timeout=900) for job in jobs]
        for job, (_, errors) in zip(jobs, said):
            if job.returncode != 0:
                sys.exit(f"{' '.join(job.args)} failed with status {job.returncode}:\n{errors[-2000:]}")
        return next(json.loads(line) for out, _ in said for line in out.splitlines() if line.startswith("{"))


class MemoryLimit:
    """A control group, version 1 or 2, whose processes may use so many bytes of memory."""

    def __init__(self, limit):
        self.missing = "it needs the right to make control groups for memory"
        for top, self.limit_file, self.peak_file in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max", "memory.peak")):
            self.group = top / f"muster-bench-{os.getpid()}"
            try:
                self.group.mkdir()
            except OSError:
                continue
            if (self.group / self.limit_file).exists() and (self.group / self.peak_file).exists():
                (self.group / self.limit_file).write_text(str(limit))
                for swap, value in (("memory.memsw.limit_in_bytes", limit), ("memory.swap.max", 0)):
                    if (self.group / swap).exists():
                        (self.group / swap).write_text(str(value))
                self.missing = ""
                return
            self.group.rmdir()

    def run(self, command, env):
        """Returns the rows that the command prints, none if the kernel killed it for its memory; and the largest use in bytes."""
        enter = ["/bin/sh", "-c", f'echo $$ > {self.group / "cgroup.procs"} && exec "$@"', "sh"]
        result = subprocess.run([*enter, *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=900)
        rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        if result.returncode != 0:
            events = next(path for path in (self.group / "memory.oom_control", self.group / "memory.events") if path.exists()).read_text()
            if not re.search(r"^oom_kill [1-9]", events, re.M):
                sys.exit(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-2000:]}")
            rows = []
        return rows, int((self.group / self.peak_file).read_text())

    def close(self):
        for _ in range(100):
            try:
                return self.group.rmdir()
            except OSError:  # its last processes are about to end, or have been left behind
                for pid in (self.group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.1)


class Bench:
    def __init__(self, args):
        self.args = args
        self.build = Path(args.build).resolve()
        self.muster = self.build / "tools" / "muster"
        self.missing = {}
        # muster run sets these variables for its ranks. The peers get them, too.
        self.env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_TRIM_THRESHOLD_=str(1 << 30), MALLOC_MMAP_THRESHOLD_=str(32 << 20))
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.build / "python"), os.environ.get("PYTHONPATH"))))  # for Muster's plug-in

    def command(self, impl, *program, ranks=None):
        """Returns the command by which `impl` starts a program on all ranks, or None if `impl` is not installed."""
        ranks = ranks or self.args.ranks
        n = str(ranks)
        if impl == "muster":
            return [str(self.muster), "run", "--no-prefix", "-n", n, *program]
        if impl == "muster-bound":
            return [str(self.muster), "run", "--no-prefix", "--pin", "cores", "-n", n, *program]
        if impl == "torchrun":
            try:
                import torch  # noqa: F401
            except ImportError:
                self.missing["pytorch"] = "PyTorch is not in this Python: pip install torch==2.13.0"
                return None
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n, *program]
        return self.mpi_command(impl, *program, ranks=ranks)

    def mpi_command(self, impl, *program, ranks, bound="core"):
        """The same for an MPI: "openmpi", "mpich" or "intelmpi". `bound`: "core" binds each rank to a core, "none" none."""
        launcher, package = MPIS[impl]
        launcher = str(INTEL_MPI / "bin" / launcher) if impl == "intelmpi" else shutil.which(launcher)
        if launcher is None or not Path(launcher).exists():
            self.missing[impl] = f"it is not installed: {package}"
            return None
        n, crowded = str(ranks), ranks > os.cpu_count()
        if impl == "openmpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            place = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"] if crowded else ["--bind-to", bound]
            return [launcher, *root, *place, "-n", n, *program]
        if impl == "mpich":
            return [launcher, *([] if crowded else ["-bind-to", bound]), "-n", n, *program]
        pin = ["-genv", "I_MPI_PIN", "0" if crowded or bound == "none" else "1"]
        library = f"{INTEL_MPI / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        wait = ["-genv", "I_MPI_WAIT_MODE", "1"] if crowded else []
        return ["env", f"LD_LIBRARY_PATH={library}", launcher, *pin, *wait, "-genv", "I_MPI_FABRICS", "shm", "-n", n, *program]

    def built(self, program, name, package):
        """Returns the command of a peer's program, or None if CMake did not build it because its library was not installed."""
        path = self.build / "bench" / program
        if path.exists():
            return [str(path)]
        self.missing[name] = f"its library was not installed when the benchmarks were built: apt-get install {package} pkg-config"
        return None

    def rows(self, command, **env):
        if command is None:
            return []
        result = subprocess.run(command, env=dict(self.env, **env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=900)
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-2000:]}")
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    def mpi_peers(self, ranks, bound):
        """Returns the commands of all MPIs that are installed, with the program for each."""
        for impl in MPIS:
            program = self.build / "bench" / f"peer_collectives_{impl}"
            if impl == "intelmpi" and (INTEL_MPI / "include" / "mpi.h").exists():
                source = HERE / "peers" / "collectives_mpi.cpp"
                subprocess.run(["g++", "-O3", "-std=c++17", f"-I{INTEL_MPI / 'include'}", str(source), str(INTEL_MPI / "lib" / "libmpi.so.12"),
                                f"-Wl,-rpath,{INTEL_MPI / 'lib'}", "-o", str(program)], check=True)
            if not program.exists():
                self.missing[impl] = f"it was not installed when the benchmarks were built: {MPIS[impl][1]}"
                continue
            command = self.mpi_command(impl, str(program), impl, ranks=ranks, bound=bound)
            if command:
                yield command

    def collectives(self, cases, ranks=None, bound="none", launcher=None, gloo=True):
        """Measures cases, (op, bytes). `bound`: whether each rank is bound to a core. `launcher`: "openmpi" starts Muster's ranks."""
        ranks = ranks or self.args.ranks
        program = [str(self.build / "bench" / "bench_collectives"), "--serve"]
        ours = (self.mpi_command(launcher, *program, ranks=ranks, bound=bound) if launcher
                else self.command("muster-bound" if bound == "core" and ranks <= os.cpu_count() else "muster", *program, ranks=ranks))
        commands = [ours, *self.mpi_peers(ranks, bound)]
        if gloo:
            commands.append(self.command("torchrun", str(HERE / "peers" / "collectives_gloo.py"), ranks=ranks))
        servers, reference = [], Reference([str(self.build / "bench" / "bench_reference")])
        try:
            for command in commands:
                if command:
                    servers.append(Server(command, ranks, self.env))
            return [row for op, size in cases for row in measure_case(servers[:1] if op == "floor" else servers, reference, op, size, self.args.rounds)]
        finally:
            for server in servers:
                server.close()
            reference.close()

    def all_reduce(self):
        sizes = [16, *(1 << shift for shift in range(10, 27, 2))]
        return self.collectives([(op, n) for op in ("all_reduce", "floor") for n in sizes])

    def messages(self):
        return self.collectives([("send_recv", n) for n in [16, *(1 << shift for shift in range(10, 27, 2))]])

    def crowd(self):
        """More ranks than cores. Gloo is left out: the goal does not mention it, and it takes minutes."""
        cases = [(op, n) for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all") for n in (16, 4 << 10, 256 << 10, 4 << 20)]
        return [row for ranks in (4, 8) for row in self.collectives(cases, ranks=ranks, gloo=False)]

    def pinned(self):
        """Ranks that are bound to cores and ranks that are not, started by muster run and by mpirun."""
        cases = [(op, n) for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv") for n in SIZES] + [("barrier", 8)]
        rows = []
        for launcher, bound in ((None, "core"), ("openmpi", "none"), ("openmpi", "core")):
            if launcher and self.mpi_command(launcher, ranks=2) is None:
                continue
            rows += [dict(row, bound=bound, launcher=launcher or "muster") for row in self.collectives(cases, bound=bound, launcher=launcher, gloo=False)]
        return rows

    def others(self):
        cases = [(op, n) for op in ("broadcast", "all_gather", "reduce_scatter", "all_to_all") for n in (*SIZES, 64 << 20)]
        rows = self.collectives([*cases, *(("send_recv", n) for n in SIZES), ("barrier", 8)])
        return rows + self.collectives([("scan", n) for n in SIZES], gloo=False)  # Gloo has none

    def ddp(self):
        commands = []
        for net, steps in (("small", 300), ("wide", 20)):
            flags = ["--net", net, "--steps", str(steps)]
            for sync in ("ddp", "barrier", "none"):
                commands.append(self.command("muster", str(self.build / "bench" / "bench_ddp"), *flags, "--sync", sync))
            commands.append(self.command("muster", str(self.build / "bench" / "bench_ddp"), *flags, "--shards", "8"))
            for no_sync in ([], ["--no-sync"]):
                commands.append(self.command("torchrun", str(HERE / "peers" / "ddp_torch.py"), *flags, *no_sync))
        return self.rounds(commands, lambda row: (row["net"], row["impl"]), "samples_per_s", max)

    def zero(self):
        """AdamW whose states are divided among the ranks."""
        ours, peer = str(self.build / "bench" / "bench_ddp"), str(HERE / "peers" / "ddp_torch.py")
        flags = ["--net", "wide", "--steps", "20"]
        commands = [self.command("muster", ours, *flags, "--optimizer", name) for name in ("adamw", "zero", "zero-backward")]
        commands += [self.command("torchrun", peer, *flags, "--optimizer", name, "--backend", backend) for name in ("adamw", "zero") for backend in ("gloo", "muster")]
        return [dict(row, bench="zero") for row in self.rounds(commands, lambda row: (row["net"], row["impl"]), "samples_per_s", max)]

    def slow_link(self):
        """PowerSGD on two hosts of one rank each, with 200 Mbit/s between them."""
        flags, found = ["--net", "wide", "--steps", "4", "--warmup", "3"], {}
        with TwoHosts("200mbit") as hosts:
            if hosts.missing:
                self.missing["a slow link"] = hosts.missing
                return []
            for _ in range(self.args.rounds):
                for hook in ("none", "bf16", "power"):
                    row = hosts.row(self.env, [str(self.muster), "run", "--no-prefix", "--rdzv", f"{hosts.ADDRESSES[0]}:29400", "--secret-file", hosts.secret, "-n", "1"], [str(self.build / "bench" / "bench_ddp"), *flags, "--hook", hook])
                    found.setdefault(row["impl"], []).append(row)
                for hook in ("none", "power"):
                    row = hosts.row(self.env, [sys.executable, "-m", "torch.distributed.run", "--master-addr", hosts.ADDRESSES[0], "--master-port", "29500", "--nproc-per-node", "1"], [str(HERE / "peers" / "ddp_torch.py"), *flags, "--hook", hook])
                    found.setdefault(row["impl"], []).append(row)
        return [dict(max(rows, key=lambda row: row["samples_per_s"]), bench="slow_link", hosts=2, mbit_per_s=200) for rows in found.values()]

    def sync_batch_norm(self):
        commands = [self.command("muster", str(self.build / "bench" / "bench_sync_batch_norm"))]
        return self.rounds(commands, lambda row: (row["net"], row["impl"]), "ms", min)

    def fsdp(self):
        """One model for all ranks, PyTorch's FSDP2 over Gloo and over Muster's plug-in, and steps without synchronisation; activations that are computed again."""
        ours, peer = str(self.build / "bench" / "bench_fsdp"), str(HERE / "peers" / "fsdp_torch.py")
        commands = [self.command("muster", ours, "--sync", *sync) for sync in (["fsdp"], ["fsdp", "--mixed"], ["ddp"], ["barrier"], ["none"])]
        commands += [self.command("torchrun", peer, "--backend", backend, *flags) for flags in ([], ["--mixed"]) for backend in ("gloo", "muster")]
        commands.append(self.command("torchrun", peer, "--no-sync"))
        large = ["--batch", "16", "--length", "128", "--steps", "4"]
        for flags in ([], ["--checkpoint"]):
            commands.append(self.command("muster", ours, "--sync", "none", *large, *flags, ranks=1))
            commands.append(self.command("torchrun", peer, "--no-sync", *large, *flags, ranks=1))
        commands.append(self.command("muster", ours, "--sync", "none", *large, "--checkpoint", "--keep", "aten::addmm", ranks=1))
        return self.rounds(commands, lambda row: (row["impl"], row["ranks"], row["tokens"]), "ms", min)

    def hosts(self):
        """Steps on two hosts of two ranks each, with a gigabit per second between them."""
        ours, peer = str(self.build / "bench" / "bench_fsdp"), str(HERE / "peers" / "fsdp_torch.py")
        steps = ["--steps", "5"]
        found = {}
        with TwoHosts() as hosts:
            if hosts.missing:
                self.missing["two hosts"] = hosts.missing
                return []
            for _ in range(self.args.rounds):
                for sync in (["fsdp"], ["fsdp", "--mixed"], ["full"], ["full", "--mixed"], ["ddp"], ["none"]):
                    found.setdefault("".join(sync), []).append(hosts.row(self.env, [str(self.muster), "run", "--no-prefix", "--rdzv", f"{hosts.ADDRESSES[0]}:29400", "--secret-file", hosts.secret, "-n", "2"], [ours, *steps, "--sync", *sync]))
                for backend in ("gloo", "muster"):
                    for kind in ([], ["--hybrid"], ["--mixed"], ["--hybrid", "--mixed"]):
                        row = hosts.row(self.env, [sys.executable, "-m", "torch.distributed.run", "--master-addr", hosts.ADDRESSES[0], "--master-port", "29500", "--nproc-per-node", "2"], [peer, *steps, "--backend", backend, *kind])
                        found.setdefault(row["impl"], []).append(row)
        return [dict(min(rows, key=lambda row: row["ms"]), bench="hosts", hosts=2, gbit_per_s=1) for rows in found.values()]

    def limit(self):
        """400 million parameters with AdamW on four ranks that have 12 GiB together."""
        size = ["--blocks", "127", "--batch", "1", "--length", "64", "--steps", "2"]
        peer, rows = str(HERE / "peers" / "fsdp_torch.py"), []
        for impl, command in (("muster-fsdp", self.command("muster", str(self.build / "bench" / "bench_fsdp"), *size, ranks=4)),
                              *((f"fsdp2-{backend}", self.command("torchrun", peer, *size, "--backend", backend, ranks=4)) for backend in ("gloo", "muster"))):
            if command is None:
                continue
            limit = MemoryLimit(12 << 30)
            if limit.missing:
                self.missing["a limit of memory"] = limit.missing
                return []
            try:
                found, peak = limit.run(command, self.env)
            finally:
                limit.close()
            rows.append(dict(found[0] if found else {"impl": impl, "ranks": 4, "ms": None}, bench="limit", runs=bool(found), limit_mib=12 << 10, largest_mib=peak >> 20))
        return rows

    def events(self, command, seconds=600):
        """Runs a job. Returns when it started, and the events that its ranks tell; None if it took longer than `seconds`."""
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        try:
            result = subprocess.run(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return start, None
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-2000:]}")
        return start, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    def launch(self):
        """The start and end of a job; and the time from the start of a job to what its ranks do first together, beside the start of libtorch alone."""
        program, libtorch = str(self.build / "bench" / "bench_recovery"), str(self.build / "bench" / "bench_libtorch")
        alone, as_many, job, many, light = "libtorch alone, to its first tensor", "libtorch alone in as many processes", "a job, to its first all_reduce", "a job, to its first barrier", "a job without libtorch, to its first barrier"
        starts = {  # the command, how many processes take part, and the bound for their time
            alone: ([libtorch], 1, None),
            as_many: (["/bin/sh", "-c", f"for rank in $(seq {self.args.ranks}); do {shlex.quote(libtorch)} & all=\"$all $!\"; done; for one in $all; do wait $one || exit 1; done"], self.args.ranks, None),
            job: (self.command("muster", program, "start"), self.args.ranks, None),
            many: (self.command("muster", program, "barrier", ranks=64), 64, None),
            light: (self.command("muster", str(self.build / "bench" / "bench_meet"), ranks=64), 64, 2000),
        }
        empty = self.build / "bench" / "empty.py"
        empty.write_text("")
        jobs = {"muster": self.command("muster", str(self.build / "bench" / "bench_nothing")), "torchrun": self.command("torchrun", str(empty))}
        taken = {name: [] for name in (*starts, *jobs)}
        for _ in range(self.args.rounds):
            for impl in ("muster",) * 7 + ("torchrun",):
                if jobs[impl]:
                    start = time.perf_counter()
                    subprocess.run(jobs[impl], env=self.env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    taken[impl].append((time.perf_counter() - start) * 1e3)
            for name in (alone, job, as_many, as_many, job, alone) * 3 + (many, light):
                start, events = self.events(starts[name][0])
                if events is None:
                    sys.exit(f"{' '.join(starts[name][0])} took more than ten minutes")
                taken[name].append((max(event["t"] for event in events if event["event"] == "first") - start) * 1e3)
        found = [(name, ranks, taken[name], bound) for name, (_, ranks, bound) in starts.items()]
        for name in (alone, as_many):
            found.append((f"{job}: above {name}", self.args.ranks, [ours - theirs for ours, theirs in zip(taken[job], taken[name])], 150))
        rows = [{"bench": "launch", "impl": impl, "ranks": self.args.ranks, "ms": round(statistics.median(taken[impl]), 2)} for impl in jobs if taken[impl]]
        for what, ranks, values, bound in found:
            rows.append({"bench": "launch", "what": what, "ranks": ranks, "typical": round(statistics.median(values), 1), "worst": round(max(values), 1), "bound": bound, "unit": "ms"})
        return rows

    def snapshot(self):
        """Muster's snapshots, torch.distributed.checkpoint, and dd."""
        folder = tempfile.mkdtemp(prefix="muster-bench-")
        command = self.command("muster", str(self.build / "bench" / "bench_snapshot"), folder)
        peer = self.command("torchrun", str(HERE / "peers" / "snapshot_torch.py"), os.path.join(folder, "torch"))
        try:
            rows = self.rounds([command, *([peer] if peer else [])], lambda row: (row["op"], row["impl"]), "us", min)
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                subprocess.run(["dd", "if=/dev/zero", f"of={folder}/dd", "bs=1M", "count=512", "conv=fsync"], check=True, stderr=subprocess.DEVNULL)
                best = min(best, time.perf_counter() - start)
            return [*rows, {"bench": "snapshot", "op": "save 512 MB", "impl": "dd", "ranks": 1, "us": round(best * 1e6, 1)}]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def recovery(self):
        """The time from the start of a job, and from the death of a rank, to an all_reduce of all ranks."""
        program, script = str(self.build / "bench" / "bench_recovery"), str(HERE / "peers" / "recovery_torch.py")
        run = [str(self.muster), "run", "--no-prefix", "--max-restarts", "1", "-n", str(self.args.ranks)]
        torchrun = self.command("torchrun", script)
        cases = [("load", "muster", [str(self.build / "bench" / "bench_libtorch")], 5), ("restart", "muster", [*run, program, "restart"], 5), ("elastic", "muster", [*run, program, "elastic"], 5)]
        if torchrun:
            cases.append(("restart", "torchrun", [*torchrun[:-1], "--max-restarts", "5", "--monitor-interval", "0.1", script], 2))
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
            rows += [{"bench": "recovery", "what": name, "impl": impl, "ranks": self.args.ranks, "ms": round(statistics.median(values) * 1e3, 1)} for name, values in taken.items()]
        return rows

    def best_rows(self, commands):
        """Returns the best figure of each case and implementation over all rounds. Each round calls `commands`, which yields rows."""
        found = {}
        for _ in range(self.args.rounds):
            for row in commands():
                known = found.setdefault((row["case"], row["impl"]), row)
                for unit, best in (("us", min), ("ms", min), ("per_s", max), ("percent", min), ("kb", min)):
                    if unit in row:
                        known[unit] = round(best(known[unit], row[unit]), 3)
        return list(found.values())

    def rpc(self):
        """Calls on one host and over TLS on the loopback interface; PyTorch's and gRPC's calls, and the messages of UCX."""
        program = str(self.build / "bench" / "bench_rpc")
        over_tls = ["--impl=muster-tls", "--transport=tcp", *(f"--case={case}" for case in ("echo_4B", "echo_int", "pipelined", "echo_1MB", "echo_16MB"))]

        def commands():
            yield from self.rows(self.command("muster", program, ranks=2))
            yield from self.rows(self.command("muster", program, *over_tls, ranks=2), MUSTER_SECRET="5ec7e75ec7e75ec7e75ec7e75ec7e75e")
            yield from self.rows(self.command("torchrun", str(HERE / "peers" / "rpc_torch.py"), ranks=2))
            for peer, package in (("grpc", "libgrpc++-dev"), ("ucx", "libucx-dev")):
                yield from self.rows(self.built(f"peer_rpc_{peer}", peer, package))
        return self.best_rows(commands)

    def optim(self):
        """A step of DistributedOptimizer over three owners, and a step of PyTorch's."""
        def commands():
            yield from self.rows(self.command("muster", str(self.build / "bench" / "bench_optim"), ranks=3))
            yield from self.rows(self.command("torchrun", str(HERE / "peers" / "optim_torch.py"), ranks=3))
        return self.best_rows(commands)

    def optimizers(self):
        """A step of an optimizer over 25 million parameters, on one thread and on two: Muster's, libtorch's C++ and Python's."""
        def commands():
            for threads in ("1", "2"):
                peer = self.command("torchrun") and [sys.executable, str(HERE / "peers" / "optimizers_torch.py"), threads]
                for command in ([str(self.build / "bench" / "bench_optimizers"), threads], peer):
                    yield from ({**row, "case": f"{row['case']}, threads {threads}"} for row in self.rows(command))
        return self.best_rows(commands)

    def meta(self):
        """Meta-steps in one process and over two workers, and TorchOpt's."""
        def commands():
            for ranks in (1, 2):
                yield from self.rows(self.command("muster", str(self.build / "bench" / "bench_meta"), ranks=ranks))
            if subprocess.run([sys.executable, "-c", "import torchopt"], capture_output=True).returncode:
                self.missing["torchopt"] = "pip install torchopt==0.7.3"
            else:
                yield from self.rows([sys.executable, "-W", "ignore", str(HERE / "peers" / "meta_torchopt.py")])
        return self.best_rows(commands)

    def autograd(self):
        """Gradients through remote calls. The steps run on two workers, because more would take their cores; the sleepers run on five."""
        def commands():
            for ranks in (2, 5):
                yield from self.rows(self.command("muster", str(self.build / "bench" / "bench_autograd"), ranks=ranks))
                yield from self.rows(self.command("torchrun", str(HERE / "peers" / "autograd_torch.py"), ranks=ranks))
        return self.best_rows(commands)

    def bounds(self, name):
        return self.rows([str(self.build / "bench" / "bench_bounds"), name])

    def fault(self):
        return self.bounds("fault")

    def idle(self):
        return self.bounds("idle")

    def memory(self):
        return self.bounds("memory")

    def copy(self):
        return self.bounds("copy")

    def rounds(self, commands, key, value, best):
        found = {}
        for _ in range(self.args.rounds):
            for command in commands:
                for row in self.rows(command):
                    known = found.setdefault(key(row), row)
                    if best(row[value], known[value]) == row[value]:
                        found[key(row)] = row
        return list(found.values())


def table(title, headers, lines):
    widths = [max(len(str(line[i])) for line in [headers, *lines]) for i in range(len(headers))]
    print(f"\n{title}")
    for line in [headers, ["-" * width for width in widths], *lines]:
        print("  " + "  ".join(str(cell).rjust(width) for cell, width in zip(line, widths)))


def size(n):
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" if n >= 1 << 10 else f"{n} B"


def show_crowd(rows):
    for ranks in sorted({row["ranks"] for row in rows}):
        print(f"\n{ranks} ranks")
        show_collectives([row for row in rows if row["ranks"] == ranks])


def show_pinned(rows):
    for launcher, bound in dict.fromkeys((row["launcher"], row["bound"]) for row in rows):
        print(f"\nMuster's ranks started by {launcher}, " + ("all ranks bound to a core each" if bound == "core" else "no rank bound"))
        show_collectives([row for row in rows if (row["launcher"], row["bound"]) == (launcher, bound)])


def show_collectives(rows):
    floor = {row["bytes"]: row["us"] for row in rows if row["op"] == "floor"}
    rows = [row for row in rows if row["op"] != "floor"]
    us = {(row["op"], row["bytes"], row["impl"]): row["us"] for row in rows}
    ratio = {(row["op"], row["bytes"], row["impl"]): f"{row['ratio']:.2f}x" for row in rows if "ratio" in row}
    peers = [impl for impl in (*MPIS, "gloo") if any(key[2] == impl for key in us)]
    lines = []
    for op, n in dict.fromkeys(sorted((key[:2] for key in us), key=lambda key: (list(us).index((*key, "muster")), key[1]))):
        lines.append([op, size(n), *(f"{us[op, n, impl]:.2f}" for impl in ("muster-heap", "muster", *peers)), *(ratio.get((op, n, impl), "") for impl in ("muster-heap", "muster"))])
    table("float32, sums: microseconds per call (median), and how many times faster than the fastest peer (median of the rounds' ratios)",
          ["operation", "size", "heap", "ordinary", *peers, "heap/peer", "ordinary/peer"], lines)
    if floor:
        table("the same memory traffic without a peer: microseconds, and its share of the time on the heap", ["size", "floor", "share"],
              [[size(n), f"{floor[n]:.2f}", f"{100 * floor[n] / us['all_reduce', n, 'muster-heap']:.0f} %"] for n in sorted(floor)])


def show_ddp(rows):
    rate = {(row["net"], row["impl"]): row["samples_per_s"] for row in rows}
    lines = []
    for net in dict.fromkeys(key[0] for key in rate):
        for name in ("muster", "pytorch"):
            if (net, name) in rate:
                with_sync, without, barrier = rate[net, name], rate[net, name + "-nosync"], rate.get((net, name + "-barrier"))
                lines.append([net, name, f"{with_sync:.0f}", f"{barrier:.0f}" if barrier else "", f"{without:.0f}",
                              f"{100 * with_sync / without:.1f} %", f"{100 * with_sync / barrier:.1f} %" if barrier else ""])
    for net in dict.fromkeys(key[0] for key in rate):
        if (net, "muster-reproducible") in rate:
            lines.append([net, "muster, the same bits on any number of ranks", f"{rate[net, 'muster-reproducible']:.0f}", "", "", "", ""])
    table("data-parallel training: samples/s with DDP, with a barrier per step instead (no synchronisation can be faster), and with neither",
          ["net", "impl", "DDP", "barrier", "neither", "DDP/neither", "DDP/barrier"], lines)


def show_zero(rows):
    table("AdamW with the states of all ranks, and divided among them: samples/s, and MiB of states on the host",
          ["impl", "samples/s", "MiB"], [[row["impl"], f"{row['samples_per_s']:.0f}", f"{row['state_mib']:.0f}" if "state_mib" in row else ""] for row in rows])


def show_slow_link(rows):
    rate = {row["impl"]: row["samples_per_s"] for row in rows}
    table("two hosts with 200 Mbit/s between them: samples/s, and times those without a hook",
          ["impl", "samples/s", "gain"], [[impl, f"{of:.1f}", f"{of / rate[impl.split('-')[0]]:.1f}"] for impl, of in rate.items()])


def show_sync_batch_norm(rows):
    table("a step with batch norms over the batches of all ranks, and with those of each rank alone: milliseconds (at most 10 % more)",
          ["net", "impl", "all ranks", "alone", "more"],
          [[row["net"], row["impl"], f"{row['ms']:.1f}", f"{row['ms_ordinary']:.1f}", f"{100 * row['share']:.1f} %"] for row in rows])


def show_fsdp(rows):
    together = [row for row in rows if row["ranks"] > 1]
    local = next((row["ms"] for row in together if row["impl"] == "muster-none"), None)
    table("a step of 8 encoder layers with AdamW, and the memory of all ranks together", ["impl", "ms", "/ neither", "MiB", "loss"],
          [[row["impl"], f'{row["ms"]:.0f}', f'{row["ms"] / local:.2f}' if local else "", f'{row["host_mib"]:.0f}', row["loss"]] for row in together])
    table("the same on one rank with 2,048 tokens: activations kept, and computed again (checkpoint)", ["impl", "ms", "largest memory, MiB"],
          [[row["impl"], f'{row["ms"]:.0f}', f'{row["peak_mib"]:.0f}'] for row in rows if row["ranks"] == 1])


def show_hosts(rows):
    ours = next((row["ms"] for row in rows if row["impl"] == "muster-fsdp"), None)
    table("the same step on two hosts of two ranks, 1 Gbit/s between them", ["impl", "ms", "/ muster-fsdp", "MiB", "loss"],
          [[row["impl"], f'{row["ms"]:.0f}', f'{row["ms"] / ours:.2f}', f'{row["host_mib"]:.0f}', row["loss"]] for row in rows])


def show_limit(rows):
    table("400 million parameters with AdamW on four ranks that have 12 GiB together", ["impl", "runs", "s per step", "MiB at the end", "largest MiB"],
          [[row["impl"], "yes" if row["runs"] else "NO", f'{row["ms"] / 1e3:.1f}' if row["runs"] else "", row.get("host_mib", ""), row["largest_mib"]] for row in rows])


def show_launch(rows):
    table("start and end of a job whose ranks do nothing: milliseconds, median", ["impl", "ms"], [[row["impl"], row["ms"]] for row in rows if "impl" in row])
    show_bounds([row for row in rows if "what" in row])


def show_recovery(rows):
    words = {"load": "libtorch alone, to its first tensor", "start": "start of the job to the first all_reduce", "restart": "death of a rank to an all_reduce of all ranks, all restarted",
             "elastic": "death of a rank to the next step, the other ranks kept"}
    table("start and recovery: milliseconds, median", ["what", "impl", "ms"], [[words[row["what"]], row["impl"], row["ms"]] for row in rows])


def show_rpc(rows):
    impls = sorted({row["impl"] for row in rows})
    cell = {(row["case"], row["impl"]): next(f"{row[unit]:.4g} {word}" for unit, word in (("us", "us"), ("per_s", "/s"), ("percent", "%")) if unit in row) for row in rows}
    table("remote calls", ["case", *impls], [[case, *(cell.get((case, impl), "-") for impl in impls)] for case in dict.fromkeys(row["case"] for row in rows)])


def show_optim(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows}
    lines = [[case, f"{us[case, 'muster']:.1f}", *([f"{us[case, 'torch']:.1f}", f"{us[case, 'torch'] / us[case, 'muster']:.1f}x"] if (case, "torch") in us else ["-", "-"])]
             for case in dict.fromkeys(row["case"] for row in rows)]
    table("a step of a distributed optimizer over 3 owners: microseconds", ["case", "muster", "torch", "faster"], lines)


def show_optimizers(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows}
    peers = [impl for impl in ("libtorch", "torch-foreach", "torch-fused") if any(row["impl"] == impl for row in rows)]
    lines = [[case, f"{us[case, 'muster']:.0f}", *(f"{us[case, peer]:.0f} ({us[case, peer] / us[case, 'muster']:.2f}x)" for peer in peers)]
             for case in dict.fromkeys(row["case"] for row in rows)]
    table("a step over 25 million parameters: microseconds, and how much faster Muster is", ["case", "muster", *peers], lines)


def show_meta(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows if "us" in row}
    lines = []
    for case in dict.fromkeys(case for case, _ in us):
        peers = [figure for (its, impl), figure in us.items() if its == case and impl.startswith("torchopt")]
        lines += [[case, impl, f"{figure:.0f}", f"{min(peers) / figure:.2f}x" if peers and impl.startswith("muster") else ""]
                  for (its, impl), figure in us.items() if its == case]
    table("differentiable optimizers: microseconds, and how much faster than TorchOpt's best", ["case", "implementation", "us", "faster"], lines)
    table("growth of a process from the 200th to the 2,000th meta-step", ["implementation", "KB"], [[row["impl"], row["kb"]] for row in rows if "kb" in row])


def show_autograd(rows):
    cell = {(row["case"], row["impl"]): f"{row['us']:.4g} us" if "us" in row else f"{row['ms']:.4g} ms" for row in rows}
    table("gradients through remote calls", ["case", "muster", "torch"],
          [[case, *(cell.get((case, impl), "-") for impl in ("muster", "torch"))] for case in dict.fromkeys(row["case"] for row in rows)])
    us = {(row["case"], row["impl"]): row["us"] for row in rows if "us" in row}
    if all((case, "muster") in us for case in ("round_trip", "local_step", "step")):
        above = us["step", "muster"] - 2 * us["round_trip", "muster"]
        print(f"a step: {above:.1f} us more than two round trips; libtorch's own step in one process takes {us['local_step', 'muster']:.1f}")


def show_snapshot(rows):
    table("snapshots of 100 MB of parameters and 100 MB of SGD's momentum, and a step() without one: milliseconds", ["operation", "impl", "ms"],
          [[row["op"], row["impl"], f"{row['us'] / 1e3:.4g}"] for row in rows])


def show_bounds(rows):
    lines = [[row["what"], row["ranks"], f"{row['typical']:.3g}", f"{row['worst']:.3g}",
              *(("", row["unit"], "") if row["bound"] is None else (f"{row['bound']:.3g}", row["unit"], "yes" if row["typical"] <= row["bound"] else "NO"))]
             for row in rows]
    table(f"{rows[0]['bench']}: what Muster promises, and what was measured", ["what", "ranks", "typical", "worst", "bound", "unit", "kept"], lines)


def machine():
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "unknown")
    return {"bench": "machine", "date": date.today().isoformat(), "cpu": model, "cores": os.cpu_count(), "kernel": platform.release()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(HERE.parent / "build" / "release"), help="where Muster was built")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, one object per line")
    parser.add_argument("--picture", metavar="FILE", help="with --json: draw all_reduce's time over size in this file (bench/plot.py)")
    parser.add_argument("--only", default="all_reduce,messages,others,ddp,launch,recovery,fault,idle,memory", help="which benchmarks, separated by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    show = {"all_reduce": show_collectives, "messages": show_collectives, "others": show_collectives, "ddp": show_ddp, "zero": show_zero, "slow_link": show_slow_link, "sync_batch_norm": show_sync_batch_norm, "fsdp": show_fsdp, "hosts": show_hosts, "limit": show_limit, "launch": show_launch, "pinned": show_pinned, "crowd": show_crowd,
            "recovery": show_recovery, "rpc": show_rpc, "autograd": show_autograd, "optim": show_optim, "optimizers": show_optimizers, "meta": show_meta, "snapshot": show_snapshot, "fault": show_bounds, "idle": show_bounds, "memory": show_bounds, "copy": show_bounds}
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in show]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(show)}")
    bench = Bench(args)
    rows = [machine()]
    print(f"{rows[0]['cpu']}, {rows[0]['cores']} cores, {args.ranks} ranks, {args.rounds} rounds")
    for name in chosen:
        found = getattr(bench, name)()
        rows += found
        show[name](found)
    for impl, why in bench.missing.items():
        print(f"\nleft out: {impl} ({why})")
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"\nrows written to {args.json}")
        if args.picture:
            subprocess.run([sys.executable, str(HERE / "plot.py"), args.json, args.picture], check=True)


if __name__ == "__main__":
    main()
