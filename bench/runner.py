"""Starts the programs of a benchmark, Muster's and the peers', and collects the rows that they print."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

from rounds import Reference

HERE = Path(__file__).resolve().parent
INTEL_MPI = Path(os.environ.get("I_MPI_ROOT", sys.prefix))  # its own variable, or where pip installs it
MPIS = {  # the launcher, and how to install it
    "openmpi": ("mpirun.openmpi", "apt-get install openmpi-bin libopenmpi-dev"),
    "mpich": ("mpiexec.mpich", "apt-get install mpich libmpich-dev"),
    "intelmpi": ("mpiexec.hydra", "pip install impi-rt impi-devel"),
}


def peer_script(name):
    """Returns the path of a peer's program in Python."""
    return str(HERE / "peers" / name)


def tries_of(command):
    """A command of PyTorch's has three: FSDP2 over Gloo aborts now and then."""
    return 3 if "torch.distributed.run" in command else 1


def output_of(command, env, seconds=900):
    """Runs a command, which must succeed, and returns its lines that are JSON objects."""
    for _ in range(tries_of(command)):
        result = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, timeout=seconds)
        if result.returncode == 0:
            break
    else:
        sys.exit(f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def kill_all_with(variable):
    """Kills what a launcher has left behind: all processes whose environment has this variable. Ranks of torchrun are
    not in its session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user
            pass


class Runner:
    def __init__(self, args):
        self.args = args
        self.build = Path(args.build).resolve()
        self.muster = self.build / "tools" / "muster"
        self.missing = {}  # by the name of a peer, or of what else is not there: why, and how to install it
        # muster run sets these variables for its ranks. The peers get them, too.
        self.env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_TRIM_THRESHOLD_=str(1 << 30),
                        MALLOC_MMAP_THRESHOLD_=str(32 << 20))
        # The peers' modules are compiled once, also where Python may not write beside them: PyTorch's take 15 seconds.
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        self.env["PYTHONPYCACHEPREFIX"] = str(self.build / "bench" / "pycache")
        # For Muster's plug-in.
        paths = (str(self.build / "python"), os.environ.get("PYTHONPATH"))
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def program(self, name):
        """Returns the path of one of Muster's programs."""
        return str(self.build / "bench" / name)

    @cached_property
    def reference(self):
        """One for all of a run: it knows the fastest copy that was seen. It ends with this process."""
        return Reference([self.program("bench_reference")])

    def job(self, name, *flags, ranks=None):
        """Returns the command that runs one of Muster's programs on all ranks."""
        return self.command("muster", self.program(name), *flags, ranks=ranks)

    def torchrun(self, script, *flags, ranks=None):
        """Returns the command that runs a peer's script on all ranks, or None if PyTorch is not installed."""
        return self.command("torchrun", peer_script(script), *flags, ranks=ranks)

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
        """The same for an MPI: "openmpi", "mpich" or "intelmpi". `bound`: "core" binds each rank to a core, "none"
        none."""
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
        return ["env", f"LD_LIBRARY_PATH={library}", launcher, *pin, *wait, "-genv", "I_MPI_FABRICS", "shm", "-n", n,
                *program]

    def mpi_peers(self, ranks, bound):
        """Returns the commands of all MPIs that are installed, with the program for each."""
        for impl in MPIS:
            program = self.build / "bench" / f"peer_collectives_{impl}"
            if impl == "intelmpi" and (INTEL_MPI / "include" / "mpi.h").exists():
                subprocess.run(["g++", "-O3", "-std=c++17", f"-I{INTEL_MPI / 'include'}",
                                peer_script("collectives_mpi.cpp"), str(INTEL_MPI / "lib" / "libmpi.so.12"),
                                f"-Wl,-rpath,{INTEL_MPI / 'lib'}", "-o", str(program)], check=True)
            if not program.exists():
                self.missing[impl] = f"it was not installed when the benchmarks were built: {MPIS[impl][1]}"
                continue
            command = self.mpi_command(impl, str(program), impl, ranks=ranks, bound=bound)
            if command:
                yield command

    def built(self, program, name, package):
        """Returns the command of a peer's program, or None if CMake did not build it because its library was not
        installed."""
        path = self.build / "bench" / program
        if path.exists():
            return [str(path)]
        self.missing[name] = ("its library was not installed when the benchmarks were built: "
                              f"apt-get install {package} pkg-config")
        return None

    def rows(self, command, **env):
        """Runs a command and returns the rows that it prints; none if the command is None."""
        return [] if command is None else output_of(command, dict(self.env, **env))

    def events(self, command, seconds=600):
        """Runs a job. Returns when it started, and the events that its ranks tell; None if it took longer than
        `seconds`."""
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        env = dict(self.env, MUSTER_BENCH_JOB=secrets.token_hex(8))
        try:
            return start, output_of(command, env, seconds)
        except subprocess.TimeoutExpired:
            kill_all_with(f"MUSTER_BENCH_JOB={env['MUSTER_BENCH_JOB']}")
            return start, None

    def best_of_rounds(self, commands, key, value, best):
        """Runs all commands once per round. Returns the row of each key whose `value` is the best, a row as it was
        printed."""
        found = {}
        for _ in range(self.args.rounds):
            for command in commands:
                for row in self.rows(command):
                    known = found.setdefault(key(row), row)
                    if best(row[value], known[value]) == row[value]:
                        found[key(row)] = row
        return list(found.values())

    def median_of_rounds(self, command, value):
        """Runs a command that prints one row, once per round. Returns the row whose `value` is the median."""
        rows = [self.rows(command)[0] for _ in range(self.args.rounds)]
        return sorted(rows, key=lambda row: row[value])[len(rows) // 2]

    def best_rows(self, rows):
        """Calls `rows`, which yields rows, once per round. Returns the best figure of each case and implementation."""
        found = {}
        for _ in range(self.args.rounds):
            for row in rows():
                known = found.setdefault((row["case"], row["impl"]), row)
                for unit, best in (("us", min), ("ms", min), ("per_s", max), ("percent", min), ("kb", min)):
                    if unit in row:
                        known[unit] = round(best(known[unit], row[unit]), 3)
        return list(found.values())
