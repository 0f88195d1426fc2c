"""The benchmarks of training on several ranks: data parallelism, sharded models and optimizers."""

from runner import Runner, peer_script
from sandbox import MemoryLimit, TwoHosts


class TrainingSuites(Runner):
    """A part of suites.Suites."""

    def ddp(self):
        """Steps with DistributedDataParallel, with a barrier in its place, and with nothing; PyTorch's over Gloo and
        over Muster's plug-in."""
        commands = []
        for net, steps, warmup in (("small", 200, 20), ("resnet18", 5, 2), ("transformer", 5, 2), ("wide", 10, 3)):
            flags = ["--net", net, "--steps", str(steps), "--warmup", str(warmup)]
            for sync in ("ddp", "barrier", "none"):
                commands.append(self.job("bench_ddp", *flags, "--sync", sync))
            if net in ("small", "wide"):
                fewer = ["--steps", str(steps // 2), "--warmup", "1"]
                commands.append(self.job("bench_ddp", "--net", net, *fewer, "--shards", "8"))
            for sync in (["--backend", "gloo"], ["--backend", "muster"], ["--no-sync"]):
                commands.append(self.torchrun("ddp_torch.py", *flags, *sync))
        return self.best_of_rounds(commands, lambda row: (row["net"], row["impl"]), "samples_per_s", max)

    def buckets(self):
        """DistributedDataParallel with small gradients in buckets of several sizes."""
        commands = []
        for net, steps in (("resnet18", 5), ("transformer", 6)):
            for mib in ("0.25", "1", "4", "25", "100", None):
                flags = ["--net", net, "--steps", str(steps), "--warmup", "2"]
                commands.append(self.job("bench_ddp", *flags, *(["--bucket-mb", mib] if mib else [])))
        rows = self.best_of_rounds(commands, lambda row: (row["net"], row["bucket_size"], row["bucket_mib"]),
                                   "samples_per_s", max)
        return [dict(row, bench="buckets") for row in rows]

    def ddp_memory(self):
        """What DistributedDataParallel adds to the memory of ten steps of a ResNet-18. A process without it has
        gradients, too."""
        flags = ["--net", "resnet18", "--steps", "10", "--warmup", "0"]
        commands = [self.job("bench_ddp", *flags, "--sync", sync) for sync in ("ddp", "none")]
        commands += [self.torchrun("ddp_torch.py", *flags, *sync) for sync in ([], ["--no-sync"])]
        found = self.best_of_rounds(commands, lambda row: row["impl"], "host_mib", min)
        with_impl, rows = {row["impl"]: row for row in found}, []
        for impl in ("muster", "pytorch"):
            if impl in with_impl:
                row, without = with_impl[impl], with_impl[f"{impl}-nosync"]
                gradients = 4 * row["parameters"] / (1 << 20)
                added = (row["host_mib"] - without["host_mib"]) / row["ranks"]
                rows.append({"bench": "ddp_memory", "net": row["net"], "impl": impl, "ranks": row["ranks"],
                             "mib_per_rank": round(gradients + added, 1), "gradients_mib": round(gradients, 1),
                             "host_mib": row["host_mib"], "host_mib_without": without["host_mib"]})
        return rows

    def ddp_construction(self):
        """The construction of DistributedDataParallel around 512 MiB of parameters."""
        commands = [self.job("bench_ddp_costs", "construction"), self.torchrun("ddp_construction_torch.py")]
        return self.best_of_rounds(commands, lambda row: row["impl"], "ms", min)

    def ddp_watch(self):
        """A step whose every tenth compares hashes of parameters and gradients, beside one that never does."""
        return [self.median_of_rounds(self.job("bench_ddp_costs", "watch"), "share")]

    def ddp_share(self):
        """Steps with averages and steps with a barrier in their place, by turns in one job."""
        nets = (("small", 301), ("resnet18", 15), ("transformer", 15), ("wide", 31))
        commands = [self.job("bench_ddp_costs", "share", "--net", net, "--steps", str(steps)) for net, steps in nets]
        return [self.median_of_rounds(command, "share") for command in commands]

    def zero(self):
        """AdamW whose states are divided among the ranks."""
        flags = ["--net", "wide", "--steps", "20"]
        commands = [self.job("bench_ddp", *flags, "--optimizer", name) for name in ("adamw", "zero", "zero-backward")]
        for name in ("adamw", "zero"):
            for backend in ("gloo", "muster"):
                commands.append(self.torchrun("ddp_torch.py", *flags, "--optimizer", name, "--backend", backend))
        rows = self.best_of_rounds(commands, lambda row: (row["net"], row["impl"]), "samples_per_s", max)
        return [dict(row, bench="zero") for row in rows]

    def keep(self, found, row, name):
        """Adds a row of two hosts to `found`, by implementation; None: a peer has failed."""
        if row is None:
            self.missing[name] = "it failed three times on two hosts"
        else:
            found.setdefault(row["impl"], []).append(row)

    def slow_link(self):
        """PowerSGD on two hosts of one rank each, with 200 Mbit/s between them."""
        flags, found = ["--net", "wide", "--steps", "4", "--warmup", "3"], {}
        with TwoHosts("200mbit") as hosts:
            if hosts.missing:
                self.missing["a slow link"] = hosts.missing
                return []
            muster, torchrun = hosts.muster(self.muster, 1), hosts.torchrun(1)
            jobs = [(muster, self.program("bench_ddp"), hook) for hook in ("none", "bf16", "power")]
            jobs += [(torchrun, peer_script("ddp_torch.py"), hook) for hook in ("none", "power")]
            for _ in range(self.args.rounds):
                for launcher, program, hook in jobs:
                    row = hosts.row(self.env, launcher, [program, *flags, "--hook", hook])
                    self.keep(found, row, f"DDP with hook {hook}")
        fastest = [max(rows, key=lambda row: row["samples_per_s"]) for rows in found.values()]
        return [dict(row, bench="slow_link", hosts=2, mbit_per_s=200) for row in fastest]

    def sync_batch_norm(self):
        commands = [self.job("bench_sync_batch_norm", *flags) for flags in ([], ["--shards", "8"])]
        return self.best_of_rounds(commands, lambda row: row["shards"], "ms", min)

    def fsdp(self):
        """One model for all ranks, PyTorch's FSDP2 over Gloo and over Muster's plug-in, and steps without
        synchronisation; activations that are computed again."""
        syncs = (["fsdp"], ["fsdp", "--mixed"], ["ddp"], ["barrier"], ["none"])
        commands = [self.job("bench_fsdp", "--sync", *sync) for sync in syncs]
        for flags in ([], ["--mixed"]):
            for backend in ("gloo", "muster"):
                commands.append(self.torchrun("fsdp_torch.py", "--backend", backend, *flags))
        commands.append(self.torchrun("fsdp_torch.py", "--no-sync"))
        large = ["--batch", "16", "--length", "128", "--steps", "4"]
        for flags in ([], ["--checkpoint"]):
            commands.append(self.job("bench_fsdp", "--sync", "none", *large, *flags, ranks=1))
            commands.append(self.torchrun("fsdp_torch.py", "--no-sync", *large, *flags, ranks=1))
        keep = ["--checkpoint", "--keep", "aten::addmm"]
        commands.append(self.job("bench_fsdp", "--sync", "none", *large, *keep, ranks=1))
        return self.best_of_rounds(commands, lambda row: (row["impl"], row["ranks"], row["tokens"]), "ms", min)

    def embedding(self):
        """A model most of which is one embedding of 50,000 words, with owners of parameters and of rows."""
        size = ["--vocabulary", "50000", "--blocks", "2"]
        commands = [self.job("bench_fsdp", *size, "--sync", sync) for sync in ("fsdp", "ddp")]
        commands.insert(1, self.job("bench_fsdp", *size, "--rows", "16"))
        for backend in ("gloo", "muster"):
            commands.append(self.torchrun("fsdp_torch.py", *size, "--backend", backend))
        rows = self.best_of_rounds(commands, lambda row: row["impl"], "ms", min)
        return [dict(row, bench="embedding") for row in rows]

    def hosts(self):
        """Steps on two hosts of two ranks each, with a gigabit per second between them."""
        steps, found = ["--steps", "5"], {}
        with TwoHosts() as hosts:
            if hosts.missing:
                self.missing["two hosts"] = hosts.missing
                return []
            muster, torchrun = hosts.muster(self.muster, 2), hosts.torchrun(2)
            for _ in range(self.args.rounds):
                for sync in (["fsdp"], ["fsdp", "--mixed"], ["full"], ["full", "--mixed"], ["ddp"], ["none"]):
                    row = hosts.row(self.env, muster, [self.program("bench_fsdp"), *steps, "--sync", *sync])
                    found.setdefault(row["impl"], []).append(row)
                for backend in ("gloo", "muster"):
                    for kind in ([], ["--hybrid"], ["--mixed"], ["--hybrid", "--mixed"]):
                        program = [peer_script("fsdp_torch.py"), *steps, "--backend", backend, *kind]
                        row = hosts.row(self.env, torchrun, program)
                        self.keep(found, row, f"FSDP2 over {' '.join([backend, *kind])}")
        fastest = [min(rows, key=lambda row: row["ms"]) for rows in found.values()]
        return [dict(row, bench="hosts", hosts=2, gbit_per_s=1) for row in fastest]

    def limit(self):
        """400 million parameters with AdamW on four ranks that have 12 GiB together."""
        size = ["--blocks", "127", "--batch", "1", "--length", "64", "--steps", "2"]
        commands = {"muster-fsdp": self.job("bench_fsdp", *size, ranks=4)}
        for backend in ("gloo", "muster"):
            commands[f"fsdp2-{backend}"] = self.torchrun("fsdp_torch.py", *size, "--backend", backend, ranks=4)
        rows = []
        for impl, command in commands.items():
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
            row = found[0] if found else {"impl": impl, "ranks": 4, "ms": None}
            rows.append(dict(row, bench="limit", runs=bool(found), limit_mib=12 << 10, largest_mib=peak >> 20))
        return rows
