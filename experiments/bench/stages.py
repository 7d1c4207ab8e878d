"""Note when each pipeline stage finishes its reductions, without compression, with equal ranks and with DAC:
stages.csv, stages_iterations.csv, stages.json, which also holds the times that DAC has measured.

timeline.csv has the share of every kind of work in each iteration; timeline_spans.csv and timeline_trace.json (for
Perfetto or chrome://tracing) show what every rank did when in the iteration with the median duration.

All stages have links of an injected bandwidth (:mod:`experiments.bench.collectives`), stage 0 a slower one. What DAC is
to bring about is that stages finish together; the spread of an iteration is the time between the first and the last.
Times are readings of one clock that all processes of a machine share. Ranks never meet for the sake of the
measurement: each notes its own times, and they are compared afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field

from edgc.checks import plain
from edgc.control.controller import Decision
from edgc.megatron import cpu_shims
from edgc.runtime.channel import Mark
from experiments.bench import terminal, timeline
from experiments.bench.collectives import SEND, Link, join, time_collective
from experiments.bench.terminal import Advance, spread
from experiments.bench.timeline import LINK, OPTIMIZER, REDUCTION, Recorder
from experiments.bench.workers import ranks
from experiments.common.files import atomic_write
from experiments.spec.settings import RunConfig

if TYPE_CHECKING:
    from experiments.training.build import Session

SHOWN = "variant ranks"
VALUES = "spread_seconds of_equal step_seconds"
SECONDS = 1800.0  # for all steps of one variant
WINDOW = 4
VARIANTS = ("none", "equal", "dac")
TIMEOUT = timedelta(seconds=300)
VOCABULARY = 256


class Plan(terminal.Plan):
    """Settings of the benchmark; ``rank`` is of stage 0 under compression, and of all stages without DAC."""

    pipeline: int = Field(4, ge=2, description="pipeline stages")
    data: int = Field(2, ge=2, description="replicas")
    rank: int = Field(8, ge=1, description="of stage 0, and of all stages without DAC")
    megabytes: float = Field(1.0, ge=0.01, description="injected bandwidth of every stage, MB/s")
    slowdown: float = Field(2.0, ge=1, description="by what factor stage 0's link is slower")
    steps: int = Field(20, ge=3, description="iterations that are counted, per variant")
    layers_per_stage: int = 2
    hidden: int = 64
    sequence: int = 32
    micro_batches: int = 8

    @property
    def turns(self) -> int:
        """The start, and every variant."""
        return 1 + len(VARIANTS)

    @property
    def bandwidths(self) -> list[float]:
        """Injected, per stage, in bytes per second."""
        first = self.megabytes / self.slowdown
        return [1e6 * value for value in (first, *[self.megabytes] * (self.pipeline - 1))]


def settings(plan: Plan, variant: str) -> dict[str, Any]:
    """The run of a variant, as :class:`experiments.spec.settings.RunConfig` takes it."""
    compression: dict[str, Any] = {"method": "none"}
    warm_up = WINDOW
    if variant != "none":
        compression = {
            "method": "edgc",
            "policy": "fixed",
            "rank": plan.rank,
            "window": WINDOW,
            "warmup_fraction": 0.0,
            "stability_tolerance": 10.0,
            "remeasure_above": None,  # the injected links do not change
            "entropy": {"iteration_rate": 0.25},
        }
        if variant == "dac":
            compression |= {"alignment": "measured", "search_start": 2}
        # DAC first times half a dozen ranks twice; without it warm-up is over after two windows.
        warm_up = (5 if variant == "dac" else 2) * WINDOW
    model = {"layers": plan.layers_per_stage * plan.pipeline, "hidden": plan.hidden, "sequence_length": plan.sequence}
    parallel = {"pipeline": plan.pipeline, "data": plan.data}
    batch = {"micro_batch": 2, "global_batch": 2 * plan.micro_batches * plan.data}
    return run_settings("stages", variant, model, parallel, batch | {"iterations": warm_up + plan.steps}, compression)


def run_settings(
    study: str,
    variant: str,
    model: Mapping[str, int],
    parallel: Mapping[str, int],
    train: Mapping[str, int],
    compression: Mapping[str, Any],
) -> dict[str, Any]:
    """A run of a benchmark, as :class:`experiments.spec.settings.RunConfig` takes it."""
    schedule = {"lr": 1e-3, "lr_warmup_fraction": 0.1, "eval_interval": train["iterations"], "eval_batches": 1}
    run = {"scale": "bench", "study": study, "variant": variant, "label": variant, "seed": 1}
    run |= {"model": {"heads": 4, **model}, "parallel": parallel}
    return run | {"train": {**train, **schedule}, "compression": compression}


@dataclass(frozen=True)
class Measurements:
    """Measurements of all variants.

    Attributes:
        iterations: one row per variant, counted iteration and stage, see :func:`rows`.
        decisions: of the controller, per variant.
        shares, spans: timelines of the counted iterations, see :func:`experiments.bench.timeline.collect`.
    """

    iterations: pd.DataFrame
    decisions: dict[str, list[dict[str, Any]]]
    shares: pd.DataFrame
    spans: pd.DataFrame


def measure(plan: Plan, folder: Path, advance: Advance) -> Measurements:
    """Train all variants one after another; the trace is written to ``folder``."""
    parts = []
    decisions: dict[str, list[dict[str, Any]]] = {}
    with ranks(Rank, plan.pipeline * plan.data) as group:
        advance("started")
        for variant in VARIANTS:
            run = settings(plan, variant)
            answers = group.ask("train", within=SECONDS, run=run, bandwidths=plan.bandwidths)
            counted = rows(variant, answers).groupby("stage").tail(plan.steps)
            parts.append((counted, *timeline.collect(variant, answers, sorted(set(counted["iteration"])))))
            decisions[variant] = answers[0]["decisions"]
            advance(variant)
    iterations, shares, spans = (pd.concat(frames, ignore_index=True) for frames in zip(*parts, strict=True))
    atomic_write(folder / "timeline_trace.json", timeline.chrome_trace(spans))
    return Measurements(iterations, decisions, shares, spans)


def record(data: Measurements, table: pd.DataFrame) -> dict[str, Any]:
    """Times that DAC has measured."""
    return {"timing": [decision["timing"] for decision in data.decisions["dac"] if decision["timing"]]}


def rows(variant: str, answers: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row per steady iteration and stage.

    Columns: ``variant``, ``iteration``, ``stage``, ``rank`` (empty: uncompressed), ``finish_seconds`` after the first
    stage of that iteration (a stage is over when all its replicas are), ``step_seconds``.
    """
    records = [
        {"variant": variant, "stage": answer["stage"], **iteration, "spans": None}
        for answer in answers
        for iteration in answer["iterations"]
        if iteration["steady"]
    ]
    stages = pd.DataFrame(records).groupby(["variant", "iteration", "stage"], as_index=False)
    stages = stages.agg(rank=("rank", "first"), finished=("finished", "max"), step_seconds=("seconds", "max"))
    first = stages.groupby("iteration")["finished"].transform("min")
    stages["finish_seconds"] = stages.pop("finished") - first
    return stages


def tables(plan: Plan, data: Measurements) -> dict[str, pd.DataFrame]:
    """One row per variant: median and quartiles of the spread of the stages' finish times, and its share of that
    with equal ranks; the iterations and the timelines."""
    summaries = []
    for variant, part in data.iterations.groupby("variant", sort=False):
        last = part.groupby("stage").tail(1).sort_values("stage")
        iterations = part.groupby("iteration")
        finish = spread("spread", iterations["finish_seconds"].max())
        summaries.append(
            {"variant": variant, "iterations": len(iterations)}
            | {"ranks": "/".join("dense" if pd.isna(rank) else f"{rank:.0f}" for rank in last["rank"])}
            | {"spread_seconds": finish.pop("spread"), **finish}
            | {"step_seconds": iterations["step_seconds"].max().median()}
        )
    table = pd.DataFrame(summaries)
    equal = table.loc[table["variant"] == "equal", "spread_seconds"].iloc[0]
    frames = {"stages": table.assign(of_equal=table["spread_seconds"] / equal), "stages_iterations": data.iterations}
    return frames | {"timeline": data.shares, "timeline_spans": data.spans}


def train(
    run: RunConfig, bandwidths: Sequence[float | None], *, slower: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Train ``run`` on random text with the default process group.

    Args:
        bandwidths: injected, per stage, in bytes per second.
        slower: from an iteration on (1-based), by what factor every bandwidth is divided.

    Returns:
        ``stage``, ``replica``; ``decisions``; and per iteration in ``iterations``: ``rank`` (None: uncompressed),
        ``steady`` (the ranks are final and nothing is being timed), ``finished`` (clock, when this rank's last
        reduction was over), ``bytes`` that this rank sent, ``messages`` (the same, collective by collective),
        ``seconds`` of the whole step and ``spans`` of what was done when (:mod:`experiments.bench.timeline`).
    """
    with cpu_shims.without_compiler():  # here, for it takes seconds that the other benchmarks need not wait
        from megatron.core import parallel_state

        from experiments.training.build import build

    session = build(run, VOCABULARY)
    engine, stage = session.attachment.engine, session.stage
    replica = int(parallel_state.get_data_parallel_rank())
    recorder = _recorder(session)
    link = engine.open_channel = Link(bandwidths[stage], lambda start, end: recorder.add(LINK, start, end))
    generator = torch.Generator().manual_seed(replica)
    decisions: list[Decision] = []
    iterations: list[dict[str, Any]] = []
    full = link.bandwidth
    for iteration in range(1, run.train.iterations + 1):
        if slower and iteration in slower and full is not None:
            link.bandwidth = full / slower[iteration]
        plan, started = engine.plan, time.perf_counter()
        recorder.take()
        _step(session, run, generator, recorder)
        iterations.append(
            {
                "iteration": iteration,
                "rank": plan.ranks[stage],
                "steady": plan.phase in ("active", "disabled") and plan.probe_rank is None,
                "finished": session.attachment.averaged_at,
                "bytes": engine.last.statistics.bytes if engine.last else 0,
                "messages": [message for channel in link.take() for message in channel],
                "seconds": time.perf_counter() - started,
                "spans": recorder.take(),
            }
        )
        if engine.decision is not None:
            decisions.append(engine.decision)
    session.attachment.close()
    parallel_state.destroy_model_parallel()
    return {"stage": stage, "replica": replica, "decisions": decisions, "iterations": iterations}


def _recorder(session: Session) -> Recorder:
    """Notes what Megatron's timers see, and when each bucket group's gradients are averaged here."""
    recorder, finished = Recorder(), session.attachment.group_finished

    def noting(started: Mark, ended: Mark, finite: torch.Tensor) -> None:
        assert isinstance(started, float)
        assert isinstance(ended, float)
        recorder.add(REDUCTION, started, ended)
        finished(started, ended, finite)

    session.attachment.group_finished = noting  # type: ignore[method-assign]
    session.chunks[0].config.timers = recorder
    return recorder


def _step(session: Session, run: RunConfig, generator: torch.Generator, recorder: Recorder) -> None:
    """One training step on the next random micro-batches."""
    length, size = run.model.sequence_length, run.train.micro_batch
    positions = torch.arange(length).repeat(size, 1)
    texts = [torch.randint(0, VOCABULARY, (size, length + 1), generator=generator) for _ in range(run.micro_batches)]

    def forward(batches: Any, model: Any) -> Any:
        text = next(batches)
        losses = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

        def loss(output: torch.Tensor) -> Any:
            value = output.float().mean()
            return value, {"loss": value.detach().clone()}

        return losses, loss

    from megatron.core.pipeline_parallel import get_forward_backward_func

    [chunk] = session.chunks
    chunk.zero_grad_buffer()
    session.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(texts),
        model=chunk,
        num_microbatches=run.micro_batches,
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
    )
    with recorder.span(OPTIMIZER):
        session.optimizer.step()
    session.scheduler.step(increment=1)


class Rank:
    """The worker: one rank of a pipeline."""

    def start(self) -> None:
        """Join the process group."""
        cpu_shims.install()
        join(TIMEOUT)

    def train(self, run: dict[str, Any], bandwidths: list[float | None]) -> dict[str, Any]:
        """:func:`train` in JSON's types."""
        result = train(RunConfig(**run), bandwidths)
        return {**result, "decisions": [plain(asdict(decision)) for decision in result["decisions"]]}

    def collective(self, kind: str, entries: int, stages: int) -> dict[str, float]:
        """Seconds of one collective on so many fp32 numbers among the replicas of every stage at once, or of sending
        them from the first stage to the second: half the time there and back."""
        rank, data = dist.get_rank(), dist.get_world_size() // stages
        if kind != SEND:
            groups = [dist.new_group(range(stage * data, (stage + 1) * data)) for stage in range(stages)]
            seconds = time_collective(kind, entries, groups[rank // data])
            for group in groups:
                dist.destroy_process_group(group)
            return {"seconds": seconds}
        tensor = torch.full((entries,), float(rank))
        dist.barrier()
        started = time.perf_counter()
        if rank < data:
            dist.send(tensor, rank + data)
            dist.recv(tensor, rank + data)
        elif rank < 2 * data:
            dist.recv(tensor, rank - data)
            dist.send(tensor, rank - data)
        return {"seconds": (time.perf_counter() - started) / 2}
