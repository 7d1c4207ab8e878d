"""Events, TensorBoard and the progress bar of a run that goes on: what rank 0 tells. Other ranks stay silent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edgc.checks import plain
from edgc.control.adaptive import OF_A_WINDOW
from edgc.engine import Engine
from experiments.spec.settings import RunConfig
from experiments.training.metrics import Step, six_digits
from experiments.training.outputs import LOG
from experiments.training.signatures import Finding

SCALARS = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "communication/bytes": "bytes"}
STAGE_SCALARS = ("rank", "entropy", "worker_error", "mean_error")
DECISION = (
    "iteration", "phase", "reason", "ranks", "r_min", "r_max", "target", "target_low", "target_high", *OF_A_WINDOW
)  # fmt: skip


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
