"""Run a function on several gloo ranks: many cases per launch, imports paid once.

Workers are forked from a server that has imported what tests need and runs no threads; a fork of pytest itself would
copy the locks of whatever threads earlier tests have left.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from edgc.errors import UserError
from edgc.runtime.groups import gather_objects

multiprocessing.set_forkserver_preload(
    [
        "tests.integration.ddp_runs",
        "tests.integration.fsdp_runs",
        "tests.integration.megatron_cases",
        "tests.contract_ranks",
        "tests.soak.training",
    ]
)


def _enter(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server imported is no garbage: a collection would walk through it, 0.4 s each time
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(function(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    except Exception:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()


def run_workers(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on every rank of a gloo group of ``world``; the results in rank order.

    Raises:
        AssertionError: with what every rank that failed said, the first one first: the others' errors often only say
            that it is gone.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_enter, (world, folder, function, arguments), nprocs=world, start_method="forkserver")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failed = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            if not failed:
                raise
            texts = "\n".join(f"-- rank {path.stem}:\n{path.read_text(encoding='utf-8')}" for path in failed)
            raise AssertionError(texts) from error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


class Cases:
    """Functions of a module that every rank calls one after another, in one launch. In the module::

        case = Cases(4, __name__)

        @case
        def reduction() -> None: ...

        test_ddp = case.test()

    A case asserts what it has to; if it also compares ranks, with :func:`equal`, it asserts after its last collective.

    Args:
        world: number of ranks.
        module: its name.
    """

    def __init__(self, world: int, module: str) -> None:
        self.world, self.module = world, module
        self.functions: dict[str, Callable[[], None]] = {}

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.functions[function.__name__] = function
        return function

    @cached_property
    def outcomes(self) -> dict[str, str]:
        """By case the tracebacks of the ranks on which an assertion failed; empty if all held."""
        try:
            ranks = run_workers(self.world, _outcomes, self.module)
        except Exception as error:  # a rank was lost, and with it the results of all cases
            return dict.fromkeys(self.functions, f"{type(error).__name__}: {error}")
        return {name: "\n".join(rank[name] for rank in ranks if rank[name]) for name in ranks[0]}

    def test(self) -> Callable[[str], None]:
        """A test for every case."""

        @pytest.mark.parametrize("name", self.functions)
        def test(name: str) -> None:
            assert not self.outcomes[name], self.outcomes[name]

        return test


def _outcomes(module: str) -> dict[str, str]:
    results = {}
    for name, function in importlib.import_module(module).case.functions.items():
        # A rank that hangs ends with the stacks of its threads, and so the launch.
        faulthandler.dump_traceback_later(300, exit=True)
        try:
            function()
            results[name] = ""
        except AssertionError:
            results[name] = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    return results


def equal(*tensors: Tensor) -> bool:
    """True if these tensors of all ranks are finite and all the same, bit for bit. Collective."""
    each = [tensor for row in gather_objects(tensors) for tensor in row]
    return all(torch.equal(each[0], other) and bool(other.isfinite().all()) for other in each)


def mean(tensor: Tensor) -> Tensor:
    """Mean over the ranks in float64."""
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def same(one: Any, other: Any) -> bool:
    """True if two nested values are equal, tensors bit for bit and NaN to itself."""
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan())
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or repr(one) == repr(other)


def said(call: Callable[[], Any]) -> str:
    """Message that answers a mistake of the user's; "nothing" without one."""
    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing"


def refused(call: Callable[[], Any], *names: str) -> None:
    """Assert that a call is refused in one line that holds each of ``names``."""
    message = said(call)
    assert "\n" not in message and all(name in message for name in names), (names, message)
