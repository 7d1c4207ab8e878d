"""What only a device can get wrong: work on another stream, and memory that grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgc.compressors import Gradient
from experiments.bench.engines import Mirror
from tests import examples
from tests.contract import RANKS, Setting, Team, config_of, same

pytestmark = pytest.mark.gpu

# Peak memory of one worker's step beyond its gradients, as a multiple of them: error feedback, the workspace of the
# same size where there is one, messages, and what an operation makes for itself.
MULTIPLE = {"powersgd": 2.0, "topk": 5.0, "dynamiq": 9.0}  # others: 4
# The scratch of quantisation is of fixed size: 20 bytes for each entry in work at a time.
SCRATCH = {"cuda": 20 << 22, "cpu": 20 << 18}  # on a CPU for each thread
MATRICES = 6
SIDE = {"cuda": 2048, "cpu": 512}


@pytest.mark.parametrize(
    "name",
    ["none", "powersgd", "powersgd int4", "powersgd, bf16 True", "topk", "randomk", "int4", "sign", "natural"],
)
def test_a_reduction_on_another_stream_is_the_same(name: str, device: torch.device) -> None:
    """On a GPU the gradients become ready late, on the default stream; on a CPU it repeats bit for bit."""
    setting, results = Setting(True, torch.float32, 2, False, "flat"), []
    for elsewhere in (False, True):
        team = Team(name, setting, device)
        for step, rank in enumerate(RANKS):
            given = team.given(step)
            with _another_stream(device) if elsewhere else contextlib.nullcontext():
                team.reduce(given, rank)
            results.append([[gradient.tensor.clone() for gradient in own] for own in given])
    assert same(results[: len(RANKS)], results[len(RANKS) :])
    assert all(same(own, others[0]) for others in results for own in others)


@contextlib.contextmanager
def _another_stream(device: torch.device) -> Any:
    """Work inside waits, on a stream of its own, for what the default stream has yet to do."""
    if device.type != "cuda":
        yield
        return
    torch.cuda._sleep(20_000_000)  # about 10 ms in which nothing that was not waited for is ready
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


# The first example of every method that compresses, and what needs other room.
FIRST = {kind.method: name for name, (kind, _) in reversed(examples.FOUND.items()) if name not in examples.DENSE}
MEASURED = [name for name in FIRST.values() if name != "edgc"]
MEASURED += ["powersgd int8", "powersgd errors in bf16", "topk_dgc"]


@pytest.mark.parametrize("name", MEASURED)
def test_memory_of_a_step_does_not_grow_and_is_bounded(name: str, device: torch.device) -> None:
    worker = config_of(name).build()
    side = SIDE[device.type]
    flat = torch.empty(MATRICES * side * side, device=device)
    given = [Gradient(f"p{i}", part.view(side, side)) for i, part in enumerate(flat.split(side * side))]
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        worker.reduce(given, Mirror(), 8)
        worker.settle(True)

    memory, peaks = _Memory(device, flat), []
    for _ in range(5):
        flat.copy_(torch.randn(len(flat), generator=generator))
        peaks.append(memory.peak(step))
    assert max(peaks[2:]) <= peaks[1], f"peaks of the steps: {peaks}"
    size, options = flat.numel() * flat.element_size(), config_of(name).to_dict()
    quantised = options["method"] in ("quantize", "sign") or "int" in options.get("factor_dtype", "")
    scratch = SCRATCH[device.type] * (torch.get_num_threads() if device.type == "cpu" else 1) if quantised else 0
    velocities = 2.0 if options.get("momentum") else 0.0  # of this step and of the last one
    # Error feedback of this step, until it is settled, and of the last one.
    limit = (MULTIPLE.get(options["method"], 4.0) + 1.0 + velocities) * size + scratch
    assert 0.5 * size <= peaks[1] <= limit, f"{peaks[1] / size:.2f} times the gradients"


class _Memory:
    """Peaks of what is there beyond ``gradients``: the allocator's on a GPU, of all living tensors on a CPU."""

    def __init__(self, device: torch.device, gradients: torch.Tensor) -> None:
        self.device = device
        if device.type == "cuda":
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.before, self.watch = gradients.numel() * gradients.element_size(), _Living()

    def peak(self, call: Callable[[], None]) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.before
        self.watch.peak = 0
        with self.watch:
            call()
        return self.watch.peak - self.before


class _Living(TorchDispatchMode):
    """Bytes of the tensors that operations have seen and that still live, at their highest."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((result, args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {place: kept for place, kept in self._seen.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return result
