"""Time training steps of two ranks over a limited link (root only): network.csv, network_rounds.csv, network.json.

Every rank holds one model per method. In a round each method trains one step, in an order that turns round after round;
the limit is changed between rounds while the processes live on. torch's ``powerSGD_hook`` with several buckets is
tried in processes of its own, since it has been seen to crash them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
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
from experiments.bench.collectives import Link, Message, join, time_collective
from experiments.bench.gpt import Size
from experiments.bench.terminal import DELAY, ROUNDS, Advance, Delay, Positive, spread
from experiments.bench.testbed import Testbed, sent_bytes
from experiments.bench.workers import Group, WorkerError

ON_TESTBED = True
SHOWN = "mbit_per_s method status"
VALUES = "seconds speedup_over_dense speedup_over_torch bytes"
RANKS = 2
STEP_SECONDS = 60.0
RISKY_SECONDS = 40.0
RISKY_STEPS = 3
ONE_BUCKET_MB = 4096  # more than the model has
WARM_UP = 4  # steps: buckets are rebuilt after the first, torch's hook starts at the third
ITERATIONS = 1000000  # a length of training that no benchmark reaches
TIMEOUT = timedelta(seconds=60)
Options = dict[str, Any]  # of a method: its hook, one_bucket, and what the hook takes


class Plan(terminal.Plan):
    """Settings of the benchmark; see :meth:`methods` for ``ranks`` and ``quantised``."""

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
        """Rounds at every limit, and what may end its processes."""
        return len(self.rates) * (self.rounds + 2)

    @property
    def methods(self) -> dict[str, Options]:
        """Name -> options, in the order of the table: torch's hook and ours with fp32 factors at ``ranks``, ours with
        int8 and int4 factors at those that are ``quantised``."""
        options: dict[str, Options] = {
            "compute": {"hook": "compute"},
            "dense": {"hook": "dense"},
            "dense, one bucket": {"hook": "dense", "one_bucket": True},
            "bf16 hook": {"hook": "bf16"},
        }
        for rank in self.ranks:
            options[f"torch r{rank}, one bucket"] = {"hook": "torch", "rank": rank, "one_bucket": True}
        for dtype, ranks in (("fp32", self.ranks), ("int8", self.quantised), ("int4", self.quantised)):
            for rank in ranks:
                options[f"edgc r{rank} {dtype}"] = {"hook": "edgc", "rank": rank, "factor_dtype": dtype}
        return options

    @property
    def risky(self) -> dict[str, Options]:
        """Methods that may end their processes."""
        rank = min(self.ranks, key=lambda value: abs(value - 32))
        return {f"torch r{rank}, default buckets": {"hook": "torch", "rank": rank}}


def measure(plan: Plan, folder: Path, advance: Advance) -> pd.DataFrame:
    """Run the benchmark in a testbed of its own; one row per method, limit and round. UserError if none can be made."""
    rows: list[dict[str, Any]] = []
    with Testbed(RANKS) as testbed:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            names = []
            failed = []
            for name, options in plan.methods.items():
                try:
                    group.ask("prepare", within=STEP_SECONDS, name=name, options=options)
                    names.append(name)
                except WorkerError as error:  # before anything was sent
                    failed.append({"method": name, "status": str(error)})
            for rate in plan.rates:
                testbed.limit(rate or None, plan.delay_ms)
                rows += [{"mbit_per_s": rate, **row} for row in failed]
                for index in range(-1, plan.rounds):
                    for name in names if index % 2 == 0 else names[::-1]:
                        row = one_step(group, rate, name, index, STEP_SECONDS)
                        rows += [row] if index >= 0 else []
                    advance(limit_name(rate))
        for rate in plan.rates:
            for name, options in plan.risky.items():
                rows += _try(testbed, plan, rate, name, options)
            advance(f"{limit_name(rate)}, several buckets")
    return pd.DataFrame(rows).sort_values(["mbit_per_s"], kind="stable", ignore_index=True)


def ranks_on(testbed: Testbed, size: Size, threads: int = 1) -> AbstractContextManager[Group]:
    """One process per host, joined to a process group."""
    return workers.ranks(Rank, testbed.hosts, threads=threads, testbed=testbed, size=size)


def one_step(group: Group, rate: float, name: str, index: int, within: float) -> dict[str, Any]:
    """A round of a method: the slower rank's seconds, the mean of the ranks' bytes."""
    ranks = pd.DataFrame(group.ask("step", within=within, name=name))
    row = {"mbit_per_s": rate, "method": name, "round": index, "status": "ok", "seconds": ranks["seconds"].max()}
    return row | ranks[["bytes", "wire"]].astype(float).mean().to_dict()


def _try(testbed: Testbed, plan: Plan, rate: float, name: str, options: Options) -> Iterator[dict[str, Any]]:
    """A few steps of a method in processes of its own; its crash is its result."""
    testbed.limit(None)
    try:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            group.ask("prepare", within=RISKY_SECONDS, name=name, options=options)
            testbed.limit(rate or None, plan.delay_ms)
            for index in range(min(RISKY_STEPS, plan.rounds)):
                yield one_step(group, rate, name, index, RISKY_SECONDS)
    except WorkerError as error:
        # Where packages lie on this machine is nobody's business.
        reason = re.sub(r"\S*/site-packages/", "", str(error))
        yield {"mbit_per_s": rate, "method": name, "status": f"failed: {reason}"}


def limit_name(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate else "no limit"


def tables(plan: Plan, rounds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One row per limit and method: median and quartiles of the seconds, ratios within rounds, bytes; and the rounds.

    ``mbit_per_s`` is 0 where there is no limit. ``speedup_over_dense`` is against dense with default buckets,
    ``speedup_over_torch`` against torch's hook at the same rank with one bucket. ``bytes`` is what the method counts
    itself or the formula of the ring, ``wire`` what left the interface, headers and acknowledgements included.
    """
    rows = []
    for (rate, name), part in rounds.groupby(["mbit_per_s", "method"], sort=False):
        options = {**plan.methods, **plan.risky}[name]
        failures = part["status"][part["status"] != "ok"]
        good = part[part["status"] == "ok"].set_index("round")
        row: dict[str, Any] = {"mbit_per_s": rate, "method": name, "hook": options["hook"]}
        row |= {"rank": options.get("rank"), "factor_dtype": options.get("factor_dtype", "")}
        row |= {"buckets": "one" if options.get("one_bucket") else "default"}
        row |= {"status": "ok" if failures.empty else failures.iloc[0], "rounds": len(good)}
        if len(good):
            row |= spread("seconds", good["seconds"])
            for column, other in {"dense": "dense", "torch": f"torch r{options.get('rank')}, one bucket"}.items():
                base = rounds[(rounds["mbit_per_s"] == rate) & (rounds["method"] == other)].set_index("round")
                ratio = (base["seconds"] / good["seconds"]).dropna()
                if len(ratio):
                    row |= spread(f"speedup_over_{column}", ratio)
            row["bytes"], row["wire"] = good["bytes"].median(), good["wire"].median()
            row["wire_over_bytes"] = row["wire"] / row["bytes"] if row["bytes"] else None
        rows.append(row)
    return {"network": pd.DataFrame(rows), "network_rounds": rounds}


class Method:
    """A model with one way of averaging its gradients.

    Attributes:
        moments: of the last step, seconds since its start: end of forward, of backward, of the step.
        complete: of the last step of hook ``ready``, which sends nothing: per bucket, the seconds since the step's
            start and its entries.
        bytes: that the last step has sent by the method's own count or the formula of the ring, if that is known.
    """

    def __init__(self, size: Size, options: Options) -> None:
        torch.manual_seed(0)
        model = gpt.GPT(size)
        self.model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if options.get("one_bucket") else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.hook = str(options["hook"])
        self.entries = sum(parameter.numel() for parameter in model.parameters())
        self.moments: tuple[float, ...] = ()
        self.complete: list[tuple[float, int]] = []
        self.bytes: int | None = None
        self.handle: Handle | None = None
        self.state: powerSGD_hook.PowerSGDState | None = None
        if self.hook == "ready":
            # DDP reads a hook's annotations, and wants them as objects.
            self.model.register_comm_hook(self, lambda method, bucket: _ready(method, bucket))
        elif self.hook == "bf16":
            # Under its own name DDP takes the hook for NCCL alone.
            compress = default_hooks.bf16_compress_hook
            self.model.register_comm_hook(dist.group.WORLD, lambda group, bucket: compress(group, bucket))
        elif self.hook == "torch":
            rank = options["rank"]
            self.state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        elif self.hook == "edgc":
            config = {"method": "powersgd"} | {key: value for key, value in options.items() if key != "hook"}
            self.handle = register(self.model, EDGCConfig(**config), iterations=ITERATIONS)

    def step(self, text: torch.Tensor) -> None:
        """One training step."""
        alone = self.model.no_sync() if self.hook == "compute" else contextlib.nullcontext()
        compressed = self.state.total_numel_after_compression if self.state else 0
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
        if self.handle is not None:
            self.bytes = self.handle.last.statistics.bytes if self.handle.last is not None else None
        else:
            sent = self.state.total_numel_after_compression - compressed if self.state else self.entries
            width = {"dense": 4, "bf16": 2, "torch": 4}.get(self.hook, 0)
            self.bytes = round(width * 2 * (dist.get_world_size() - 1) / dist.get_world_size() * sent)


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

    def prepare(self, name: str, options: Options) -> None:
        """Build a method and train it for a few steps."""
        self.methods[name] = Method(self.size, options)
        for _ in range(WARM_UP):
            self.methods[name].step(gpt.batch(self.size, self.generator))

    def step(self, name: str) -> dict[str, Any]:
        """One timed step: seconds, bytes by formula, and bytes that left the interface."""
        method, text = self.methods[name], gpt.batch(self.size, self.generator)
        dist.barrier()
        sent, started = sent_bytes(), time.perf_counter()
        method.step(text)
        seconds = time.perf_counter() - started
        # The peer may still be waiting for what lies in this host's queue.
        dist.barrier()
        answer = {"seconds": seconds, "bytes": method.bytes, "wire": sent_bytes() - sent}
        return answer | {"moments": method.moments, "complete": method.complete}

    def messages(self, name: str) -> list[list[Message]]:
        """Messages of this rank in a step of one of our methods: per bucket, collective by collective."""
        method, link = self.methods[name], Link()
        assert method.handle is not None
        with mock.patch.object(method.handle.engine, "open_channel", link):
            method.step(gpt.batch(self.size, self.generator))
        return link.channels

    def collective(self, kind: str, entries: int) -> dict[str, float | int]:
        """Time one collective on a buffer of so many fp32 numbers."""
        dist.barrier()
        sent = sent_bytes()
        seconds = time_collective(kind, entries)
        dist.barrier()
        return {"seconds": seconds, "wire": sent_bytes() - sent}
