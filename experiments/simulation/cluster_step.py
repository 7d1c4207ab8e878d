"""Length of a whole training step of a described cluster, by :mod:`experiments.simulation.iteration_model`.

What is assumed beside :mod:`experiments.simulation.cost`:

* The forward pass of a micro-batch costs two operations per weight and token, and four per token, position and hidden
  unit in attention (nothing is saved by masking); the last stage has the logits. Backward costs ``backward_ratio``
  times that. A device does them at ``step_efficiency`` of its peak, tensor-parallel traffic within the node included.
* Gradients are reduced in ``bucket_elements`` at a time, as Megatron does, after backward or beside it (``overlap``).
* After the reduction come the all-reduce of the tied embedding and one pass of Adam over memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.simulation.cost import KIND, Cost, Model, StageCost, reduction
from experiments.simulation.iteration_model import Bucket, Iteration, Message, Stage
from experiments.simulation.iteration_model import Model as Step
from experiments.simulation.placement import StageShard

ADAM_PASSES = 7  # reads and writes of 4 bytes per parameter: gradient, and weight and two moments both ways


def forward_seconds(model: Model, stage: StageShard) -> float:
    """Seconds of one micro-batch's forward pass on one GPU of ``stage``."""
    shape, compute = model.shape, model.cluster.compute
    tokens, weights = model.micro_batch * shape.sequence_length, model.active_weights(stage)
    attention = 4 * shape.sequence_length * shape.hidden * len(stage.layer_range) / shape.tensor
    speed = model.cluster.gpu.fp32_flops.value * compute.step_efficiency.value * model.speed(stage)
    return tokens * (2 * weights + attention) / speed


def buckets(model: Model, stage: StageShard, cost: Cost) -> tuple[Bucket, ...]:
    """A reduction of ``cost`` in Megatron's buckets, of equal size, complete at equal distances."""
    count = max(1, math.ceil(stage.parameters / model.cluster.compute.bucket_elements.value))
    # Every bucket pays the latency of its own collectives, which depend on each other; a reduction's cost has it once.
    part = max(0.0, cost.communication - cost.latency) / count
    compress, messages = cost.compress / count, (Message(latency=cost.latency, seconds=part),)
    return tuple(Bucket(share=(i + 1) / count, compress=compress, messages=messages) for i in range(count))


def step(model: Model, cost: StageCost, *, overlap: bool) -> Iteration:
    """One step in which every stage reduces its gradients at ``cost``."""
    travel = model.transfer()
    stages = []
    for shard in model.stages:
        forward, exchange = forward_seconds(model, shard), model.exchange(shard)
        stages.append(
            Stage(
                forward=forward + exchange,
                backward=forward * model.cluster.compute.backward_ratio.value + exchange,
                to_next=travel,
                to_previous=travel,
                buckets=buckets(model, shard, cost(shard)),
            )
        )
    adam = model.passes(max(stage.parameters for stage in model.stages), ADAM_PASSES)
    after = adam + model.tied_embedding()
    return Step(stages=tuple(stages), micro_batches=model.micro_batches, overlap=overlap, after=after).run()


def of_method(model: Model, name: str, *, overlap: bool, base: float) -> tuple[Iteration, float]:
    """A step of a method, and the mean seconds of a step over its run; ``base`` are those of an uncompressed one."""
    rank, cost = model.methods(edgc=name.startswith("edgc"))[name]
    if not name.startswith("edgc") or rank is None:
        iteration = step(model, cost, overlap=overlap)
        return iteration, iteration.seconds
    # A warm-up of uncompressed steps: the mean over the run is one of steps, not of messages.
    warm_up = model.cluster.methods.warmup_fraction.value
    iteration = step(model, partial(model.powersgd, rank=rank), overlap=overlap)
    return iteration, warm_up * base + (1 - warm_up) * iteration.seconds


def table(models: Iterator[Model]) -> list[dict[str, Any]]:
    """A row per bandwidth, method, and whether reductions overlap with backward; what is saved is of the uncompressed
    step that overlaps as much."""
    rows = []
    for at in models:
        for overlap in (False, True):
            base = step(at, at.none, overlap=overlap)
            for name, (rank, _) in at.methods().items():
                iteration, seconds = of_method(at, name, overlap=overlap, base=base.seconds)
                row = {"method": name, "rank": rank, "gbits_per_second": f"{at.gbits:g}", "overlap": overlap}
                row |= {"seconds_step": f"{seconds:.9g}", "seconds_exposed": f"{max(iteration.exposed):.9g}"}
                row |= {"seconds_pipeline": f"{max(iteration.computed):.9g}"}
                row |= {"reduction_time_percent": f"{reduction(seconds, base.seconds):.4f}"}
                rows.append(row | {"kind": KIND})
    return rows


def uncompressed_reduction_share(model: Model) -> float:
    """Share of the uncompressed step without overlap that goes into reductions: no method saves more than this."""
    free = step(model, lambda _: Cost(0.0, 0.0), overlap=False).seconds
    return 1 - free / step(model, model.none, overlap=False).seconds
