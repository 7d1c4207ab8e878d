"""What rank 0 tells of a run while it goes on: events, TensorBoard, a progress bar. Other ranks stay silent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edgc.control.controller import WINDOW_FACTS
from edgc.engine import Engine
from experiments.spec.settings import RunConfig
from experiments.training.metrics import Step, six_digits
from experiments.training.outputs import EventLog
from experiments.training.signatures import Finding

SCALARS = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "communication/bytes": "bytes"}
OF_A_DECISION = ("r_min", "r_max", "target", "target_low", "target_high", *WINDOW_FACTS)
STAGE_SCALARS = ("rank", "entropy", "worker_error", "mean_error")


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


class RunLog:
    """``metrics.jsonl``, ``tensorboard/`` and the progress bar of one run.

    Args:
        run, folder: what is told of, and where the files go.
        speaks: False on all ranks but one; every method is then without effect.
    """

    def __init__(self, run: RunConfig, folder: Path, *, speaks: bool) -> None:
        self.run, self.speaks = run, speaks
        self.events = EventLog(folder / "metrics.jsonl" if speaks else None)
        self.board: Any = None
        if speaks:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), flush_secs=3600)
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (speaks and console.is_terminal),
        )
        self.task = self.bar.add_task(f"{run.study}/{run.name}", total=run.train.iterations, shown="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        self.events.close()
        if self.board is not None:
            self.board.close()

    def replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write again what a checkpoint has kept of the log, before the first new event."""
        if not self.speaks:
            return
        for event in events:
            self._write(**event)
        self.bar.update(self.task, completed=sum(event["event"] == "step" for event in events))

    def _write(self, event: str, **fields: Any) -> None:
        """An event for the stream, and its numbers for TensorBoard."""
        self.events.write(event, **fields)
        scalars = {}
        if event == "step":
            scalars = {tag: fields[key] for tag, key in SCALARS.items()}
            for stage in fields["stages"]:
                scalars |= {f"stage{stage['stage']}/{key}": stage.get(key) for key in STAGE_SCALARS}
        elif event == "eval":
            scalars = {"validation/loss": fields["loss"]}
        for tag, value in scalars.items():
            if value is not None and math.isfinite(value):
                self.board.add_scalar(tag, value, fields["iteration"])

    def step(self, iteration: int, step: Step, lr: float, seconds: float, tokens: int) -> None:
        """One iteration: ``tokens`` of all replicas in ``seconds``."""
        if not self.speaks:
            return
        clip, norm = self.run.train.clip_grad, step.gradient_norm
        self._write(
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
            tokens_per_second=six_digits(tokens / seconds),
            stages=step.stages,
        )
        ranks = "/".join("dense" if stage["rank"] is None else str(stage["rank"]) for stage in step.stages)
        shown = (
            f"loss {step.loss:.3f} ppl {perplexity(step.loss):.1f} {tokens / seconds:.0f} tok/s "
            f"rank {ranks} {step.bytes / 1e6:.2f} MB"
        )
        self.bar.update(self.task, advance=1, shown=shown)

    def decision(self, engine: Engine) -> None:
        """The controller's decision of this iteration, if it took one."""
        made = engine.decision
        if made is None:
            return
        self.events.write(
            "decision",
            iteration=made.iteration,
            phase=made.phase,
            reason=made.reason,
            ranks=made.ranks,
            entropy_full=engine.monitor.entropy_full,
            **{name: getattr(made, name) for name in OF_A_DECISION},
        )
        if made.timing:
            # With this, and alignment's formula, every rank that is set from now on can be checked.
            self.events.write("timing", iteration=made.iteration, stages=[asdict(stage) for stage in made.timing])
        if made.reduction_seconds:
            self.events.write(
                "reduction_times",
                iteration=made.iteration,
                measured=made.reduction_seconds,
                predicted=made.predicted_seconds,
            )
        for verdict in made.gate:
            self.events.write("cost_gate", iteration=made.iteration, **asdict(verdict))

    def signature(self, finding: Finding) -> None:
        """A failure that has shown itself: an event each window, a line on the console when it is new."""
        self.events.write("signature", **asdict(finding), fix=finding.fix)
        if self.speaks and finding.is_new:
            line = f"iteration {finding.iteration}: {finding.text}; {finding.fix}"
            self.bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def evaluation(self, iteration: int, train_loss: float, loss: float) -> None:
        """A validation loss in nats per token."""
        if not self.speaks:
            return
        value = perplexity(loss)
        self._write("eval", iteration=iteration, split="validation", loss=loss, perplexity=value)
        line = f"iteration {iteration}: train loss {train_loss:.4f}, validation perplexity {value:.2f}"
        self.bar.console.print(line, highlight=False)
