"""Compare predicted with measured steps of two pipeline stages with two replicas each, every rank on a host of the
testbed (root only): pipeline.csv, pipeline_rounds.csv, pipeline_probes.csv, pipeline.json.

Megatron trains; activations and gradients share the limited cable of their host. Calibrated without a limit at two
numbers of micro-batches; predicted under limits at others. Of a limited link nothing is used but messages timed by
themselves, as in :mod:`experiments.bench.steps`. A stage that sends activations or their gradients waits until they
have gone, as Megatron's schedule does on a CPU.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field
from scipy.optimize import brentq

from edgc.megatron import cpu_shims
from experiments.bench import steps, terminal
from experiments.bench.collectives import ALL_REDUCE, KINDS, SEND, Message, join, noting, time_collective, total_bytes
from experiments.bench.steps import FREE, Links, Measurements, Messages, compared, links_of, messages_of, probe
from experiments.bench.terminal import Positive, Rate, Say
from experiments.bench.testbed import Testbed
from experiments.bench.workers import ranks
from experiments.simulation.iteration_model import Bucket, Stage, iterate
from experiments.spec.settings import RunConfig

ON_TESTBED = True
SHOWN = "mbit_per_s micro_batches method used seconds seconds_predicted error"
record = steps.record
STAGES, REPLICAS = 2, 2
LAYOUT = f"DP{REPLICAS} x PP{STAGES}"
VOCABULARY = 256  # of the worker's text
WARM_UP = 2  # iterations that are not counted
SECONDS = 600.0
TIMEOUT = timedelta(seconds=300)
CALIBRATED = (4, 12)  # micro-batches at which the work of a step is measured
# fp32 entries, around what the steps send; more than a token bucket lets through at once after a pause.
PROBES = dict.fromkeys(KINDS, (1 << 15, 1 << 17, 1 << 19)) | {SEND: (1 << 14, 1 << 16, 1 << 18)}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "bf16": {"method": "bf16"},
    "powersgd_r4": {"method": "powersgd", "rank": 4},
    "powersgd_r16": {"method": "powersgd", "rank": 16},
    "powersgd_r32_int8": {"method": "powersgd", "rank": 32, "factor_dtype": "int8"},
    "int8": {"method": "quantize", "bits": 8},
}


class Plan(terminal.Plan):
    """Settings of the benchmark."""

    rates: tuple[Rate, ...] = Field((20.0, 50.0, 200.0), description="limits in Mbit/s, with commas")
    micro_batches: tuple[Annotated[int, Field(ge=STAGES)], ...] = Field(
        (2, 8), description="of a replica in a step, to be predicted, with commas"
    )
    rounds: Positive = Field(9, alias="repeats", description="counted iterations of each run")
    layers: int = 4
    hidden: int = 128
    sequence: int = 64
    micro_batch: int = 2

    @property
    def configurations(self) -> list[tuple[float, int, str]]:
        """Limit, micro-batches and method of every run, those that calibrate first."""
        free = [(FREE, count, name) for count in CALIBRATED for name in METHODS]
        limited = [(rate, count, name) for rate in self.rates for count in self.micro_batches for name in METHODS]
        return [*free, *limited]


def settings(plan: Plan, method: str, micro_batches: int) -> dict[str, Any]:
    """A run, as :class:`experiments.spec.settings.RunConfig` takes it."""
    iterations = WARM_UP + plan.rounds
    batch = {"micro_batch": plan.micro_batch, "global_batch": plan.micro_batch * micro_batches * REPLICAS}
    schedule = {"lr": 1e-3, "lr_warmup_fraction": 0.1, "eval_interval": iterations, "eval_batches": 1}
    return {
        "scale": "bench", "study": "pipeline_steps", "variant": method, "label": method, "seed": 1,
        "model": {"layers": plan.layers, "hidden": plan.hidden, "heads": 4, "sequence_length": plan.sequence},
        "parallel": {"pipeline": STAGES, "data": REPLICAS},
        "train": {"iterations": iterations, **batch, **schedule},
        "compression": METHODS[method],
    }  # fmt: skip


def measure(plan: Plan, folder: Path, say: Say) -> Measurements:
    """Run everything in a testbed of its own. UserError if none can be made."""
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    sent: dict[str, Any] = {}
    limit = None
    world = STAGES * REPLICAS
    with Testbed(world) as testbed, ranks(Rank, world, testbed=testbed) as group:
        for rate, count, name in plan.configurations:
            say(f"{LAYOUT}, {rate:g} Mbit/s, {count} micro-batches, {name}")
            if rate != limit:
                testbed.limit(rate or None)
                limit = rate
                probes += [{"mbit_per_s": rate} | row for row in probe(group, PROBES, REPLICAS, stages=STAGES)]
            answers = group.ask("train", within=SECONDS, run=settings(plan, name, count))
            place = {"mbit_per_s": rate, "micro_batches": count, "method": name}
            rounds += [place | row for row in iteration_rows(answers)]
            if rate == FREE:
                last = {answer["stage"]: answer["iterations"][-1]["messages"] for answer in answers}
                sent[name] = [last[stage] for stage in range(STAGES)]
    return Measurements(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


def iteration_rows(answers: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The slowest rank's seconds of every counted iteration, and per stage the median time of a micro-batch."""
    for index in range(WARM_UP, len(answers[0]["iterations"])):
        iterations = [(answer["stage"], answer["iterations"][index]) for answer in answers]
        row: dict[str, Any] = {"round": index - WARM_UP}
        row["seconds"] = max(iteration["seconds"] for _, iteration in iterations)
        for kind, stage in itertools.product(("forward", "backward"), range(STAGES)):
            times = [iteration["passes"][f"{kind}-compute"] for place, iteration in iterations if place == stage]
            row[f"{kind}_{stage}"] = float(np.median(np.concatenate(times)))
        yield row


class Passes:
    """Megatron's ``config.timers``, which keeps the seconds of every span by its name and never makes a rank wait."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.started: dict[str, float] = {}

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(start=partial(self._start, name), stop=partial(self._stop, name))

    def _start(self, name: str, barrier: bool = False) -> None:
        """``barrier`` is Megatron's wish that all ranks meet first; it would change what is measured."""
        self.started[name] = time.perf_counter()

    def _stop(self, name: str) -> None:
        self.seconds[name].append(time.perf_counter() - self.started.pop(name))


class Rank:
    """The worker: one rank of a pipeline."""

    def start(self) -> None:
        """Join the process group."""
        cpu_shims.install()
        join(TIMEOUT)

    def train(self, run: dict[str, Any]) -> dict[str, Any]:
        """Train on random text.

        Returns:
            ``stage``, and of each of the ``iterations`` the ``seconds``, those of the ``passes`` by the name of
            Megatron's timer, and the ``bytes`` that this rank sent, message by message in ``messages``.
        """
        with cpu_shims.without_compiler():  # here, for it takes seconds that the other benchmarks need not wait
            from megatron.core import parallel_state
            from megatron.core.pipeline_parallel import get_forward_backward_func

            from experiments.training.build import build

        config = RunConfig(**run)
        session = build(config, VOCABULARY)
        [chunk] = session.chunks
        stage, engine = session.stage, session.attachment.engine
        length, size = config.model.sequence_length, config.train.micro_batch
        generator = torch.Generator().manual_seed(int(parallel_state.get_data_parallel_rank()))
        positions = torch.arange(length).repeat(size, 1)
        passes = chunk.config.timers = Passes()
        channels: list[list[Message]] = []
        engine.open_channel = noting(channels)

        def forward(batches: Any, model: Any) -> Any:
            text = next(batches)
            losses = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
            return losses, lambda output: (loss := output.float().mean(), {"loss": loss.detach().clone()})

        iterations: list[dict[str, Any]] = []
        for _ in range(config.train.iterations):
            texts = torch.randint(0, VOCABULARY, (config.micro_batches, size, length + 1), generator=generator)
            started = time.perf_counter()
            chunk.zero_grad_buffer()
            session.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(texts),
                model=chunk,
                num_microbatches=config.micro_batches,
                seq_length=length,
                micro_batch_size=size,
                forward_only=False,
            )
            session.optimizer.step()
            session.scheduler.step(increment=1)
            step = {"seconds": time.perf_counter() - started, "passes": dict(passes.seconds)}
            step |= {"bytes": engine.last.statistics.bytes if engine.last else 0}
            iterations.append(step | {"messages": list(itertools.chain(*channels))})
            passes.seconds.clear()
            channels.clear()
        session.attachment.close()
        parallel_state.destroy_model_parallel()
        return {"stage": stage, "iterations": iterations}

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


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of a step.

    Attributes:
        forward, backward: seconds of a micro-batch, per stage.
        beside: seconds that a stage takes for a micro-batch beside these: code between the passes, and waiting for
            a core where there are fewer than ranks.
        rest: seconds after the gradients are averaged, without messages: gradient norm and optimizer.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    beside: float = 0.0
    rest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a step.

    Attributes:
        activations: of one micro-batch between two stages, and as many back.
        sent: per stage, what a rank sends to average its gradients.
        embedding: bytes that a rank of the end stages sends in the all-reduce of the tied embedding's gradients.
    """

    activations: float
    sent: Messages
    embedding: float = 0.0


def predict(compute: Compute, traffic: Traffic, links: Links, micro_batches: int, overhead: float = 0.0) -> float:
    """Seconds of a step under 1F1B whose gradients are averaged after backward.

    Args:
        links: between replicas by the kind of collective, between stages ``SEND``.
        overhead: seconds of the processor that averaging takes, beside its messages.
    """
    between, last = links[SEND].seconds(traffic.activations), len(traffic.sent) - 1
    passes = zip(compute.forward, compute.backward, traffic.sent, strict=True)
    stages = [
        Stage(
            forward=forward + compute.beside / 2 + (between if index < last else 0.0),
            backward=backward + compute.beside / 2 + (between if index > 0 else 0.0),
            buckets=(Bucket(compress=overhead, messages=messages_of(sent, links)),),
        )
        for index, (forward, backward, sent) in enumerate(passes)
    ]
    after = compute.rest + (links[ALL_REDUCE].seconds(traffic.embedding) if traffic.embedding else 0.0)
    return iterate(stages, micro_batches, after=after).seconds


def compute_of(rounds: pd.DataFrame, traffic: Traffic, links: Links) -> Compute:
    """Work of the steps in ``rounds``, which have :data:`CALIBRATED` micro-batches.

    Passes and what a micro-batch takes beside them (told by the two numbers of micro-batches) are medians over all
    methods, which do not differ in them; the rest is what these leave of an uncompressed step.
    """
    forward, backward = (
        tuple(float(rounds[f"{kind}_{stage}"].median()) for stage in range(STAGES)) for kind in ("forward", "backward")
    )
    few, many = CALIBRATED
    seconds = rounds.groupby(["method", "micro_batches"])["seconds"].median().unstack()
    added = float((seconds[many] - seconds[few]).median())
    passes = Compute(forward=forward, backward=backward)

    def missing(beside: float) -> float:
        """Seconds that more micro-batches added and the model does not have."""
        compute = replace(passes, beside=beside)
        return added - (predict(compute, traffic, links, many) - predict(compute, traffic, links, few))

    # Each stage takes it for every micro-batch, so at the upper end it is at least all of the difference.
    most = max(0.0, added) / (many - few)
    full = replace(passes, beside=float(brentq(missing, 0.0, most)) if missing(0.0) > 0 else 0.0)
    return replace(full, rest=overhead(rounds[rounds["method"] == "none"], full, traffic, links))


def overhead(rounds: pd.DataFrame, compute: Compute, traffic: Traffic, links: Links) -> float:
    """Seconds that a method adds to its steps in ``rounds`` beyond its messages; the mean over :data:`CALIBRATED`."""
    seconds = rounds.groupby("micro_batches")["seconds"].median()
    extra = [float(seconds[count]) - predict(compute, traffic, links, count) for count in CALIBRATED]
    return max(0.0, sum(extra) / len(extra))


def tables(plan: Plan, data: Measurements) -> dict[str, pd.DataFrame]:
    """One row per limit, number of micro-batches and method, with the columns of :mod:`experiments.bench.steps`; the
    rounds (a row per configuration and counted iteration) and the probes.

    ``used``: ``calibration`` (no limit) or ``validation``.
    """
    # fp32 activations; the ring of the two end stages' embeddings has two ranks.
    activations = 4.0 * plan.sequence * plan.micro_batch * plan.hidden
    embedding = 4.0 * VOCABULARY * plan.hidden
    traffic = {
        name: Traffic(activations=activations, sent=sent, embedding=embedding) for name, sent in data.sent.items()
    }
    free = data.rounds[data.rounds["mbit_per_s"] == FREE]
    free_links = links_of(data.probes[data.probes["mbit_per_s"] == FREE])
    compute = compute_of(free, traffic["none"], free_links)
    extra = {name: overhead(part, compute, traffic[str(name)], free_links) for name, part in free.groupby("method")}
    rows = []
    for (rate, count, name), part in data.rounds.groupby(["mbit_per_s", "micro_batches", "method"], sort=False):
        links = links_of(data.probes[data.probes["mbit_per_s"] == rate])
        silent = replace(traffic[name], sent=((),) * STAGES, embedding=0.0)
        rows.append(
            {"workers": STAGES * REPLICAS, "layout": LAYOUT, "mbit_per_s": rate, "micro_batches": count, "method": name}
            | {"used": "calibration" if rate == FREE else "validation"}
            | {"bytes": max(map(total_bytes, traffic[name].sent))}
            | compared(part["seconds"], predict(compute, traffic[name], links, int(count), extra[name]))
            | {"seconds_compute": predict(compute, silent, links, int(count)), "seconds_overhead": extra[name]}
            | links[ALL_REDUCE].columns()
        )
    return {"pipeline": pd.DataFrame(rows), "pipeline_rounds": data.rounds, "pipeline_probes": data.probes}
