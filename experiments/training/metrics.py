"""Per-step numbers of all ranks brought together, and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from edgc.checks import plain
from edgc.engine import Iteration
from edgc.measurement.report import relative
from edgc.megatron.activation import Traffic

SECONDS = ("compress", "communicate", "decompress", "entropy", "exposed")
PIPELINE_SUMS = ("pipeline_bytes", "pipeline_bytes_dense")


def rank_step(
    stage: int,
    replica: int,
    loss: float,
    gradient_norm: float,
    done: Iteration,
    traffic: Traffic | None,
    expert_bytes: int | None,
) -> dict[str, float]:
    """One rank's numbers of one iteration, on every rank in the same order; nan where a number does not apply.

    Those of the pipeline are of the gradients that this rank sent to the stage before it, where they are compressed:
    bytes, the bytes they would have been, and the seconds of compressing what it sent and decompressing what came.
    ``expert_bytes`` are part of ``bytes``. The squares of the mean and its error are of the window that ends here.
    """
    s = done.statistics
    p = traffic and traffic.statistics
    numbers = {
        "stage": stage,
        "replica": replica,
        "loss": loss,
        "gradient_norm": gradient_norm,
        "bytes": s.bytes,
        "rank": done.rank,
        "entropy": done.entropy,
        "entropy_full": done.entropy_full,
        "worker_error": s.worker_error,
        "error_feedback_ratio": s.error_feedback_ratio,
        "mean_error_sq": done.mean_error_sq,
        "mean_input_sq": done.mean_input_sq,
        "seconds_compress": s.compress.seconds,
        "seconds_communicate": s.communicate.seconds,
        "seconds_decompress": s.decompress.seconds,
        "seconds_entropy": done.seconds_entropy,
        "seconds_exposed": done.exposed and done.exposed.seconds,
        "skipped": done.skipped,
        "expert_bytes": expert_bytes,
        "pipeline_bytes": p and p.bytes,
        "pipeline_bytes_dense": traffic and traffic.dense_bytes,
        "pipeline_relative_error": p and p.worker_error,
        "seconds_pipeline": p and p.compress.seconds + p.decompress.seconds,
    }
    return {key: number(value) for key, value in numbers.items()}


def number(value: float | None) -> float:
    """``value``; nan for None."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Step:
    """One iteration of the whole job, the same numbers on every rank."""

    loss: float
    gradient_norm: float
    bytes: int
    stages: list[dict[str, Any]]
    skipped: bool = False

    def seconds(self, part: str) -> list[float]:
        """Seconds of a part of the reduction, one of ``SECONDS``, by stage."""
        return [stage[f"seconds_{part}"] for stage in self.stages]

    @property
    def pipeline_bytes(self) -> int | None:
        """Bytes that one replica's stages sent backwards; None where that is not compressed."""
        sizes = [stage["pipeline_bytes"] for stage in self.stages]
        return None if None in sizes else sum(sizes)


def gather_numbers(numbers: Iterable[float], device: torch.device) -> list[list[float]]:
    """The numbers of every rank, in rank order, on every rank."""
    row = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [item.tolist() for item in rows]


def gather_step(numbers: Mapping[str, float], device: torch.device) -> Step:
    """Reduce the numbers of all ranks in rank order, so that every rank gets the same bits."""
    ranks = [dict(zip(numbers, row, strict=True)) for row in gather_numbers(numbers.values(), device)]
    replicas = len({rank["replica"] for rank in ranks})
    by_stage: dict[float, list[dict[str, float]]] = {}
    for rank in sorted(ranks, key=lambda rank: rank["stage"]):
        by_stage.setdefault(rank["stage"], []).append(rank)
    losses = [rank["loss"] for rank in [*by_stage.values()][-1]]
    return Step(
        loss=sum(losses) / len(losses),  # the plain mean: one replica's non-finite loss must show
        gradient_norm=ranks[0]["gradient_norm"],
        bytes=sum(int(rank["bytes"]) for rank in ranks) // replicas,
        stages=[_stage(rows, replicas) for rows in by_stage.values()],
        skipped=any(rank["skipped"] for rank in ranks),
    )


def _stage(ranks: Sequence[Mapping[str, float]], replicas: int) -> dict[str, Any]:
    """The numbers of one stage from those of its ranks."""
    mean = {key: _mean([rank[key] for rank in ranks]) for key in ranks[0]}
    # A replica's part; nan where the number does not apply.
    part = {key: sum(rank[key] for rank in ranks) / replicas for key in ("bytes", "expert_bytes", *PIPELINE_SUMS)}
    whole = {key: None if math.isnan(value) else int(value) for key, value in part.items()}
    return {
        "stage": int(mean["stage"]),
        "rank": None if math.isnan(mean["rank"]) else int(mean["rank"]),
        **{key: mean[key] for key in ("entropy", "entropy_full", "worker_error", "error_feedback_ratio")},
        # Every shard of a stage has as many replicas: means over ranks are sums over shards up to one factor.
        "mean_error": relative(mean["mean_error_sq"], mean["mean_input_sq"]),
        "bytes": whole["bytes"],
        **{f"seconds_{key}": six_digits(mean[f"seconds_{key}"]) for key in SECONDS},
        **{key: mean[key] for key in ("pipeline_relative_error", "seconds_pipeline")},
        **{key: whole[key] for key in PIPELINE_SUMS},
        **({} if whole["expert_bytes"] is None else {"expert_bytes": whole["expert_bytes"]}),
    }


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def six_digits(seconds: float) -> float:
    """Measured seconds in six digits: more are no measurement, and would be a third of what a kept run takes."""
    return float(f"{seconds:.6g}")


def summary(
    steps: Sequence[Mapping[str, Any]], tokens: int, bytes_dense_per_step: int, total_seconds: float
) -> dict[str, Any]:
    """Aggregates of a run's ``step`` events; medians over steps of the slowest stage's seconds.

    Args:
        tokens: in one step, of all replicas.
    """
    count, seconds = len(steps), [step["seconds"] for step in steps]
    size, dense = sum(step["bytes"] for step in steps), bytes_dense_per_step * count
    ranks = [[stage["rank"] for stage in step["stages"]] for step in steps]

    def slowest(part: str) -> list[float]:
        return [max(number(stage[f"seconds_{part}"]) for stage in step["stages"]) for step in steps]

    values: dict[str, Any] = {
        "iterations": count,
        "skipped_steps": sum(step["skipped"] for step in steps),
        "train_loss": _mean([number(step["loss"]) for step in steps[-10:]]),
        "bytes_total": size,
        "bytes_dense_total": dense,
        "bytes_ratio": size / dense if dense else None,
        "mean_rank": _mean([rank for row in ranks for rank in row if rank is not None]),
        "final_ranks": ranks[-1] if steps else [],
        "seconds_total": total_seconds,
        "seconds_per_step_median": median(seconds) if steps else None,
        "tokens_per_second_median": median(tokens / value for value in seconds) if steps else None,
    }
    values |= {f"seconds_{part}_per_step": median(slowest(part)) if steps else None for part in SECONDS}
    return dict(plain(values))
