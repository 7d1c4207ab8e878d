"""One process of the engine benchmark: holds every engine of a rank and runs one step of one of them when asked.

Alone it times engines without a network; as one of two ranks (``RANK``, ``WORLD_SIZE``, ``STORE`` in the environment)
it times them with gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.runtime.channel import Stopwatch
from experiments.bench import floor
from experiments.bench.children import serve
from experiments.bench.clock import timed
from experiments.bench.gradients import Shape, make
from experiments.bench.kernels import kernels
from experiments.bench.packing import watch_packing
from experiments.bench.variants import Copy, Ours, Parts, TorchHook, Variant

GRADIENTS = 2  # sets of gradients that take turns
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Bench:
    """Gradients, engines and the floor of one rank at a time.

    A variant is named ``copy``, ``torch`` or the ``factor_dtype`` of ours, and with ``+bf16`` behind it runs with
    bf16 matrix products.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        if "WORLD_SIZE" in os.environ:
            index, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(os.environ["STORE"], world)
            dist.init_process_group("gloo", store=store, rank=index, world_size=world)
            self.group = dist.group.WORLD
        self.seed = dist.get_rank() if self.group is not None else 0
        self.packing: Stopwatch = watch_packing()
        self.variants: dict[str, Variant] = {}
        self.floors: dict[str, Callable[[], None]] = {}
        self.turn = 0

    def load(self, shapes: Sequence[Shape], dtype: str, device: str) -> dict[str, Any]:
        """Make the gradients."""
        self.device = torch.device(device)
        self.shapes: list[Shape] = [(rows, columns) for rows, columns in shapes]
        self.gradients = make(self.shapes, GRADIENTS, seed=self.seed, dtype=DTYPES[dtype], device=self.device)
        self.buffer = torch.empty_like(self.gradients[0])
        return {"entries": self.buffer.numel()}

    def prepare(self, variants: list[str], rank: int, threads: int, settle: int) -> dict[str, Any]:
        """Build the engines of a rank and run each for ``settle`` steps; returns the relative error of the last one.

        A variant that fails has its message in place of a number.
        """
        torch.set_num_threads(threads)
        self.variants.clear()
        self.floors = {}
        found: dict[str, Any] = {}
        for name in variants:
            try:
                self.variants[name] = self._build(name, rank)
                found[name] = self._settle(name, settle)
            except Exception as error:
                if self.group is not None:
                    raise  # the peer waits in a collective: nothing can go on
                self.variants.pop(name, None)
                found[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return found

    def prepare_floor(self, rank: int) -> None:
        """Choose the fastest way to do what the floor counts."""
        self.floors = {
            "products": floor.Products(self.shapes, rank, self.device),
            "orthogonalisation": floor.Orthogonalisation(self.shapes, rank, self.device),
        }

    def _build(self, name: str, rank: int) -> Variant:
        engine, _, _ = name.partition("+")
        if engine == "copy":
            return Copy(self.shapes, self.group, self.buffer)
        if engine == "torch":
            return TorchHook(self.shapes, rank, self.group, self.buffer)
        return Ours(self.shapes, rank, self.group, engine)

    def _settle(self, name: str, steps: int) -> dict[str, Any]:
        """Steps that are not timed: the warm start follows the gradients, and buffers are there."""
        variant, relative = self.variants[name], None
        for step in range(steps):
            self._load_gradient()
            kept = variant.kept() if step == steps - 1 else None
            if step == steps - 1:
                expected = self.buffer.float() if kept is None else self.buffer.float() + kept
            parts = self._step(name)
            if step == steps - 1:
                mean = self._mean(expected)
                relative = float((mean - self.buffer.float()).norm() / mean.norm())
        return {"relative_error": relative, "bytes": parts.bytes}

    def _mean(self, tensor: Tensor) -> Tensor:
        """The exact mean over the workers."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
            tensor /= dist.get_world_size(self.group)
        return tensor

    def _load_gradient(self) -> None:
        self.buffer.copy_(self.gradients[self.turn % GRADIENTS])
        self.turn += 1

    def _step(self, name: str) -> Parts:
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
            done = timed(self.floors[name], self.device)
            return {"cpu": done.cpu, "wall": done.wall}
        self._load_gradient()
        if self.group is not None:
            dist.barrier(group=self.group)
        packed = self.packing.seconds
        steps: list[Parts] = []
        done = timed(lambda: steps.append(self._step(name)), self.device)
        [parts] = steps
        return {
            "cpu": done.cpu,
            "wall": done.wall,
            "compress": parts.compress.seconds,
            "communicate": parts.communicate.seconds,
            "decompress": parts.decompress.seconds,
            "pack": self.packing.seconds - packed,
        }

    def kernels(self, name: str, steps: int) -> list[dict[str, Any]]:
        """Kernels of one step of a variant, the longest first."""
        found = kernels(lambda: self._step(name), self.device, steps=steps, before=self._load_gradient)
        return [asdict(kernel) for kernel in found]


if __name__ == "__main__":
    serve(Bench())
