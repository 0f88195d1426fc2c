"""Parts of one machine that stand for other machines: two hosts with a link between them, a host with little memory."""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runner import kill_all_with, tries_of


class TwoHosts:
    """Two network namespaces, with a link between them. `rate`: of the link; None: as fast as the cores."""

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
        commands = [f"ip netns add {one}", f"ip netns add {two}",
                    f"ip -n {one} link add mu0 type veth peer name mu0 netns {two}"]
        for name, address in zip(self.names, self.ADDRESSES):
            commands += [f"ip -n {name} addr add {address}/24 dev mu0", f"ip -n {name} link set mu0 up",
                         f"ip -n {name} link set lo up"]
            if self.rate:
                commands.append(f"ip netns exec {name} tc qdisc add dev mu0 root "
                                f"tbf rate {self.rate} burst 256kb latency 50ms")
        made = subprocess.run(["/bin/sh", "-ec", "; ".join(commands)], capture_output=True, text=True)
        self.missing = ""
        if made.returncode:
            self.missing = f"it needs ip(8) and the right to make namespaces: {made.stderr.strip()}"
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        self.files.cleanup()

    def muster(self, command, ranks):
        """Returns the launcher for row() that starts so many ranks per host. `command`: where `muster` is."""
        return [str(command), "run", "--no-prefix", "--rdzv", f"{self.ADDRESSES[0]}:29400", "--secret-file",
                self.secret, "-n", str(ranks)]

    def torchrun(self, ranks):
        """The same with PyTorch's launcher."""
        return [sys.executable, "-m", "torch.distributed.run", "--master-addr", self.ADDRESSES[0], "--master-port",
                "29500", "--nproc-per-node", str(ranks)]

    def environment(self, env):
        """Returns the environment of a job's programs."""
        return dict(env, GLOO_SOCKET_IFNAME="mu0")

    def commands(self, launcher, program):
        """Returns the command of each host."""
        return [["ip", "netns", "exec", name, *launcher, "--nnodes", "2", "--node-rank", str(node), *program]
                for node, name in enumerate(self.names)]

    def job(self, launcher, program):
        """Returns one command that runs a job on both hosts. The first host has its standard input."""
        first, second = (shlex.join(command) for command in self.commands(launcher, program))
        return ["/bin/sh", "-c", f"{second} & {first}; status=$?; wait; exit $status"]

    def row(self, env, launcher, program):
        """Runs a job on both hosts and returns the row that one of its ranks prints; None if all tries of a peer
        fail."""
        commands, tries = self.commands(launcher, program), tries_of(launcher)
        for _ in range(tries):
            env = dict(self.environment(env), MUSTER_BENCH_JOB=secrets.token_hex(8))
            jobs = [subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, text=True) for command in commands]
            end_together(jobs, f"MUSTER_BENCH_JOB={env['MUSTER_BENCH_JOB']}")
            said = [job.communicate() for job in jobs]
            if all(job.returncode == 0 for job in jobs):
                return next(json.loads(line) for out, _ in said for line in out.splitlines() if line.startswith("{"))
        if tries > 1:
            return None
        # Of a host whose job was killed because the other one had failed, nothing is shown.
        failed = [place for place, job in enumerate(jobs) if job.returncode != 0]
        place = min(failed, key=lambda place: jobs[place].returncode == -signal.SIGKILL)
        sys.exit(f"{' '.join(jobs[place].args)} failed with status {jobs[place].returncode}:\n{said[place][1][-2000:]}")


def end_together(jobs, variable):
    """Waits until all have ended, for 900 s at most. When one has failed, the others have ten seconds: torchrun on the
    other host would wait for minutes. `variable`: of the environment of all their processes."""
    until = time.monotonic() + 900
    while any(job.poll() is None for job in jobs) and time.monotonic() < until:
        if any(job.poll() for job in jobs):
            until = min(until, time.monotonic() + 10)
        time.sleep(0.1)
    if any(job.poll() is None for job in jobs):
        kill_all_with(variable)


class MemoryLimit:
    """A control group, version 1 or 2, whose processes may use so many bytes of memory."""

    # Of each version: the folder, and its files of the limit and of the largest use.
    VERSIONS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
                (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"))

    def __init__(self, limit):
        self.missing = "it needs the right to make control groups for memory"
        for top, self.limit_file, self.peak_file in self.VERSIONS:
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
        """Returns the rows that the command prints, none if the kernel killed it for its memory; and the largest use in
        bytes."""
        enter = ["/bin/sh", "-c", f'echo $$ > {self.group / "cgroup.procs"} && exec "$@"', "sh"]
        result = subprocess.run([*enter, *command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, timeout=900)
        rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        if result.returncode != 0:
            files = (self.group / "memory.oom_control", self.group / "memory.events")
            events = next(path for path in files if path.exists()).read_text()
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
