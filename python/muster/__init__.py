"""Muster as a backend of torch.distributed for CPU tensors, in shared memory.

Importing it registers the backend:

    import torch.distributed as dist
    import muster

    dist.init_process_group("muster")             # or "cpu:muster,cuda:nccl"

Everything else is PyTorch's own interface. README.md says what to expect of it.

Thread-safety: as torch.distributed; create_backend(), create_process_group() and what they return from any thread.
"""
from __future__ import annotations

import atexit
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

try:
    from . import _muster
except ImportError as error:
    raise ImportError(f"Muster's module does not fit this Python or its torch ({torch.__version__}): {error}. "
                      "Install it again with this Python.") from error

__all__ = ["create_backend", "create_process_group", "monitored_barrier", "straggler_verdict"]

_CPU = torch.device("cpu")


def create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=5),
                   name: str = "world") -> torch._C._distributed_c10d.Backend:
    """One rank's end of a group of `size`, without a process group around it; waits for all of them.

    For ranks that are threads of one process, with one dist.HashStore for all: torch.distributed itself has one rank a
    process. `name` appears in messages. Raises ValueError, and dist.DistBackendError where a rank does not come in time.
    """
    return _muster.create_backend(store, rank, size, timeout, name)


def create_process_group(store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=5),
                         name: str = "world") -> dist.ProcessGroup:
    """As create_backend(), with a process group around it, of which torch.distributed knows nothing.

    For processes that outlive their group, as torchft's do: after abort() they make another, of another size. Each needs
    a store of its own, or a dist.PrefixStore. The group's abort() ends what is under way on all ranks, by an error.
    """
    return _muster.create_process_group(store, rank, size, timeout, name)


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None,
                      wait_all_ranks: bool = False) -> None:
    """dist.monitored_barrier(), which itself accepts no backend but gloo: waits for all ranks of the group.

    Raises dist.DistBackendError, on every rank that came, naming the first rank that did not, or all of them
    (wait_all_ranks). `timeout` is a timedelta or seconds; without it that of the group holds. Afterwards the group has
    failed, as after any timeout.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is None:
        timeout = timedelta(milliseconds=-1)  # c10d::kUnsetTimeout
    elif timeout <= timedelta(0):
        raise ValueError(f"monitored_barrier needs a timeout above 0, not {timeout}")
    _muster.monitored_barrier(group._get_backend(_CPU), timeout, wait_all_ranks)


def straggler_verdict(group: dist.ProcessGroup | None = None, at_least: timedelta = timedelta(0)) -> str:
    """Which rank came last to the group's collectives, how often, and how long the others waited for it in all.

    An empty string if that is less than `at_least`, or if no rank stands out. At the end of a group its rank 0 logs the
    same of a rank that was late by a second or more in all. Any member may call it at any time; it sends nothing. Raises
    ValueError for a group of another backend.
    """
    group = group or dist.distributed_c10d._get_default_group()
    return _muster.straggler_verdict(group._get_backend(_CPU), at_least)


def _create(options: dist.distributed_c10d._DistributedBackendOptions,
            _: object) -> torch._C._distributed_c10d.Backend | dist.ProcessGroup:
    """What torch.distributed calls for each group.

    It may be given a whole process group instead of a backend, which then knows its name and sequence numbers; but only
    for a group without another backend beside, and where nobody wants to wrap the backend.
    """
    config = sys._getframe(1).f_locals.get("backend_config")
    alone = config is not None and set(config.get_device_backend_map().values()) == {"muster"}
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    create = _muster.create_process_group if alone and not wrapped else _muster.create_backend
    return create(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


def _leave() -> None:
    """At the end of a process that has not destroyed its groups: peers that wait for it learn so, and why."""
    error = getattr(sys, "last_value", None)
    _muster.leave_process_groups(f"{type(error).__name__}: {error}" if error is not None else "")


# devices are a capability: gloo stays the default of CPU tensors.
dist.Backend.register_backend("muster", _create, extended_api=True, devices=["cpu"])
atexit.register(_leave)
