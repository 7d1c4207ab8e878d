"""One rank of a pipeline whose stages have links of injected speed: trains, and notes when its reductions are over.

Times are readings of one clock that all processes of a machine share. Ranks never meet for the sake of the
measurement: each notes its own times, and they are compared afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from edgc.checks import plain
from edgc.control.plan import Decision
from edgc.megatron import cpu_shims
from edgc.runtime.channel import Mark
from experiments.spec.settings import RunConfig

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from experiments.training.build import Session, build

from experiments.bench.children import serve
from experiments.bench.collectives import SEND, SlowLink, join, seconds_of
from experiments.bench.timeline import LINK, OPTIMIZER, REDUCTION, Recorder

TIMEOUT = timedelta(seconds=300)
VOCABULARY = 256


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
    session = build(run, VOCABULARY)
    engine, stage = session.attachment.engine, session.stage
    replica = int(parallel_state.get_data_parallel_rank())
    recorder = _recorder(session)
    link = engine.open_channel = SlowLink(bandwidths[stage], lambda start, end: recorder.add(LINK, start, end))
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
                "messages": link.take(),
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
    """Handlers of this process."""

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
            seconds = seconds_of(kind, entries, groups[rank // data])
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


if __name__ == "__main__":
    serve(Rank())
