"""Gradients on a GPU, where the host looks at no value: that path on CPU tensors, under a guard that finds every look.

That both paths give the same, and keep the contract, is tested in ``test_contract.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import edgc.compressors.entrywise.sparse as sparse
from edgc.compressors import Statistics
from edgc.megatron.activation import ActivationCompressor
from edgc.runtime.device import HostCopy, masked_path
from edgc.runtime.local import Room
from tests.contract import Setting, Team, variants
from tests.host_reads import HostRead, NoHostReads

READS: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: bool(x[0] > 0),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment under a mask": lambda x: x.__setitem__(x > 0, x[:1].expand(4)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "a scalar operand": lambda x: torch.full((2,), x[0]),  # type: ignore[arg-type]
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_is_found(read: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    READS[read](x)
    with NoHostReads() as guard:
        with pytest.raises(HostRead):
            READS[read](x)
        with guard.paused():
            READS[read](x)
    READS[read](x)


@pytest.mark.parametrize("name", variants())
def test_no_step_reads_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compress, one that is given up, and one that drains."""
    team = Team(name, Setting(True, torch.float32, 2, "flat"))
    guard, draw = NoHostReads(), sparse.draw

    def on_the_host(*arguments: Any) -> Tensor:
        with guard.paused():
            return draw(*arguments)

    # Which side a one-sided iteration begins with was found out by the step before: it is read before anything is sent.
    read, performed, run = HostCopy.read, Room._perform, Room.run
    sending = False

    def of_the_step_before(later: HostCopy) -> Any:
        if sending:
            return read(later)
        with guard.paused():
            return read(later)

    def perform(room: Room, brought: Any) -> list[Any]:
        nonlocal sending
        sending = True
        return performed(room, brought)

    def guarded(room: Room, function: Callable[[int], Any]) -> list[Any]:
        return run(room, guard.in_thread()(function))

    monkeypatch.setattr(sparse, "draw", on_the_host)
    monkeypatch.setattr(HostCopy, "read", of_the_step_before)
    monkeypatch.setattr(Room, "_perform", perform)
    monkeypatch.setattr(Room, "run", guarded)
    for step, rank in enumerate((4, 4, 4, None, 4)):
        given = team.given(step)
        if step == 2:
            given[1][0].tensor[0, 0] = math.nan
        sending = False
        with guard:
            team.reduce(given, rank)
            team.settle()


def test_activation_gradients_are_not_read() -> None:
    compressor = ActivationCompressor(4)
    for step in range(3):
        gradient = torch.randn(8, 2, 40, generator=torch.Generator().manual_seed(step))
        if step == 1:
            gradient[0, 0, 0] = math.nan
        layout = compressor.layout(gradient.shape, gradient.dtype)
        assert layout is not None
        statistics = Statistics()
        with masked_path(), NoHostReads():
            message = compressor.compress("a", gradient, layout, statistics)
            compressor.decompress(message, layout, torch.empty_like(gradient), statistics)
        assert int(statistics.skipped) == (step == 1)
