"""What all ranks do together: objects and refusals, and process groups for one thread alone (collectives of two threads
on one group could mix)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from edgc.errors import UserError

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of ``group`` (None: the world), in rank order, on every rank; just this one's without
    process groups."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def world() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without process groups."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(action: Callable[[], T]) -> T:
    """Do ``action`` on this rank and return what it returns, if it went well on every rank of the world. Collective.

    Raises:
        UserError: on every rank, for the first rank where it was raised; an ``OSError`` becomes one.
    """
    result, error = _attempt(action)
    for raised in gather_objects(error):
        if raised is not None:
            raise raised
    return result  # type: ignore[return-value]  # without an error there is a result


def on_first_rank(action: Callable[[], T]) -> T:
    """Do ``action`` on rank 0; what it returns, or raises, on every rank. Collective."""
    result, raised = gather_objects(_attempt(action) if world()[0] == 0 else (None, None))[0]
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]


def agreed(check: Callable[[], T], *, where: str, group: dist.ProcessGroup | None = None) -> T:
    """What ``check`` returns, if no rank of ``group`` (None: the world) refuses. Collective.

    Raises:
        UserError: on every rank: its own, or else that of the first rank that refused.
    """
    result, refusal = _attempt(check)
    for rank, other in enumerate(gather_objects(refusal, group)):
        if other is not None:
            raise refusal or UserError(f"rank {rank} refused: {other}", where=where)
    return result  # type: ignore[return-value]


def refuse_differing(what: str, value: object, *, where: str, fix: str, group: dist.ProcessGroup | None = None) -> None:
    """Refuse a setting (``what``) that differs between ranks of ``group`` (None: the world). Collective."""
    first, *others = gather_objects(value, group)
    differing = [str(rank) for rank, other in enumerate(others, 1) if other != first]
    if differing:
        raise UserError(f"{what} differ between ranks 0 and {', '.join(differing)}", where=where, fix=fix)


def _attempt(action: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error
    except OSError as error:
        what = f"a file cannot be written or read: {error.strerror or error}"
        return None, UserError(what, where=error.filename, fix="make room, or choose another folder")


def own_group(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks as ``like``, which all of them have joined.

    To be called on every rank of it, for several groups in the same order on every rank.
    """
    ranks = dist.get_process_group_ranks(like)
    options: dict[str, Any] = {"timeout": timeout_of(like), "backend": dist.get_backend(like)}
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(ranks, **options)
    else:
        with _named(gather_objects(f"edgc-{uuid.uuid4().hex}", like)[0]):
            group = dist.new_group(ranks, use_local_synchronization=True, **options)
    all_here(like)
    return group


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """torch gives a group that is made here ``name``, which it has no public way to ask for.

    It names a group that not all ranks of the world make after its ranks and the number of groups that this rank has.
    Ranks of one group may have different numbers, and wait for each other for ever; and a number that comes back after
    a group was ended gives a name that was had before, with the addresses of that time.
    """
    c10d: Any = dist.distributed_c10d
    usual = getattr(c10d, "_process_group_name", None)
    if usual is not None:
        c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        if usual is not None:
            c10d._process_group_name = usual


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout that ``group`` was made with; None, which stands for torch's default, if this torch does not tell.

    There is no public way to ask.
    """
    for device in ("cuda", "cpu"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return None


def groups_of(requests: Mapping[tuple[int, ...], timedelta | None]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """New groups of the requested ranks, which may differ from rank to rank, each with a timeout; by their ranks.

    All ranks of a group have joined it. To be called on every rank of the world: every rank takes part in making every
    group, in one order.
    """
    everyone = {ranks: timeout for row in gather_objects(dict(requests)) for ranks, timeout in row.items()}
    groups = {ranks: dist.new_group(list(ranks), timeout=everyone[ranks]) for ranks in sorted(everyone)}
    all_here(None)
    return {ranks: groups[ranks] for ranks in requests}


def all_here(group: dist.ProcessGroup | None, limit: timedelta | None = None) -> None:
    """Wait until all ranks of ``group`` (None: the world) are here, at most for ``limit`` (None: the group's timeout).

    new_group returns when this rank has joined, under gloo before the others have; so does a collective when this rank
    has its result. A rank that ended a group at once would close connections that a slower one is still using.

    Raises:
        RuntimeError: a rank is lost, or has not come in time.
    """
    here = torch.zeros(1, dtype=torch.uint8, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    work = dist.all_reduce(here, group=group, async_op=True)
    _ = work.wait() if limit is None else work.wait(limit)
    here.item()  # on a GPU the host has waited for nothing so far
