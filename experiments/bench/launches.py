"""Operations that a step's reductions launch on a GPU, for a training step of GPT-2 124M: launches.csv.

They are counted on torch's ``meta`` device, whose tensors have no entries, on the path of a GPU, and are not times. An
operation on many tensors counts as one, of which a GPU may make several kernels; what only looks at memory in another
shape counts as none. Kernels of Triton's count as what they are, one each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from edgc.buckets import Bucket, BucketWorker
from edgc.compressors import Gradient
from edgc.compressors.base import Statistics, Steps
from edgc.config import EDGCConfig
from experiments.bench.engines import Mirror
from experiments.bench.gpt import GPT
from experiments.bench.step_profile import Plan
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.common.written_tables import csv_text

META = torch.device("meta")
MIB = 1 << 20
# What DDP is asked for, with the bytes of its first bucket and of the others, and whether the hook gathers them.
BUCKETS = {"25 MB": (1, 25, False), "25 MB, gathered": (1, 25, True), "100 MB": (100, 100, False)}
MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts operations; stands in for the kernels, too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, (torch.Tensor, list, tuple))]
        if not func.is_view and func.overloadpacket.__name__ not in MEMORY and tensors:
            self.count += 1
        return func(*args, **(kwargs or {}))

    def pack(self, *_: Any, **__: Any) -> None:
        self.count += 1

    unpack = store = pack

    def load(self, m: torch.Tensor, *_: Any) -> torch.Tensor:
        self.count += 2  # norms of an instance are added up by torch
        return torch.empty(2, len(m), dtype=torch.float64, device=m.device)


class Reductions:
    """What :class:`BucketWorker` asks of an engine, of a compressor and without measurements."""

    compresses, closes_at_once, iteration = True, False, 1

    def __init__(self, config: EDGCConfig) -> None:
        self.compressor, self.rank, self.count = config.build(), config.fixed_rank, 0
        self.waits = self.compressor.waits(self.rank)

    def exchange(self, gradients: list[Gradient], group: object, **_: object) -> Steps:
        self.count += 1
        return self.compressor.exchange(gradients, Mirror(), self.rank, Statistics())


def launches(factors: str, buckets: str, kernels: bool, plan: Plan) -> dict[str, Any]:
    """A row: reductions of a step and operations in them, at the plan's rank; memory was made in an earlier step."""
    first, later, gathers = BUCKETS[buckets]
    with META:
        parameters = list(GPT(plan).named_parameters())[::-1]
    tensors: list[torch.Tensor] = [parameter for _, parameter in parameters]
    cut, _ = dist._compute_bucket_assignment_by_size(tensors, [first * MIB, later * MIB])
    counter = Launches()
    engine = Reductions(EDGCConfig.from_dict({"method": "powersgd", "rank": plan.rank, "factor_dtype": factors}))
    worker = BucketWorker(engine, None, META, len(tensors), gathers=gathers, closes=False)  # type: ignore[arg-type]
    stand = counter if kernels else None
    asked = ("edgc.compressors.quantization.kernels_for", "edgc.compressors.powersgd.passes.matrix_kernels_for")
    with counter, mock.patch(asked[0], return_value=stand), mock.patch(asked[1], return_value=stand):
        for _ in range(3):
            counter.count = engine.count = 0
            for places in cut:
                buffer = torch.empty(sum(tensors[i].numel() for i in places), device=META)
                parts = buffer.split([tensors[i].numel() for i in places])
                gradients = [
                    Gradient(parameters[i][0], part.view(tensors[i].shape))
                    for i, part in zip(places, parts, strict=True)
                ]
                worker.put(Bucket(places is cut[-1], gradients, buffer, torch.futures.Future()))
            engine.compressor.settle(True)
    if worker.error is not None:
        raise worker.error
    names = {"buckets": buckets, "factors": factors, "kernels": "Triton" if kernels else "torch"}
    return {**names, "reductions": engine.count, "launches": counter.count}


@main_guard
def main(out: Annotated[Path, typer.Option(help="the table")]) -> None:
    """Count launches and write the table."""
    kinds = [(factors, kernels) for factors in ("fp32", "int8", "int4") for kernels in (False, True)]
    rows = [launches(factors, buckets, kernels, Plan()) for factors, kernels in kinds for buckets in BUCKETS]
    atomic_write(out, csv_text(rows))
    print(out)


if __name__ == "__main__":
    typer.run(main)
