"""Per-step numbers of all ranks brought together, and the summary of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from edgc.checks import plain
from edgc.control.controller import Plan
from edgc.engine import Iteration
from edgc.measurement.report import relative
from edgc.megatron.activation import Traffic
from experiments.training.signatures import Observation

SECONDS = ("compress", "communicate", "decompress", "entropy", "exposed")
PIPELINE_SUMS = ("pipeline_bytes", "pipeline_bytes_dense")
PIPELINE_MEANS = ("pipeline_relative_error", "seconds_pipeline")


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
    pipeline = dict.fromkeys((*PIPELINE_SUMS, *PIPELINE_MEANS), math.nan)
    if traffic is not None:
        p = traffic.statistics
        pipeline = {
            "pipeline_bytes": p.bytes,
            "pipeline_bytes_dense": traffic.dense_bytes,
            "pipeline_relative_error": _number(p.worker_error),
            "seconds_pipeline": p.compress.seconds + p.decompress.seconds,
        }
    return {
        "stage": stage,
        "replica": replica,
        "loss": loss,
        "gradient_norm": gradient_norm,
        "bytes": s.bytes,
        "rank": _number(done.rank),
        "entropy": done.entropy,
        "entropy_full": done.entropy_full,
        "worker_error": _number(s.worker_error),
        "error_feedback_ratio": _number(s.error_feedback_ratio),
        "mean_error_sq": done.mean_error_sq,
        "mean_input_sq": done.mean_input_sq,
        "seconds_compress": s.compress.seconds,
        "seconds_communicate": s.communicate.seconds,
        "seconds_decompress": s.decompress.seconds,
        "seconds_entropy": done.seconds_entropy,
        "skipped": done.skipped,
        "seconds_exposed": math.nan if done.exposed is None else done.exposed.seconds,
        "expert_bytes": _number(expert_bytes),
        **pipeline,
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Step:
    """One iteration of the whole job, the same numbers on every rank."""

    loss: float
    gradient_norm: float
    bytes: int
    stages: list[dict[str, Any]]
    skipped: bool = False

    @property
    def pipeline_bytes(self) -> int | None:
        """What one replica's stages sent backwards; None where that is not compressed."""
        sent = [stage["pipeline_bytes"] for stage in self.stages]
        return None if None in sent else sum(sent)

    def observed(self, iteration: int, plan: Plan, bytes_dense: int, predicted: Sequence[float]) -> Observation:
        """The iteration as :mod:`experiments.training.signatures` judges it; ``predicted`` are seconds per stage under
        ``plan``."""

        def seconds(part: str) -> list[float]:
            return [stage[f"seconds_{part}"] for stage in self.stages]

        return Observation(
            iteration=iteration,
            loss=self.loss,
            # With one replica, or where the cost gate found no gain, nothing is compressed whatever the plan says.
            ranks=plan.ranks if self.bytes < bytes_dense else (None,) * len(plan.ranks),
            bytes=self.bytes,
            bytes_dense=bytes_dense,
            compress=seconds("compress"),
            communicate=seconds("communicate"),
            decompress=seconds("decompress"),
            exposed=seconds("exposed"),
            predicted=predicted,
            skipped=self.skipped,
            disturbed=plan.probe_rank is not None or plan.gate,
        )


def gather_numbers(mine: Iterable[float], device: torch.device) -> list[list[float]]:
    """The numbers of every rank, in rank order, on every rank."""
    row = torch.tensor(list(mine), dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [item.tolist() for item in rows]


def gather_step(mine: Mapping[str, float], device: torch.device) -> Step:
    """Reduce the numbers of all ranks in rank order, so that every rank gets the same bits."""
    ranks = [dict(zip(mine, row, strict=True)) for row in gather_numbers(mine.values(), device)]
    replicas = len({rank["replica"] for rank in ranks})
    stages: list[dict[str, Any]] = []
    for stage in sorted({rank["stage"] for rank in ranks}):
        of_stage = [rank for rank in ranks if rank["stage"] == stage]
        mean = {key: _mean(rank[key] for rank in of_stage) for key in mine}
        total = {key: sum(rank[key] for rank in of_stage) for key in mine}
        stages.append(
            {
                "stage": int(stage),
                "rank": None if math.isnan(mean["rank"]) else int(mean["rank"]),
                **{key: mean[key] for key in ("entropy", "entropy_full", "worker_error", "error_feedback_ratio")},
                # Every shard of a stage has as many replicas: means over ranks are sums over shards up to one factor.
                "mean_error": relative(mean["mean_error_sq"], mean["mean_input_sq"]),
                "bytes": int(total["bytes"]) // replicas,
                **{f"seconds_{part}": six_digits(mean[f"seconds_{part}"]) for part in SECONDS},
                **{key: mean[key] for key in PIPELINE_MEANS},
                **{key: _of_replica(total[key], replicas) for key in PIPELINE_SUMS},
            }
        )
        if not math.isnan(total["expert_bytes"]):
            stages[-1]["expert_bytes"] = _of_replica(total["expert_bytes"], replicas)
    losses = [rank["loss"] for rank in ranks if rank["stage"] == stages[-1]["stage"]]
    return Step(
        loss=sum(losses) / len(losses),  # the plain mean: one replica's non-finite loss must show
        gradient_norm=ranks[0]["gradient_norm"],
        bytes=sum(int(rank["bytes"]) for rank in ranks) // replicas,
        stages=stages,
        skipped=any(rank["skipped"] for rank in ranks),
    )


def _mean(values: Any) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def six_digits(timed: float) -> float:
    """What was timed, in six digits: more are no measurement, and would be a third of what a kept run takes."""
    return float(f"{timed:.6g}")


def _of_replica(total: float, replicas: int) -> int | None:
    """A replica's part; None where the number does not apply."""
    return None if math.isnan(total) else int(total) // replicas


@dataclass
class History:
    """What the summary needs of all steps."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in SECONDS})
    bytes_total: int = 0
    skipped: int = 0
    last_ranks: list[int | None] = field(default_factory=list)

    def add(self, step: Step, seconds: float, tokens: int) -> None:
        self.losses.append(step.loss)
        self.seconds.append(seconds)
        self.tokens_per_second.append(tokens / seconds)
        self.bytes_total += step.bytes
        self.skipped += step.skipped
        self.last_ranks = [stage["rank"] for stage in step.stages]
        self.ranks += [rank for rank in self.last_ranks if rank is not None]
        for key, values in self.parts.items():
            values.append(max(stage[f"seconds_{key}"] for stage in step.stages))

    def replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in what was logged of earlier iterations."""
        for event in events:
            if event["event"] == "step":
                seconds, tokens = event["seconds"], event["tokens_per_second"] * event["seconds"]
                loss, norm = _number(event["loss"]), _number(event["grad_norm"])
                step = Step(loss, norm, event["bytes"], event["stages"], event["skipped"])
                self.add(step, seconds, round(tokens))

    def summary(self, bytes_dense_per_step: int, total_seconds: float) -> dict[str, Any]:
        """Aggregates; medians over steps of the slowest stage's seconds."""
        steps = len(self.losses)
        dense = bytes_dense_per_step * steps
        values: dict[str, Any] = {
            "iterations": steps,
            "skipped_steps": self.skipped,
            "train_loss": _mean(self.losses[-10:]),
            "bytes_total": self.bytes_total,
            "bytes_dense_total": dense,
            "bytes_ratio": self.bytes_total / dense if dense else None,
            "mean_rank": _mean(self.ranks),
            "final_ranks": self.last_ranks,
            "seconds_total": total_seconds,
            "seconds_per_step_median": statistics.median(self.seconds) if steps else None,
            "tokens_per_second_median": statistics.median(self.tokens_per_second) if steps else None,
        }
        for key, seconds in self.parts.items():
            values[f"seconds_{key}_per_step"] = statistics.median(seconds) if seconds else None
        return dict(plain(values))
