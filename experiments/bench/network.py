"""The network benchmark: seconds per training step of ranks over a link of limited bandwidth, method by method.

Every rank holds one model per method. In a round each method trains one step, in an order that turns round after round;
the limit is changed between rounds while the processes live on. torch's ``powerSGD_hook`` with several buckets is
tried in processes of its own, since it has been seen to crash them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Annotated, Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from edgc.config import EDGCConfig
from edgc.ddp import Handle, register
from experiments.bench import gpt, terminal, workers
from experiments.bench.collectives import Recording, Sent, join, seconds_of
from experiments.bench.gpt import Size
from experiments.bench.terminal import DELAY, ROUNDS, Delay, Positive, spread
from experiments.bench.testbed import Testbed, sent_bytes
from experiments.bench.workers import Group, WorkerError

RANKS = 2
STEP_SECONDS = 60.0
RISKY_SECONDS = 40.0
RISKY_STEPS = 3
ONE_BUCKET_MB = 4096  # more than the model has
WARM_UP = 4  # steps: buckets are rebuilt after the first, torch's hook starts at the third
ITERATIONS = 1000000  # a length of training that no benchmark reaches
TIMEOUT = timedelta(seconds=60)


def methods(ranks: tuple[int, ...], quantised: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Name -> settings of :class:`Method`, in the order of the table.

    Args:
        ranks: of torch's hook and of ours with fp32 factors.
        quantised: of ours with int8 and int4 factors.
    """
    settings: dict[str, dict[str, Any]] = {
        "compute": {"hook": "compute"},
        "dense": {"hook": "dense"},
        "dense, one bucket": {"hook": "dense", "one_bucket": True},
        "bf16 hook": {"hook": "bf16"},
    }
    for rank in ranks:
        settings[f"torch r{rank}, one bucket"] = {"hook": "torch", "rank": rank, "one_bucket": True}
    for dtype, of in (("fp32", ranks), ("int8", quantised), ("int4", quantised)):
        for rank in of:
            settings[f"edgc r{rank} {dtype}"] = {"hook": "edgc", "rank": rank, "factor_dtype": dtype}
    return settings


def risky(ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Methods that may end their processes."""
    rank = min(ranks, key=lambda value: abs(value - 32))
    return {f"torch r{rank}, default buckets": {"hook": "torch", "rank": rank}}


class Plan(terminal.Plan):
    """Settings of the benchmark; see :func:`methods` for ``ranks`` and ``quantised``."""

    rates: tuple[Annotated[float, Field(ge=0, le=1e4)], ...] = Field(
        (100.0, 1000.0, 0.0), description="limits in Mbit/s, with commas; 0 is no limit"
    )
    ranks: tuple[Positive, ...] = Field((4, 32, 128), description="ranks of torch's hook and ours, with commas")
    quantised: tuple[Positive, ...] = Field((32, 128), description="ranks of ours with int8 and int4 factors")
    delay_ms: Delay = DELAY
    rounds: Positive = ROUNDS
    threads: Positive = Field(1, description="threads of each rank")
    size: Size = Size()

    @property
    def turns(self) -> int:
        """Number of times that :func:`measure` reports progress."""
        return len(self.rates) * (self.rounds + 2)


def measure(plan: Plan, advance: Callable[[str], None]) -> pd.DataFrame:
    """Run the benchmark in a testbed of its own; one row per method, limit and round. UserError if none can be made."""
    rows: list[dict[str, Any]] = []
    with Testbed(RANKS) as testbed:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            chosen, failed = _prepare(group, methods(plan.ranks, plan.quantised))
            for rate in plan.rates:
                testbed.limit(rate or None, plan.delay_ms)
                rows += [_row(rate, name, status=reason) for name, reason in failed.items()]
                for index in range(-1, plan.rounds):
                    for name in chosen if index % 2 == 0 else chosen[::-1]:
                        answers = group.ask("step", within=STEP_SECONDS, name=name)
                        if index >= 0:
                            rows.append(_row(rate, name, index, answers))
                    advance(words(rate))
        for rate in plan.rates:
            for name, settings in risky(plan.ranks).items():
                rows += _try(testbed, plan, rate, name, settings)
            advance(f"{words(rate)}, several buckets")
    return pd.DataFrame(rows).sort_values(["mbit_per_s"], kind="stable", ignore_index=True)


def ranks_on(testbed: Testbed, size: Size, threads: int = 1) -> AbstractContextManager[Group]:
    """One process per host, joined to a process group."""
    return workers.ranks(Rank, testbed.hosts, threads=threads, testbed=testbed, size=size)


def _prepare(group: Group, wanted: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Build every method; those that fail on all ranks before they communicate are left out, with the reason."""
    chosen, failed = [], {}
    for name, settings in wanted.items():
        try:
            group.ask("prepare", within=STEP_SECONDS, name=name, settings=settings)
            chosen.append(name)
        except WorkerError as error:
            failed[name] = str(error)
    return chosen, failed


def _try(testbed: Testbed, plan: Plan, rate: float, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A few steps of a method in processes of its own; its crash is its result."""
    rows = []
    testbed.limit(None)
    try:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            group.ask("prepare", within=RISKY_SECONDS, name=name, settings=settings)
            testbed.limit(rate or None, plan.delay_ms)
            for index in range(min(RISKY_STEPS, plan.rounds)):
                answers = group.ask("step", within=RISKY_SECONDS, name=name)
                rows.append(_row(rate, name, index, answers))
    except WorkerError as error:
        # Where packages lie on this machine is nobody's business.
        reason = re.sub(r"\S*/site-packages/", "", str(error))
        rows.append(_row(rate, name, status=f"failed: {reason}"))
    return rows


def _row(
    rate: float, name: str, index: int | None = None, answers: Sequence[dict[str, Any]] = (), status: str = "ok"
) -> dict[str, Any]:
    """A round of a method: the slower rank's seconds, the mean of the ranks' bytes."""
    row: dict[str, Any] = {"mbit_per_s": rate, "method": name, "round": index, "status": status}
    if answers:
        ranks = pd.DataFrame(answers)
        row |= {"seconds": ranks["seconds"].max()} | ranks[["bytes", "wire"]].astype(float).mean().to_dict()
    return row


def words(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate else "no limit"


def table(plan: Plan, rounds: pd.DataFrame) -> pd.DataFrame:
    """One row per limit and method: median and quartiles of the seconds, ratios within rounds, bytes.

    ``mbit_per_s`` is 0 where there is no limit. ``speedup_over_dense`` is against dense with default buckets,
    ``speedup_over_torch`` against torch's hook at the same rank with one bucket. ``bytes`` is what the method counts
    itself or the formula of the ring, ``wire`` what left the interface, headers and acknowledgements included.
    """
    settings = {**methods(plan.ranks, plan.quantised), **risky(plan.ranks)}
    rows = []
    for (rate, name), part in rounds.groupby(["mbit_per_s", "method"], sort=False):
        options = settings[name]
        bad = part["status"][part["status"] != "ok"]
        good = part[part["status"] == "ok"].set_index("round")
        row: dict[str, Any] = {"mbit_per_s": rate, "method": name, "hook": options["hook"]}
        row |= {"rank": options.get("rank"), "factor_dtype": options.get("factor_dtype", "")}
        row |= {"buckets": "one" if options.get("one_bucket") else "default"}
        row |= {"status": "ok" if bad.empty else bad.iloc[0], "rounds": len(good)}
        if len(good):
            row |= spread("seconds", good["seconds"])
            others = {"dense": "dense", "torch": f"torch r{options.get('rank')}, one bucket"}
            for column, other in others.items():
                base = rounds[(rounds["mbit_per_s"] == rate) & (rounds["method"] == other)].set_index("round")
                ratio = (base["seconds"] / good["seconds"]).dropna()
                if len(ratio):
                    row |= spread(f"speedup_over_{column}", ratio)
            row["bytes"], row["wire"] = good["bytes"].median(), good["wire"].median()
            row["wire_over_bytes"] = row["wire"] / row["bytes"] if row["bytes"] else None
        rows.append(row)
    return pd.DataFrame(rows)


class Method:
    """A model with one way of averaging its gradients.

    Attributes:
        moments: of the last step, seconds since its start: end of forward, of backward, of the step.
        complete: of the last step of hook ``ready``, which sends nothing: per bucket, the seconds since the step's
            start and its entries.
    """

    def __init__(self, size: Size, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = gpt.GPT(size)
        self.model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if settings.get("one_bucket") else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.hook = str(settings["hook"])
        self.entries = sum(parameter.numel() for parameter in model.parameters())
        self.moments: tuple[float, ...] = ()
        self.complete: list[tuple[float, int]] = []
        self.handle: Handle | None = None
        self.started = 0.0
        self.expected = self._register(settings)

    def _register(self, settings: dict[str, Any]) -> Callable[[], int | None]:
        """Install the communication; returns the function that tells the bytes of the last step by formula."""
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        if self.hook in ("compute", "ready"):
            if self.hook == "ready":
                # DDP reads a hook's annotations, and wants them as objects.
                self.model.register_comm_hook(self, lambda method, bucket: _ready(method, bucket))
            return lambda: 0
        if self.hook == "dense":
            return lambda: round(4 * ring * self.entries)
        if self.hook == "bf16":
            # Under its own name DDP takes the hook for NCCL alone.
            compress = default_hooks.bf16_compress_hook
            self.model.register_comm_hook(dist.group.WORLD, lambda group, bucket: compress(group, bucket))
            return lambda: round(2 * ring * self.entries)
        if self.hook == "torch":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=settings["rank"], start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return self._of_torch(state, ring)
        config = {"method": "powersgd"} | {key: value for key, value in settings.items() if key != "hook"}
        handle = self.handle = register(self.model, EDGCConfig(**config), iterations=ITERATIONS)
        return lambda: handle.last.statistics.bytes if handle.last is not None else None

    def messages(self, text: torch.Tensor) -> list[list[Sent]]:
        """Messages of this rank in a step of our methods: per bucket, collective by collective."""
        assert self.handle is not None
        opened: list[Recording] = []

        def record(*options: Any) -> Recording:
            opened.append(Recording(*options))
            return opened[-1]

        with mock.patch.object(self.handle.engine, "open_channel", record):
            self.step(text)
        return [channel.messages for channel in opened]

    @staticmethod
    def _of_torch(state: powerSGD_hook.PowerSGDState, ring: float) -> Callable[[], int | None]:
        total = 0

        def last() -> int:
            nonlocal total
            before, total = total, state.total_numel_after_compression
            return round(4 * ring * (total - before))

        return last

    def step(self, text: torch.Tensor) -> None:
        """One training step."""
        alone = self.model.no_sync() if self.hook == "compute" else contextlib.nullcontext()
        self.complete.clear()
        self.started = time.perf_counter()
        with alone:
            loss = self.model(text)
            forward = time.perf_counter()
            loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.moments = tuple(at - self.started for at in (forward, backward, time.perf_counter()))


def _ready(method: Method, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sends nothing, and notes that a bucket is complete."""
    method.complete.append((time.perf_counter() - method.started, bucket.buffer().numel()))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Rank:
    """The worker: a model per method, all of them trained in turns, one step when asked."""

    def start(self, size: Size) -> None:
        """Join the process group."""
        join(TIMEOUT)
        self.size, self.methods = size, dict[str, Method]()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def prepare(self, name: str, settings: dict[str, Any]) -> None:
        """Build a method and train it for a few steps."""
        method = self.methods[name] = Method(self.size, settings)
        for _ in range(WARM_UP):
            method.step(gpt.batch(self.size, self.generator))
            method.expected()

    def step(self, name: str) -> dict[str, Any]:
        """One timed step: seconds, bytes by formula, and bytes that left the interface."""
        method, text = self.methods[name], gpt.batch(self.size, self.generator)
        dist.barrier()
        sent, started = sent_bytes(), time.perf_counter()
        method.step(text)
        seconds = time.perf_counter() - started
        # The peer may still be waiting for what lies in this host's queue.
        dist.barrier()
        wire = sent_bytes() - sent
        answer = {"seconds": seconds, "bytes": method.expected(), "wire": wire}
        return answer | {"moments": method.moments, "complete": method.complete}

    def messages(self, name: str) -> list[list[Sent]]:
        """Messages of a step of one of our methods, per bucket."""
        return self.methods[name].messages(gpt.batch(self.size, self.generator))

    def counted(self, name: str) -> int | None:
        """Bytes that a method says this rank has sent in its last step."""
        return self.methods[name].expected()

    def collective(self, kind: str, entries: int) -> dict[str, float | int]:
        """Time one collective on a buffer of so many fp32 numbers."""
        dist.barrier()
        sent = sent_bytes()
        seconds = seconds_of(kind, entries)
        dist.barrier()
        return {"seconds": seconds, "wire": sent_bytes() - sent}
