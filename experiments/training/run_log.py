"""Numbers of a run while it goes on: those of all ranks brought together, the log, and the summary of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist

from edgc.checks import plain
from edgc.control.adaptive import WINDOW_FACTS
from edgc.engine import Engine, Iteration
from edgc.measurement.report import relative
from edgc.megatron.activation import Traffic
from experiments.spec.settings import RunConfig
from experiments.training.outputs import LOG

SECONDS = ("compress", "communicate", "decompress", "entropy", "exposed")
PIPELINE_SUMS = ("pipeline_bytes", "pipeline_bytes_dense")
SHORTEST_WINDOW = 8  # iterations by whose median loss it is judged if a run diverges
LEFT_BEST = 0.05  # share of the best window's loss
DIVERGING_FIX = "raise r_min (or rank); if the run diverges without compression too, lower the learning rate"
DECISION = (
    "iteration", "phase", "reason", "ranks", "r_min", "r_max", "target", "target_low", "target_high", *WINDOW_FACTS
)  # fmt: skip


def rank_step(
    stage: int,
    replica: int,
    loss: float,
    gradient_norm: float,
    done: Iteration,
    traffic: Traffic | None = None,
) -> dict[str, float]:
    """One rank's numbers of one iteration, on every rank in the same order; nan where a number does not apply.

    Those of the pipeline are of the gradients that this rank sent to the stage before it, where they are compressed:
    bytes, and the bytes they would have been. The squares of the mean and its error are of the window that ends here.
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
        **{f"seconds_{part}": getattr(s, part).seconds for part in ("compress", "communicate", "decompress")},
        "seconds_entropy": done.seconds_entropy,
        "seconds_exposed": done.exposed and done.exposed.seconds,
        "skipped": done.skipped,
        "pipeline_bytes": p and p.bytes,
        "pipeline_bytes_dense": traffic and traffic.dense_bytes,
        "pipeline_relative_error": p and p.worker_error,
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


def gather_numbers(numbers: Iterable[float], device: torch.device) -> list[list[float]]:
    """The numbers of every rank, in rank order, on every rank."""
    row = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [item.tolist() for item in rows]


def gather_step(numbers: Mapping[str, float], device: torch.device) -> Step:
    """Gather the numbers of all ranks, and reduce them."""
    return reduce_step([dict(zip(numbers, row, strict=True)) for row in gather_numbers(numbers.values(), device)])


def reduce_step(ranks: Sequence[Mapping[str, float]]) -> Step:
    """Reduce the numbers of all ranks in rank order, so that every rank gets the same bits."""
    replicas = len({rank["replica"] for rank in ranks})
    by_stage: dict[float, list[Mapping[str, float]]] = {}
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
    part = {key: sum(rank[key] for rank in ranks) / replicas for key in ("bytes", *PIPELINE_SUMS)}
    whole = {key: None if math.isnan(value) else int(value) for key, value in part.items()}
    return {
        "stage": int(mean["stage"]),
        "rank": None if math.isnan(mean["rank"]) else int(mean["rank"]),
        **{key: mean[key] for key in ("entropy", "entropy_full", "worker_error", "error_feedback_ratio")},
        # Every shard of a stage has as many replicas: means over ranks are sums over shards up to one factor.
        "mean_error": relative(mean["mean_error_sq"], mean["mean_input_sq"]),
        "bytes": whole["bytes"],
        **{f"seconds_{key}": six_digits(mean[f"seconds_{key}"]) for key in SECONDS},
        "pipeline_relative_error": mean["pipeline_relative_error"],
        **{key: whole[key] for key in PIPELINE_SUMS},
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


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def left_best(losses: Sequence[float], window: int) -> tuple[float, float] | None:
    """Median losses of the last window and of the best one, where the last two are above it by ``LEFT_BEST``."""
    parts = (losses[start : start + window] for start in range(0, len(losses), window))
    finite = ([loss for loss in part if math.isfinite(loss)] for part in parts)
    medians = [median(part) for part in finite if part]
    best = min(medians, default=math.nan)
    return (medians[-1], best) if min(medians[-2:], default=math.nan) > best + LEFT_BEST * abs(best) else None


class RunLog:
    """``metrics.jsonl`` of one run, with a line on the console for each evaluation.

    Args:
        run, folder: settings of the run, and where the file goes.
        speaks: False on all ranks but one, which write and print nothing.

    Attributes:
        losses: of all steps, in nats per token; nan where a loss was not finite.
        bytes_dense: what one replica sends in an uncompressed step, by the start of the run.
        began: whether a step that counts has sent less, whatever later ones send.
    """

    def __init__(self, run: RunConfig, folder: Path, *, speaks: bool) -> None:
        self.run, self.speaks = run, speaks
        self.window = run.edgc.window * -(-SHORTEST_WINDOW // run.edgc.window)
        self.losses: list[float] = []
        self.bytes_dense, self.began = 0, False
        if speaks:
            self._file = (folder / LOG).open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.speaks:
            self._file.close()

    def write(self, event: str, **fields: Any) -> None:
        """Append an event, as one whole line."""
        if event == "start":
            self.bytes_dense = fields["bytes_dense"]
        elif event == "step":
            self.losses.append(number(fields["loss"]))
            self.began = self.began or (not fields["skipped"] and fields["bytes"] < self.bytes_dense)
        if self.speaks:
            self._file.write(json.dumps({"event": event, **plain(fields)}) + "\n")

    def step(self, iteration: int, step: Step, lr: float, seconds: float) -> None:
        """One iteration, which took ``seconds``."""
        clip, norm = self.run.train.clip_grad, step.gradient_norm
        self.write(
            "step",
            iteration=iteration,
            loss=step.loss,
            lr=lr,
            grad_norm=norm,
            grad_norm_clipped=min(norm, clip) if clip > 0 else norm,
            bytes=step.bytes,
            skipped=step.skipped,
            seconds=seconds,
            stages=step.stages,
        )
        if self.speaks and self.began and iteration % self.window == 0:
            self._look_for_divergence(iteration)

    def _look_for_divergence(self, iteration: int) -> None:
        """Name, while the run goes on, a loss that has left its best for good under compression."""
        if (medians := left_best(self.losses, self.window)) is not None:
            loss, best = medians
            text = f"the loss diverges under compression: {loss:.4g} nats after a best of {best:.4g}"
            text += f" (medians of {self.window} iterations)"
            numbers = {"loss": loss, "best_loss": best}
            self.write(
                "signature", signature="diverging", iteration=iteration, numbers=numbers, text=text, fix=DIVERGING_FIX
            )
            self._say(f"iteration {iteration}: {text}; {DIVERGING_FIX}")

    def decision(self, engine: Engine) -> None:
        """The controller's decision of this iteration, if it took one."""
        decision = engine.decision
        if decision is None:
            return
        at, full = decision.iteration, engine.monitor.entropy_full
        fields = {name: getattr(decision, name) for name in DECISION}
        self.write("decision", **fields, entropy_full=full)
        if decision.timing:
            # With this, and alignment's formula, every rank that is set from now on can be checked.
            self.write("timing", iteration=at, stages=[asdict(stage) for stage in decision.timing])
        if measured := decision.reduction_seconds:
            self.write("reduction_times", iteration=at, measured=measured, predicted=decision.predicted_seconds)
        for verdict in decision.gate:
            self.write("cost_gate", iteration=at, **asdict(verdict))

    def evaluation(self, iteration: int, train_loss: float, loss: float) -> None:
        """A validation loss in nats per token."""
        value = perplexity(loss)
        self.write("eval", iteration=iteration, split="validation", loss=loss, perplexity=value)
        self._say(f"iteration {iteration}: train loss {train_loss:.4f}, validation perplexity {value:.2f}")

    def _say(self, line: str) -> None:
        if self.speaks:
            print(line, file=sys.stderr, flush=True)
