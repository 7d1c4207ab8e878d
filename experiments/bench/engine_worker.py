"""One process of the engine benchmark: holds every engine of a rank and runs one step of one of them when asked.

Alone it times engines without a network; as one of two ranks (``RANK``, ``WORLD_SIZE``, ``STORE`` in the environment)
it times them with gloo.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors.base import Statistics
from edgc.compressors.quantization.blocks import Blocks
from edgc.runtime.channel import Stopwatch, mark
from experiments.bench import floor
from experiments.bench.children import serve
from experiments.bench.collectives import join
from experiments.bench.gradients import Shape, make
from experiments.bench.kernels import Kernel, kernels, timed
from experiments.bench.torch_hook import TorchHook
from experiments.bench.variants import Copy, Ours, Variant

GRADIENTS = 2  # sets of gradients that take turns
SETTLE = 4  # steps of an engine before it is timed
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def watch_packing() -> Stopwatch:
    """From now on every call of :class:`Blocks` in this process adds to the stopwatch that is returned."""
    watch = Stopwatch()

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(blocks: Blocks, source: Tensor, target: Tensor, **options: Any) -> None:
            started = mark(source.device)
            method(blocks, source, target, **options)
            watch.add(started, mark(source.device))

        return call

    for name in ("pack", "unpack"):
        setattr(Blocks, name, watched(getattr(Blocks, name)))
    return watch


class Bench:
    """Gradients, engines and the floor of one rank at a time.

    A variant is named ``copy``, ``torch`` or the ``factor_dtype`` of ours, and with ``+bf16`` behind it runs with
    bf16 matrix products.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.packing = watch_packing()
        self.variants: dict[str, Variant] = {}
        self.floors: dict[str, list[floor.Call]] = {}
        self.turn = 0

    def start(self, shapes: list[Shape], dtype: str, device: str) -> None:
        """Join the other rank, if there is one, and make the gradients."""
        if "WORLD_SIZE" in os.environ:
            join()
            self.group = dist.group.WORLD
        self.device, self.shapes = torch.device(device), shapes
        seed = 0 if self.group is None else dist.get_rank()
        self.gradients = make(shapes, GRADIENTS, seed=seed, dtype=DTYPES[dtype], device=self.device)
        self.buffer = torch.empty_like(self.gradients[0])

    def prepare(self, variants: list[str], rank: int, threads: int) -> dict[str, Any]:
        """Build the engines of a rank and run each for some steps; returns the relative error of the last one and
        its bytes. A variant that fails has its message in place of them.
        """
        torch.set_num_threads(threads)
        self.variants.clear()
        self.floors.clear()
        found: dict[str, Any] = {}
        for name in variants:
            try:
                self.variants[name] = self._build(name, rank)
                found[name] = self._settle(name)
            except Exception as error:
                if self.group is not None:
                    raise  # the peer waits in a collective: nothing can go on
                self.variants.pop(name, None)
                found[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return found

    def prepare_floor(self, rank: int) -> None:
        """Choose the fastest way to do what the floor counts."""
        for part in (floor.products, floor.orthogonalisation):
            self.floors[part.__name__] = part(self.shapes, rank, self.device)

    def _build(self, name: str, rank: int) -> Variant:
        engine, _, _ = name.partition("+")
        if engine == "copy":
            return Copy(self.shapes, self.group, self.buffer)
        if engine == "torch":
            return TorchHook(self.shapes, rank, self.group, self.buffer)
        return Ours(self.shapes, rank, self.group, engine)

    def _settle(self, name: str) -> dict[str, Any]:
        """Steps that are not timed: the warm start follows the gradients, and buffers are there."""
        for _ in range(SETTLE - 1):
            self._load_gradient()
            self._step(name)
        self._load_gradient()
        kept = self.variants[name].kept()
        mean = self.buffer.float() if kept is None else self.buffer.float() + kept
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        done = self._step(name)
        return {"relative_error": float((mean - self.buffer.float()).norm() / mean.norm()), "bytes": done.bytes}

    def _load_gradient(self) -> None:
        self.buffer.copy_(self.gradients[self.turn % GRADIENTS])
        self.turn += 1

    def _step(self, name: str) -> Statistics:
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = matmul.fp32_precision
        if name.endswith("+bf16"):
            matmul.fp32_precision = "bf16"
        try:
            return self.variants[name].step(self.buffer)
        finally:
            matmul.fp32_precision = before

    def run(self, name: str) -> dict[str, float]:
        """One timed step of a variant, or one round of a part of the floor."""
        if name in self.floors:
            return timed(lambda: [call() for call in self.floors[name]], self.device)
        self._load_gradient()
        if self.group is not None:
            dist.barrier(group=self.group)
        packed = self.packing.seconds
        steps: list[Statistics] = []
        times = timed(lambda: steps.append(self._step(name)), self.device)
        times |= {part: getattr(steps[0], part).seconds for part in ("compress", "communicate", "decompress")}
        return times | {"pack": self.packing.seconds - packed}

    def kernels(self, name: str, steps: int) -> list[Kernel]:
        """Kernels of one step of a variant, the longest first."""
        return kernels(lambda: self._step(name), self.device, steps=steps, before=self._load_gradient)


if __name__ == "__main__":
    serve(Bench())
