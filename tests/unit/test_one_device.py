"""What lies on a device stays there: reductions of gradients on a device that has no values.

Tensors on torch's ``meta`` device have shapes and no entries, so the code takes the path of a GPU, and whatever looks
at a value fails. torch lets a number of one device into operations of another one in most places, but not in all: a
mask must lie beside what it masks. On CPU tensors nothing of that can be seen, so every mixture is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgc.compressors import Compressor, Gradient, Statistics
from edgc.entropy.on_device import ESTIMATES, estimate_rows
from edgc.measurement.mean_error import sketches
from edgc.runtime.device import HostCopy
from edgc.timing import benchmark
from experiments.bench.engines import Mirror
from tests.contract import SHAPES, config_of, variants
from tests.lockstep import reduce_together

META = torch.device("meta")
# What brings a tensor to another device.
COPIES = ("copy_", "_to_copy")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        name = func.overloadpacket.__name__
        assert len(found) < 2 or name in COPIES, f"{name} of tensors on {found}"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Read after the step, when it has arrived; the answer is always yes here.
    monkeypatch.setattr(HostCopy, "read", lambda self: True)
    with OneDevice():
        yield


def gradients(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Gradient]:
    return [Gradient(f"p{i}", torch.empty(shape, device=META)) for i, shape in enumerate(shapes)]


def built(name: str, world: int = 2) -> list[Compressor]:
    made: list[Compressor] = [config_of(name).build() for _ in range(world)]
    for compressor in made:
        if getattr(compressor, "draws_at_random", False):
            compressor.draws_at_random = False  # type: ignore[attr-defined]  # the device has no random numbers either
    return made


def one(name: str) -> Compressor:
    [made] = built(name, 1)
    return made


def test_a_mixture_is_seen() -> None:
    with pytest.raises(AssertionError, match="masked_fill_ of tensors on"):
        torch.empty(3, device=META).masked_fill_(torch.ones((), dtype=torch.bool), 0)


@pytest.mark.parametrize("name", variants())
def test_reductions_stay_on_the_device(name: str) -> None:
    workers = built(name)
    for rank in (4, 4, None, 8):
        reduce_together(workers, [gradients() for _ in workers], rank)
        for worker in workers:
            worker.settle(True)
    shapes: tuple[list[tuple[int, ...]], ...] = ([(17,)], [(3, 5), (31,)], [(0, 5)])
    for bucket in shapes:  # without a matrix, too small, empty
        workers = built(name)
        for rank in (4, None):
            reduce_together(workers, [gradients(bucket) for _ in workers], rank)


@pytest.mark.parametrize("name", ["powersgd", "powersgd int8"])
def test_benchmarks_beside_the_training_stay_there(name: str) -> None:
    """The search of r_max begins with the exact mean, from a compressor that has sent nothing yet."""
    for rank in (None, 4):
        steps = benchmark.timed(one(name), gradients(), Mirror(), rank)
        with pytest.raises(StopIteration) as ended:
            while True:
                next(steps)
        assert isinstance(ended.value.value, Statistics)
    gate = benchmark.Benchmark(lambda: one(name), 0, True, lambda *_: Mirror())
    for _ in gate.compare(gradients(), None, 4, ()):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATES)
def test_entropies_stay_there(estimator: str, dtype: torch.dtype) -> None:
    found = estimate_rows(torch.empty((3, 5000), dtype=dtype, device=META), estimator)
    assert found.device == META and found.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sketches_stay_there(dtype: torch.dtype) -> None:
    matrices = [torch.empty(shape, dtype=dtype, device=META) for shape in ((40, 24), (33, 70), (40, 24))]
    assert sketches(matrices, ["a", "b", "c"]).device == META
