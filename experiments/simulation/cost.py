"""Cost of one step's gradient communication on a described cluster, the plain alpha-beta estimate, and the length of
the step around it, by :mod:`experiments.simulation.iteration_model`.

The model, and what it leaves out:

* A ring all-reduce of S bytes over W replicas takes ``2 (W-1) alpha + 2 (W-1)/W * S / b``; a ring all-gather
  of S bytes per replica ``(W-1) alpha + (W-1) S / b``. alpha is the latency of one hop, b the bandwidth that
  one group has.
* Ranks are placed in Megatron's order (tensor fastest, then data, then pipeline), a tensor-parallel group
  within a node. The data-parallel groups that leave a node at the same time share its bandwidth equally.
* One message per reduction, no overlap with the backward pass, all stages start together: a stage's time is
  what its reduction takes. PowerSGD reduces P with the dense rest, then Q.
* Compression time is counted from operations at a stated throughput and kept apart from communication. What
  the entropy estimate costs is left out.
* Other traffic between nodes is left out, as no method here compresses it: activations and their gradients
  between stages, and the all-reduce of the tied embedding between the first and the last stage. A step has it.
* EDGC: r_max is the largest multiple of 4 at which compressed is not slower than uncompressed (arXiv
  2511.10333, as in the authors' code) *under this model*, r_min a quarter of it; the mean rank is
  assumed (ranks of the controller itself: :mod:`experiments.simulation.rank_trace`).

Of a whole step (:func:`step`):

* The forward pass of a micro-batch costs two operations per weight and token, and four per token, position and hidden
  unit in attention (nothing is saved by masking); the last stage has the logits. Backward costs ``backward_ratio``
  times that. A device does them at ``step_efficiency`` of its peak, tensor-parallel traffic within the node included.
* Gradients are reduced in ``bucket_elements`` at a time, as Megatron does, after backward or beside it (``overlap``).
* After the reduction come the all-reduce of the tied embedding and one pass of Adam over memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from experiments.simulation.inputs import ClusterConfig
from experiments.simulation.iteration_model import Bucket, Iteration, Stage, iterate
from experiments.simulation.placement import FP32_BYTES, GPTShape, StageShard

KIND = "simulated"  # of every second that follows from this model
ADAM_PASSES = 7  # reads and writes of 4 bytes per parameter: gradient, and weight and two moments both ways
RANK_MULTIPLE = 4  # paper: ranks move in multiples of 4

P = ParamSpec("P")


def reduction(cost: float, reference: float) -> float:
    """Percent saved; 0 where there is nothing to save (one replica)."""
    return 100.0 * (1.0 - cost / reference) if reference else 0.0


def all_reduce_seconds(size: float, world: int, latency: float, bandwidth: float) -> float:
    """Ring all-reduce of ``size`` bytes; ``bandwidth`` in bytes/s each way, ``latency`` in s per hop."""
    return 2 * (world - 1) * latency + 2 * (world - 1) / world * size / bandwidth


def all_gather_seconds(size: float, world: int, latency: float, bandwidth: float) -> float:
    """Ring all-gather where every replica contributes ``size`` bytes."""
    return (world - 1) * (latency + size / bandwidth)


@dataclass(frozen=True)
class Cost:
    """One stage, one step, one GPU: payload bytes, seconds of communication and of (de)compression; ``latency`` are
    those seconds of the communication that no bandwidth shortens, of all its collectives one after another."""

    bytes: float
    communication: float
    compress: float = 0.0
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        return self.communication + self.compress

    def times(self, factor: float) -> Cost:
        parts = (self.bytes, self.communication, self.compress, self.latency)
        return Cost(*(factor * part for part in parts))

    def __add__(self, other: Cost) -> Cost:
        communication, latency = self.communication + other.communication, self.latency + other.latency
        return Cost(self.bytes + other.bytes, communication, self.compress + other.compress, latency)


StageCost = Callable[[StageShard], Cost]
MethodCost = Callable[Concatenate["Model", StageShard, P], Cost]


def of_parts(method: MethodCost[P]) -> MethodCost[P]:
    """A method's cost on a stage as the sum of those of its parts (:meth:`Model.parts`)."""

    @wraps(method)
    def whole(self: Model, stage: StageShard, *args: P.args, **options: P.kwargs) -> Cost:
        first, *others = (method(model, part, *args, **options) for model, part in self.parts(stage))
        return sum(others, first)

    return whole


@dataclass(frozen=True)
class Model:
    """The estimate for one study at one bandwidth (Gbit/s per node).

    Attributes:
        links, devices: per stage, the shares of the bandwidth that its reductions have and of the speed that its
            devices have; empty: all of it.
    """

    shape: GPTShape
    stages: tuple[StageShard, ...]
    cluster: ClusterConfig
    sharing: int
    micro_batches: int
    micro_batch: int
    gbits: float
    links: Sequence[float] = ()
    devices: Sequence[float] = ()

    def assuming(self, section: str, key: str, value: Any) -> Model:
        """The same with another value of one input."""
        part = getattr(self.cluster, section)
        changed = getattr(part, key).model_copy(update={"value": value})
        part = part.model_copy(update={key: changed})
        return replace(self, cluster=self.cluster.model_copy(update={section: part}))

    def parts(self, stage: StageShard) -> Sequence[tuple[Model, StageShard]]:
        """Parts that are reduced apart, each over the replicas of its own model."""
        return ((self, stage),)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one data-parallel group, one direction."""
        return self.gbits * 1e9 / 8 / self.sharing

    @property
    def latency(self) -> float:
        return self.cluster.network.latency_seconds.value

    def link(self, stage: StageShard) -> float:
        """Bytes per second over which the replicas of ``stage`` reduce."""
        return replace(self, gbits=self.gbits * self.links[stage.stage]).bandwidth if self.links else self.bandwidth

    def _reduce(self, size: float, stage: StageShard) -> float:
        return all_reduce_seconds(size, self.shape.data, self.latency, self.link(stage))

    def _gather(self, size: float, stage: StageShard) -> float:
        return all_gather_seconds(size, self.shape.data, self.latency, self.link(stage))

    def _reduced(self, stage: StageShard, messages: Sequence[int], compress: float = 0.0) -> Cost:
        """Seconds of messages reduced one after another, and ``compress`` seconds of a device at full speed."""
        seconds = sum(self._reduce(size, stage) for size in messages)
        return Cost(sum(messages), seconds, compress / self.speed(stage), len(messages) * self._reduce(0.0, stage))

    def passes(self, entries: int, passes: float) -> float:
        """Seconds to read or write ``entries`` fp32 numbers ``passes`` times."""
        gpu = self.cluster.gpu
        speed = gpu.memory_bytes_per_second.value * gpu.memory_efficiency.value
        return FP32_BYTES * passes * entries / speed

    @of_parts
    def none(self, stage: StageShard) -> Cost:
        """Uncompressed reduction."""
        return self._reduced(stage, stage.dense_payload())

    @of_parts
    def bf16(self, stage: StageShard) -> Cost:
        passes = self.cluster.methods.memory_passes.value.bf16
        return self._reduced(stage, stage.dense_payload(2), self.passes(stage.parameters, passes))

    @of_parts
    def quantised(self, stage: StageShard, bits: int) -> Cost:
        """Quantised reduce-scatter, requantised, all-gather: the traffic of a ring all-reduce.

        ``bits`` per entry, one fp32 scale per block; the dense rest travels in fp32 with it.
        """
        matrices = stage.parameters - stage.dense_rest
        scales = -(-matrices // self.cluster.methods.int8_block.value)
        message = matrices * bits // 8 + FP32_BYTES * (scales + stage.dense_rest)
        passes = self.cluster.methods.memory_passes.value.int8
        return self._reduced(stage, (message,), self.passes(matrices, passes))

    @of_parts
    def topk(self, stage: StageShard) -> Cost:
        """Largest entries of every matrix as fp32 value and int32 index, all-gathered; dense rest reduced."""
        share = self.cluster.methods.topk_fraction.value
        entries_sent = sum(count * max(1, round(share * m * n)) for (m, n), count in stage.shapes.items())
        sparse, passes = 2 * FP32_BYTES * entries_sent, self.cluster.methods.memory_passes.value.topk
        compress = self.passes(stage.parameters - stage.dense_rest, passes)
        dense = self._reduced(stage, (FP32_BYTES * stage.dense_rest,), compress)
        return dense + Cost(sparse, self._gather(sparse, stage), latency=self._gather(0.0, stage))

    @of_parts
    def powersgd(self, stage: StageShard, rank: int, *, always: bool = False, factor_bytes: int = FP32_BYTES) -> Cost:
        """Compression: four m x n x r products (P, Q, own error, result), a QR of P, passes, launches.

        Matrices whose factors are not smaller go dense, unless ``always``; factors of ``factor_bytes`` an entry.
        """
        messages = stage.powersgd_payload(rank, always=always, factor_bytes=factor_bytes)
        used = stage.factored(rank, always=always)
        gpu = self.cluster.gpu
        peak = gpu.fp32_flops.value
        products = sum(8.0 * count * m * n * r for m, n, r, count in used) / (peak * gpu.gemm_efficiency.value)
        qr = sum(4.0 * count * m * r**2 for m, _, r, count in used) / (peak * gpu.orthogonalise_efficiency.value)
        entries = sum(count * m * n for m, n, _, count in used)
        passes = self.passes(entries, self.cluster.methods.memory_passes.value.powersgd)
        launches = sum(count for *_, count in used) * gpu.seconds_per_matrix.value
        return self._reduced(stage, messages, products + qr + passes + launches)

    def active_weights(self, stage: StageShard) -> float:
        """Entries of the matrices that a token is multiplied with on one GPU of ``stage``."""
        return stage.active_weights

    def speed(self, stage: StageShard) -> float:
        """Speed of this stage's devices, as a share of that of the ``gpu`` section."""
        return self.devices[stage.stage] if self.devices else 1.0

    def exchange(self, stage: StageShard) -> float:
        """Seconds in which a micro-batch's forward pass (and again its backward pass) waits for others' tokens."""
        return 0.0

    def transfer(self) -> float:
        """Seconds of one micro-batch's activations, or their gradients, between two stages.

        As with Megatron-LM's scatter-gather, a boundary tensor is sent once, split over tensor-parallel GPUs.
        """
        entries = self.micro_batch * self.shape.sequence_length * self.shape.hidden // self.shape.tensor
        return self.latency + FP32_BYTES * entries / self.bandwidth

    def tied_embedding(self) -> float:
        """Seconds of the all-reduce between first and last stage; 0 where one device holds both ends."""
        if not self.shape.tied or self.shape.pipeline == 1:
            return 0.0
        embedding = FP32_BYTES * self.shape.padded_vocab * self.shape.hidden // self.shape.tensor
        return all_reduce_seconds(embedding, 2, self.latency, self.bandwidth)

    def slowest(self, cost: StageCost) -> Cost:
        """The cost of the stage that takes longest."""
        return max((cost(stage) for stage in self.stages), key=lambda c: c.seconds)

    def largest_useful_rank(self) -> int | None:
        """Largest multiple of 4 at which PowerSGD is not slower than uncompressed; None if there is none.

        Every matrix is factored, as where the paper times it; so time grows with the rank: bisected.
        """
        limit = self.slowest(self.none).seconds
        largest = max(min(shape) for s in self.stages for shape in s.shapes)
        ranks = range(RANK_MULTIPLE, largest + 1, RANK_MULTIPLE)

        def seconds(rank: int) -> float:
            return self.slowest(partial(self.powersgd, rank=rank, always=True)).seconds

        useful = bisect_right(ranks, limit, key=seconds)
        return ranks[useful - 1] if useful else None

    def edgc_ranks(self) -> tuple[int, int, int] | None:
        """(r_min, assumed mean, r_max), multiples of 4, or None where compression never pays."""
        r_max, methods = self.largest_useful_rank(), self.cluster.methods
        if r_max is None:
            return None

        def multiple(rank: float) -> int:
            return max(RANK_MULTIPLE, RANK_MULTIPLE * round(rank / RANK_MULTIPLE))

        r_min = multiple(r_max / methods.r_min_divisor.value)
        return r_min, multiple(r_min + methods.mean_rank_position.value * (r_max - r_min)), r_max

    def edgc(self, stage: StageShard, rank: int) -> Cost:
        """Mean over a whole run: uncompressed in the warm-up, ``rank`` afterwards."""
        warm_up = self.cluster.methods.warmup_fraction.value
        return self.powersgd(stage, rank).times(1 - warm_up) + self.none(stage).times(warm_up)

    def methods(self, *, edgc: bool = True) -> dict[str, tuple[int | None, StageCost]]:
        """Name -> (rank, cost of a stage), in the order of the tables; without EDGC no rank is looked for."""
        costs: dict[str, tuple[int | None, StageCost]]
        costs = {"none": (None, self.none), "bf16": (None, self.bf16)}
        for rank in self.cluster.methods.powersgd_ranks.value:
            costs[f"powersgd_r{rank}"] = (rank, partial(self.powersgd, rank=rank))
        ranks = (self.edgc_ranks() if edgc else None) or (None, None, None)
        for name, edgc_rank in zip(("edgc_r_min", "edgc", "edgc_r_max"), ranks, strict=True):
            costs[name] = (edgc_rank, self.none if edgc_rank is None else partial(self.edgc, rank=edgc_rank))
        for bits in (8, 4):
            costs[f"int{bits}"] = (None, partial(self.quantised, bits=bits))
        # What this repository's own runs found best at few bytes: int8 factors of a middle rank.
        rank = self.cluster.methods.quantised_factors_rank.value
        costs[f"factors_int8_r{rank}"] = (rank, partial(self.powersgd, rank=rank, factor_bytes=1))
        return costs | {"topk": (None, self.topk)}

    def method(self, name: str) -> StageCost:
        """The cost of a method other than EDGC."""
        return self.methods(edgc=False)[name][1]


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
    compress, messages = cost.compress / count, ((cost.latency, part),)
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
    return iterate(stages, model.micro_batches, overlap=overlap, after=adam + model.tied_embedding())


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
