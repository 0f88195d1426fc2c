"""Muster as a backend of torch.distributed for CPU tensors, in shared memory.

Importing it registers the backend:

    import torch.distributed as dist
    import muster

    dist.init_process_group("muster")             # or "cpu:muster,cuda:nccl"

Everything else is PyTorch's own interface. README.md says how it differs from gloo.

Thread-safety: as torch.distributed. create_backend(), create_process_group() and what they return may be used from any
thread.
"""
from __future__ import annotations

import atexit
import multiprocessing.util
import os
import re
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

try:
    from . import _muster
except ImportError as error:
    if "undefined symbol" in str(error):
        raise ImportError(f"Muster's module was built for another Python or torch than torch {torch.__version__}: "
                          f"{error}. Install it again with this Python.") from error
    raise ImportError(f"Muster's module cannot be loaded: {error}. If it lacks a library, install that; if it lacks "
                      "_muster, install Muster with this Python.") from error
# Also if all symbols are there, classes may differ. The module knows no suffix, as in "2.14.0a0+git1234567".
if re.split(r"[^0-9.]", torch.__version__)[0].rstrip(".") != _muster.torch_version:
    raise ImportError(f"Muster's module was built for torch {_muster.torch_version}, and this is torch "
                      f"{torch.__version__}. Install it again with this Python.")
_muster.set_torch_folder(os.path.dirname(torch.__file__) + os.sep)

__all__ = ["create_backend", "create_process_group", "empty", "is_on_heap", "monitored_barrier", "straggler_report",
           "zeros"]

_CPU = torch.device("cpu")
_leaves_in = 0  # the process


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised contiguous CPU tensor on this process's heap, memory that all ranks of the host share.

    If the tensors of all ranks are on their heaps, collectives work on them in place and copy nothing. Such a tensor
    can be used like any other. A view of it is on the heap, too; the result of an operation on it is not. `size` and
    `dtype` are those of torch.empty(). The heap takes memory as it grows, and gives it back. A fork of the process
    shares the memory with it: what the fork writes to the tensor, the parent sees. Raises torch.OutOfMemoryError if the
    heap or the host is full.
    """
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return _muster.empty(list(shape), dtype or torch.get_default_dtype())


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Does the same as empty(), and fills the tensor with zeros."""
    return empty(*size, dtype=dtype).zero_()


def is_on_heap(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory is on this process's heap (see empty())."""
    return _muster.is_on_heap(tensor)


def create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=5),
                   name: str = "world") -> torch._C._distributed_c10d.Backend:
    """Returns one rank's backend for a group of `size` ranks, without a process group. Waits for all ranks.

    Use it for ranks that are threads of one process, with one dist.HashStore for all of them: torch.distributed itself
    has one rank per process. `name` appears in messages. Raises ValueError for bad arguments, and dist.DistBackendError
    if a rank does not come in time.
    """
    return _muster.create_backend(store, rank, size, timeout, name)


def create_process_group(store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=5),
                         name: str = "world") -> dist.ProcessGroup:
    """As create_backend(), but returns a process group, which torch.distributed does not register.

    Use it in processes that outlive their group, as torchft's do: after abort() they create another one, of another
    size. Each group needs its own store, or a dist.PrefixStore. abort() makes the operations that run on any rank fail
    with an error.
    """
    return _muster.create_process_group(store, rank, size, timeout, name)


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None,
                      wait_all_ranks: bool = False) -> None:
    """Does what dist.monitored_barrier() does, which accepts only gloo: waits for all ranks of the group.

    If a rank does not come, every rank that came raises dist.DistBackendError. The error names the first missing rank,
    or all of them with wait_all_ranks. `timeout` is a timedelta or seconds; the default is the group's timeout. After
    the error the group has failed, as after any timeout.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is None:
        timeout = timedelta(milliseconds=-1)  # c10d::kUnsetTimeout
    elif timeout <= timedelta(0):
        raise ValueError(f"monitored_barrier: expected a timeout above 0, got {timeout}")
    _muster.monitored_barrier(group._get_backend(_CPU), timeout, wait_all_ranks)


def straggler_report(group: dist.ProcessGroup | None = None, at_least: timedelta = timedelta(0)) -> str:
    """Says which rank came last to the group's collectives, how often, and how long the others waited for it in total.

    Returns an empty string if they waited less than `at_least`, or if no rank stands out. At the end of a group, its
    rank 0 logs the report if a rank was late by a second or more in total. Any member may call it at any time; it
    sends nothing. Raises ValueError for a group of another backend.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    backend = group._get_backend(_CPU)
    return _muster.straggler_report(getattr(backend, "wrapped_pg", backend), at_least)  # wrapped: TORCH_DISTRIBUTED_DEBUG


def _leave_at_the_end() -> None:
    """Calls _leave() at the end of this process, once. A process of multiprocessing may end without atexit."""
    global _leaves_in
    if _leaves_in != os.getpid():
        _leaves_in = os.getpid()
        multiprocessing.util.Finalize(None, _leave, exitpriority=0)


def _create(options: dist.distributed_c10d._DistributedBackendOptions,
            _: object) -> torch._C._distributed_c10d.Backend | dist.ProcessGroup:
    """torch.distributed calls it for each group.

    It may return a whole process group instead of a backend. A process group knows its name and its sequence numbers.
    torch.distributed accepts one only if the group has no other backend and if nobody wraps the backend.
    """
    config = sys._getframe(1).f_locals.get("backend_config")
    alone = config is not None and set(config.get_device_backend_map().values()) == {"muster"}
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    _leave_at_the_end()
    create = _muster.create_process_group if alone and not wrapped else _muster.create_backend
    return create(options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
                  list(options.global_ranks_in_group or ()))


def _leave() -> None:
    """At the end of a process that has not destroyed its groups, tells the waiting peers that it ends, and why."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # with which torch.multiprocessing ends a process after an exception
        error = error.__context__
    _muster.leave_process_groups(f"{type(error).__name__}: {error}" if error is not None else "")


# `devices` says what the backend can do; gloo remains the default for CPU tensors.
dist.Backend.register_backend("muster", _create, extended_api=True, devices=["cpu"])
atexit.register(_leave)


def _create_for_dist2(store: dist.Store, rank: int, world_size: int, timeout: timedelta, device: torch.device,
                      **options: object) -> dist.ProcessGroup:
    """torch.distributed._dist2.new_group() calls it."""
    if options or device.type != "cpu":
        raise ValueError(f"muster: expected the device cpu and no options, got {device} and {sorted(options)}")
    return create_process_group(store, rank, world_size, timeout)


try:
    from torch.distributed import _dist2
    _dist2.register_backend("muster", _create_for_dist2)
except (ImportError, AttributeError):  # an experiment of torch's, which other versions may lack
    pass
