"""Prints the rows of a benchmark as tables."""

from runner import MPIS


def table(title, headers, lines):
    widths = [max(len(str(line[i])) for line in [headers, *lines]) for i in range(len(headers))]
    print(f"\n{title}")
    for line in [headers, ["-" * width for width in widths], *lines]:
        print("  " + "  ".join(str(cell).rjust(width) for cell, width in zip(line, widths)))


def size(n):
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" if n >= 1 << 10 else f"{n} B"


def cases_of(rows):
    """Returns the rows' cases, each once, in the order of the rows."""
    return dict.fromkeys(row["case"] for row in rows)


def show_collectives(rows):
    floor = {row["bytes"]: row["us"] for row in rows if row["op"] == "floor"}
    rows = [row for row in rows if row["op"] != "floor"]
    us = {(row["op"], row["bytes"], row["impl"]): row["us"] for row in rows}
    ratio = {(row["op"], row["bytes"], row["impl"]): f"{row['ratio']:.2f}x" for row in rows if "ratio" in row}
    peers = [impl for impl in (*MPIS, "gloo") if any(key[2] == impl for key in us)]
    place = list(us)
    cases = sorted((key[:2] for key in us), key=lambda case: (place.index((*case, "muster")), case[1]))
    lines = []
    for op, n in dict.fromkeys(cases):
        times = [f"{us[op, n, impl]:.2f}" if (op, n, impl) in us else "" for impl in ("muster-heap", "muster", *peers)]
        lines.append([op, size(n), *times, *(ratio.get((op, n, impl), "") for impl in ("muster-heap", "muster"))])
    table("float32, sums: microseconds per call (median), and how many times faster than the fastest peer (median of "
          "the rounds' ratios)",
          ["operation", "size", "heap", "ordinary", *peers, "heap/peer", "ordinary/peer"], lines)
    if floor:
        share = {n: f"{100 * floor[n] / us['all_reduce', n, 'muster-heap']:.0f} %" for n in floor}
        table("the same memory traffic without a peer: microseconds, and its share of the time on the heap",
              ["size", "floor", "share"], [[size(n), f"{floor[n]:.2f}", share[n]] for n in sorted(floor)])


def show_crowd(rows):
    for ranks in sorted({row["ranks"] for row in rows}):
        print(f"\n{ranks} ranks")
        show_collectives([row for row in rows if row["ranks"] == ranks])


def show_pinned(rows):
    for launcher, bound in dict.fromkeys((row["launcher"], row["bound"]) for row in rows):
        where = "all ranks bound to a core each" if bound == "core" else "no rank bound"
        print(f"\nMuster's ranks started by {launcher}, {where}")
        show_collectives([row for row in rows if (row["launcher"], row["bound"]) == (launcher, bound)])


def show_hosts_collectives(rows):
    for link in dict.fromkeys(row["link"] for row in rows):
        print(f"\ntwo hosts of two ranks each; the link between them: {link}")
        show_collectives([row for row in rows if row["link"] == link])


def per_second(rate):
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}"


def show_ddp(rows):
    rate = {(row["net"], row["impl"]): row["samples_per_s"] for row in rows}
    lines = []
    for (net, impl), of in rate.items():
        is_ours = impl.startswith("muster")  # of PyTorch, a barrier was not measured
        limits = (rate.get((net, "muster-barrier")) if is_ours else None, rate.get((net, f"{impl.split('-')[0]}-nosync")))
        shares = (f"{100 * of / limit:.1f} %" if limit else "" for limit in limits)
        lines.append([net, impl, per_second(of), *shares])
    table("data-parallel training: samples/s, and their share of those with a barrier per step instead (no "
          "synchronisation can be faster), and of those with neither",
          ["net", "impl", "samples/s", "/ barrier", "/ neither"], lines)


def show_buckets(rows):
    lines = [[row["net"], f"{row['bucket_mib']:g}", row.get("bucket_size", "given"), row["buckets"],
              per_second(row["samples_per_s"])] for row in rows]
    table("small gradients in buckets of several sizes; a gradient of 1 MiB or more is always its own bucket",
          ["net", "at most, MiB", "which is", "buckets", "samples/s"], lines)


def show_ddp_memory(rows):
    lines = []
    for row in rows:
        ours, bound = row["mib_per_rank"], 1.1 * row["gradients_mib"]
        kept = ("yes" if ours <= bound else "NO") if row["impl"] == "muster" else ""
        lines.append([row["impl"], f"{ours:.1f}", f"{row['gradients_mib']:.1f}", f"{bound:.1f}", kept])
    table("MiB of each rank after data-parallel training of a ResNet-18, beyond its parameters, buffers, optimizer "
          "states and what a rank without gradients needs",
          ["impl", "MiB", "gradients", "bound", "kept"], lines)


def show_ddp_construction(rows):
    table("construction of DistributedDataParallel: milliseconds, the slowest rank", ["impl", "model, MiB", "ms"],
          [[row["impl"], row["model_mib"], f"{row['ms']:.0f}"] for row in rows])


def show_ddp_watch(rows):
    lines = [[row["net"], row["impl"], f"{row['ms_ordinary']:.1f}", f"{row['ms_checking']:.1f}", row["every"],
              f"{100 * row['share']:.2f} %"] for row in rows]
    table("a step without the divergence watch, and one that compares: milliseconds; and how much longer a step is if "
          "every tenth compares (at most 1 %)",
          ["net", "impl", "without", "compares", "every", "more"], lines)


def show_ddp_share(rows):
    table("a step with averages, and one with a barrier in their place, by turns: milliseconds; and the share of the "
          "speed that is left (goal: 98 %)",
          ["net", "impl", "barrier", "averages", "share"],
          [[row["net"], row["impl"], f"{row['ms_barrier']:.2f}", f"{row['ms']:.2f}", f"{100 * row['share']:.1f} %"]
           for row in rows])


def show_zero(rows):
    lines = [[row["impl"], f"{row['samples_per_s']:.0f}", f"{row['state_mib']:.0f}" if "state_mib" in row else ""]
             for row in rows]
    table("AdamW with the states of all ranks, and divided among them: samples/s, and MiB of states on the host",
          ["impl", "samples/s", "MiB"], lines)


def show_slow_link(rows):
    rate = {row["impl"]: row["samples_per_s"] for row in rows}
    lines = [[impl, f"{of:.1f}", f"{of / rate[impl.split('-')[0]]:.1f}"] for impl, of in rate.items()]
    table("two hosts with 200 Mbit/s between them: samples/s, and times those without a hook",
          ["impl", "samples/s", "gain"], lines)


def show_sync_batch_norm(rows):
    lines = [[row["net"], f"{row['shards']} shards, to the bit" if row.get("shards") else "each rank's batch",
              f"{row['ms']:.1f}", f"{row['ms_ordinary']:.1f}", f"{100 * row['share']:.1f} %"] for row in rows]
    table("a step with batch norms over the batches of all ranks, and with those of each rank or shard alone: "
          "milliseconds (without shards at most 10 % more)",
          ["net", "step", "all ranks", "alone", "more"], lines)


def show_fsdp(rows):
    together = [row for row in rows if row["ranks"] > 1]
    local = next((row["ms"] for row in together if row["impl"] == "muster-none"), None)
    lines = [[row["impl"], f'{row["ms"]:.0f}', f'{row["ms"] / local:.2f}' if local else "", f'{row["host_mib"]:.0f}',
              row["loss"]] for row in together]
    table("a step of 8 encoder layers with AdamW, and the memory of all ranks together",
          ["impl", "ms", "/ neither", "MiB", "loss"], lines)
    lines = [[row["impl"], f'{row["ms"]:.0f}', f'{row["peak_mib"]:.0f}'] for row in rows if row["ranks"] == 1]
    table("the same on one rank with 2,048 tokens: activations kept, and computed again (checkpoint)",
          ["impl", "ms", "largest memory, MiB"], lines)


def show_embedding(rows):
    ours = next((row["ms"] for row in rows if row["impl"] == "muster-fsdp-rows"), None)
    lines = [[row["impl"], f'{row["ms"]:.0f}', f'{row["ms"] / ours:.2f}', f'{row["host_mib"]:.0f}',
              f'{row["rank_mib"]:.0f}', row["loss"]] for row in rows]
    table("a step of an embedding of 25.6 million parameters and 2 encoder layers with AdamW",
          ["impl", "ms", "/ muster-fsdp-rows", "MiB", "MiB of the largest rank", "loss"], lines)


def show_hosts(rows):
    ours = next((row["ms"] for row in rows if row["impl"] == "muster-fsdp"), None)
    lines = [[row["impl"], f'{row["ms"]:.0f}', f'{row["ms"] / ours:.2f}', f'{row["host_mib"]:.0f}', row["loss"]]
             for row in rows]
    table("the same step on two hosts of two ranks, 1 Gbit/s between them",
          ["impl", "ms", "/ muster-fsdp", "MiB", "loss"], lines)


def show_limit(rows):
    lines = [[row["impl"], "yes" if row["runs"] else "NO", f'{row["ms"] / 1e3:.1f}' if row["runs"] else "",
              row.get("host_mib", ""), row["largest_mib"]] for row in rows]
    table("400 million parameters with AdamW on four ranks that have 12 GiB together",
          ["impl", "runs", "s per step", "MiB at the end", "largest MiB"], lines)


def show_launch(rows):
    table("start and end of a job whose ranks do nothing: milliseconds, median", ["impl", "ms"],
          [[row["impl"], row["ms"]] for row in rows if "impl" in row])
    show_bounds([row for row in rows if "what" in row])


def show_recovery(rows):
    words = {"load": "libtorch alone, to its first tensor", "start": "start of the job to the first all_reduce",
             "restart": "death of a rank to an all_reduce of all ranks, all restarted",
             "elastic": "death of a rank to the next step, the other ranks kept"}
    table("start and recovery: milliseconds, median", ["what", "impl", "ms"],
          [[words[row["what"]], row["impl"], row["ms"]] for row in rows])


def show_rpc(rows, title="remote calls"):
    impls = sorted({row["impl"] for row in rows})
    cell = {}
    for row in rows:
        words = (("us", "us"), ("per_s", "/s"), ("percent", "%"), ("kb", "KiB"))
        figure = next(f"{row[unit]:.4g} {word}" for unit, word in words if unit in row)
        cell[row["case"], row["impl"]] = figure
    table(title, ["case", *impls],
          [[case, *(cell.get((case, impl), "-") for impl in impls)] for case in cases_of(rows)])


def show_transport(rows):
    show_rpc(rows, "messages and their answers over the loopback interface, without calls above them")


def show_optim(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows}
    lines = []
    for case in cases_of(rows):
        ours, theirs = us[case, "muster"], us.get((case, "torch"))
        peer = ["-", "-"] if theirs is None else [f"{theirs:.1f}", f"{theirs / ours:.1f}x"]
        lines.append([case, f"{ours:.1f}", *peer])
    table("a step of a distributed optimizer over 3 owners: microseconds", ["case", "muster", "torch", "faster"], lines)


def show_optimizers(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows}
    peers = [impl for impl in ("libtorch", "torch-foreach", "torch-fused") if any(row["impl"] == impl for row in rows)]
    lines = []
    for case in cases_of(rows):
        ours = us[case, "muster"]
        lines.append([case, f"{ours:.0f}", *(f"{us[case, peer]:.0f} ({us[case, peer] / ours:.2f}x)" for peer in peers)])
    table("a step over 25 million parameters: microseconds, and how much faster Muster is",
          ["case", "muster", *peers], lines)


def show_meta(rows):
    us = {(row["case"], row["impl"]): row["us"] for row in rows if "us" in row}
    lines = []
    for case in dict.fromkeys(case for case, _ in us):
        peers = [figure for (its, impl), figure in us.items() if its == case and impl.startswith("torchopt")]
        for (its, impl), figure in us.items():
            if its == case:
                faster = f"{min(peers) / figure:.2f}x" if peers and impl.startswith("muster") else ""
                lines.append([case, impl, f"{figure:.0f}", faster])
    table("differentiable optimizers: microseconds, and how much faster than TorchOpt's best",
          ["case", "implementation", "us", "faster"], lines)
    table("growth of a process from the 200th to the 2,000th meta-step", ["implementation", "KB"],
          [[row["impl"], row["kb"]] for row in rows if "kb" in row])


def show_autograd(rows):
    cell = {(row["case"], row["impl"]): f"{row['us']:.4g} us" if "us" in row else f"{row['ms']:.4g} ms" for row in rows}
    table("gradients through remote calls", ["case", "muster", "torch"],
          [[case, *(cell.get((case, impl), "-") for impl in ("muster", "torch"))] for case in cases_of(rows)])
    us = {(row["case"], row["impl"]): row["us"] for row in rows if "us" in row}
    if all((case, "muster") in us for case in ("round_trip", "local_step", "step")):
        above = us["step", "muster"] - 2 * us["round_trip", "muster"]
        print(f"a step: {above:.1f} us more than two round trips; libtorch's own step in one process takes "
              f"{us['local_step', 'muster']:.1f}")


def show_snapshot(rows):
    table("snapshots of 100 MB of parameters and 100 MB of SGD's momentum, and a step() without one: milliseconds",
          ["operation", "impl", "ms"], [[row["op"], row["impl"], f"{row['us'] / 1e3:.4g}"] for row in rows])


def show_bounds(rows):
    lines = []
    for row in rows:
        if row["bound"] is None:
            bound = ["", row["unit"], ""]
        else:
            bound = [f"{row['bound']:.3g}", row["unit"], "yes" if row["typical"] <= row["bound"] else "NO"]
        lines.append([row["what"], row["ranks"], f"{row['typical']:.3g}", f"{row['worst']:.3g}", *bound])
    table(f"{rows[0]['bench']}: what Muster promises, and what was measured",
          ["what", "ranks", "typical", "worst", "bound", "unit", "kept"], lines)


SHOW = {  # by the name of the benchmark: the function that prints its rows
    "all_reduce": show_collectives,
    "messages": show_collectives,
    "others": show_collectives,
    "ddp": show_ddp,
    "buckets": show_buckets,
    "ddp_memory": show_ddp_memory,
    "ddp_construction": show_ddp_construction,
    "ddp_watch": show_ddp_watch,
    "ddp_share": show_ddp_share,
    "zero": show_zero,
    "slow_link": show_slow_link,
    "sync_batch_norm": show_sync_batch_norm,
    "fsdp": show_fsdp,
    "embedding": show_embedding,
    "hosts": show_hosts,
    "hosts_collectives": show_hosts_collectives,
    "limit": show_limit,
    "launch": show_launch,
    "pinned": show_pinned,
    "crowd": show_crowd,
    "recovery": show_recovery,
    "rpc": show_rpc,
    "transport": show_transport,
    "autograd": show_autograd,
    "optim": show_optim,
    "optimizers": show_optimizers,
    "meta": show_meta,
    "snapshot": show_snapshot,
    "fault": show_bounds,
    "idle": show_bounds,
    "memory": show_bounds,
    "copy": show_bounds,
}
