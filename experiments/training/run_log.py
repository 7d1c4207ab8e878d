"""Numbers of a run while it goes on: those of all ranks brought together, the log, and the summary of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edgc.checks import plain
from edgc.control.adaptive import WINDOW_FACTS
from edgc.engine import Engine, Iteration
from edgc.measurement.report import relative
from edgc.megatron.activation import Traffic
from experiments.spec.settings import RunConfig
from experiments.training.outputs import LOG
from experiments.training.signatures import Finding

SECONDS = ("compress", "communicate", "decompress", "entropy", "exposed")
PIPELINE_SUMS = ("pipeline_bytes", "pipeline_bytes_dense")
SCALARS = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "communication/bytes": "bytes"}
STAGE_SCALARS = ("rank", "entropy", "worker_error", "mean_error")
DECISION = (
    "iteration", "phase", "reason", "ranks", "r_min", "r_max", "target", "target_low", "target_high", *WINDOW_FACTS
)  # fmt: skip


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
        **{f"seconds_{part}": getattr(s, part).seconds for part in ("compress", "communicate", "decompress")},
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


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


class RunLog:
    """``metrics.jsonl``, ``tensorboard/`` and the progress bar of one run.

    Args:
        run, folder: settings of the run, and where the files go.
        speaks: False on all ranks but one; every method is then without effect.
    """

    def __init__(self, run: RunConfig, folder: Path, *, speaks: bool) -> None:
        self.run, self.path, self.speaks = run, folder / LOG, speaks
        if speaks:
            from torch.utils.tensorboard import SummaryWriter

            self._file = self.path.open("a", encoding="utf-8", buffering=1)
            self._board = SummaryWriter(str(folder / "tensorboard"), flush_secs=3600)
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (speaks and console.is_terminal),
        )
        self.task = self.bar.add_task(f"{run.study}/{run.name}", total=run.train.iterations, state="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        if self.speaks:
            self._file.close()
            self._board.close()

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Write again what a checkpoint has kept of the log, before the first new event."""
        for event in events:
            self.write(**event)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event, as one whole line, and show its numbers."""
        if not self.speaks:
            return
        self._file.write(json.dumps({"event": event, **plain(fields)}) + "\n")
        scalars = {}
        if event == "step":
            self.bar.advance(self.task)
            scalars = {tag: fields[key] for tag, key in SCALARS.items()}
            for stage in fields["stages"]:
                scalars |= {f"stage{stage['stage']}/{key}": stage.get(key) for key in STAGE_SCALARS}
        elif event == "eval":
            scalars = {"validation/loss": fields["loss"]}
        for tag, value in scalars.items():
            if value is not None and math.isfinite(value):
                self._board.add_scalar(tag, value, fields["iteration"])

    def step(self, iteration: int, step: Step, lr: float, seconds: float, tokens: int) -> None:
        """One iteration: ``tokens`` of all replicas in ``seconds``."""
        clip, norm, speed = self.run.train.clip_grad, step.gradient_norm, tokens / seconds
        self.write(
            "step",
            iteration=iteration,
            loss=step.loss,
            perplexity=perplexity(step.loss),
            lr=lr,
            grad_norm=norm,
            grad_norm_clipped=min(norm, clip) if clip > 0 else norm,
            bytes=step.bytes,
            skipped=step.skipped,
            pipeline_bytes=step.pipeline_bytes,
            seconds=seconds,
            tokens_per_second=six_digits(speed),
            stages=step.stages,
        )
        ranks = "/".join("dense" if stage["rank"] is None else str(stage["rank"]) for stage in step.stages)
        state = f"loss {step.loss:.3f} ppl {perplexity(step.loss):.1f} {speed:.0f} tok/s rank {ranks}"
        self.bar.update(self.task, state=f"{state} {step.bytes / 1e6:.2f} MB")

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

    def signature(self, finding: Finding) -> None:
        """A failure that has shown itself: an event each window, a line on the console when it is new."""
        self.write("signature", **asdict(finding), fix=finding.fix)
        if finding.is_new:
            self._say(f"iteration {finding.iteration}: {finding.text}; {finding.fix}")

    def evaluation(self, iteration: int, train_loss: float, loss: float) -> None:
        """A validation loss in nats per token."""
        value = perplexity(loss)
        self.write("eval", iteration=iteration, split="validation", loss=loss, perplexity=value)
        self._say(f"iteration {iteration}: train loss {train_loss:.4f}, validation perplexity {value:.2f}")

    def _say(self, line: str) -> None:
        if self.speaks:
            self.bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
