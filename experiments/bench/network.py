"""Time training steps of two ranks over a limited link (root only): network.csv, network_rounds.csv, network.json.

Every rank holds one model per method. In a round each method trains one step, in an order that turns round after round;
the limit is changed between rounds while the processes live on. torch's ``powerSGD_hook`` with several buckets is
tried in processes of its own, since it has been seen to crash them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field

from edgc.runtime.channel import seconds_between
from experiments.bench import gpt, terminal
from experiments.bench.collectives import Message, join, noting, time_collective
from experiments.bench.gpt import Options, Size, Trainer
from experiments.bench.terminal import ROUNDS, Positive, Say, schedule, spread
from experiments.bench.testbed import Testbed, sent_bytes
from experiments.bench.workers import Group, WorkerError, ranks

ON_TESTBED = True
SHOWN = "mbit_per_s method status seconds speedup_over_dense speedup_over_torch bytes"
WORKERS = 2
RANKS = (4, 32, 128)  # of the approximation
STEP_SECONDS = 60.0
RISKY_SECONDS = 40.0
RISKY_STEPS = 3
ONE_BUCKET_MB = 4096  # more than the model has
WARM_UP = 4  # steps: buckets are rebuilt after the first, torch's hook starts at the third
TIMEOUT = timedelta(seconds=60)


METHODS: dict[str, Options] = {
    "compute": {"hook": "compute"},
    "dense": {"hook": "dense"},
    "dense, one bucket": {"hook": "dense", "bucket_mb": ONE_BUCKET_MB},
    "bf16 hook": {"hook": "bf16"},
    **{f"torch r{rank}, one bucket": {"hook": "torch", "rank": rank, "bucket_mb": ONE_BUCKET_MB} for rank in RANKS},
    **{
        f"edgc r{rank} {dtype}": {"hook": "edgc", "rank": rank, "factor_dtype": dtype}
        for dtype, chosen in (("fp32", RANKS), ("int8", RANKS[1:]), ("int4", RANKS[1:]))
        for rank in chosen
    },
}
RISKY = "torch r32, default buckets"  # may end its processes
RISKY_OPTIONS: Options = {"hook": "torch", "rank": 32}


class Plan(terminal.Plan):
    """Settings of the benchmark."""

    rates: tuple[Annotated[float, Field(ge=0, le=1e4)], ...] = Field(
        (100.0, 1000.0, 0.0), description="limits in Mbit/s, with commas; 0 is no limit"
    )
    rounds: Positive = ROUNDS
    threads: int = 1  # of each rank
    size: Size = Size()


def measure(plan: Plan, folder: Path, say: Say) -> pd.DataFrame:
    """Run the benchmark in a testbed of its own; one row per method, limit and round. UserError if none can be made."""
    rows: list[dict[str, Any]] = []
    with Testbed(WORKERS) as testbed:
        with ranks(Rank, WORKERS, threads=plan.threads, testbed=testbed, size=plan.size) as group:
            for name, options in METHODS.items():
                group.ask("prepare", within=STEP_SECONDS, name=name, options=options)
            for rate in plan.rates:
                say(limit_name(rate))
                testbed.limit(rate or None)
                for index, order in schedule(list(METHODS), plan.rounds):
                    steps = [one_step(group, rate, name, index, STEP_SECONDS) for name in order]
                    rows += steps if index >= 0 else []
        for rate in plan.rates:
            say(f"{limit_name(rate)}, {RISKY}")
            rows += _try(testbed, plan, rate)
    return pd.DataFrame(rows).sort_values(["mbit_per_s"], kind="stable", ignore_index=True)


def one_step(group: Group, rate: float, name: str, index: int, within: float) -> dict[str, Any]:
    """A round of a method: the slower rank's seconds, the mean of the ranks' bytes."""
    answers = pd.DataFrame(group.ask("step", within=within, name=name))
    row = {"mbit_per_s": rate, "method": name, "round": index, "status": "ok", "seconds": answers["seconds"].max()}
    return row | answers[["bytes", "wire"]].astype(float).mean().to_dict()


def _try(testbed: Testbed, plan: Plan, rate: float) -> Iterator[dict[str, Any]]:
    """A few steps of the risky method in processes of its own; its crash is its result."""
    testbed.limit(None)
    try:
        with ranks(Rank, WORKERS, threads=plan.threads, testbed=testbed, size=plan.size) as group:
            group.ask("prepare", within=RISKY_SECONDS, name=RISKY, options=RISKY_OPTIONS)
            testbed.limit(rate or None)
            for index in range(min(RISKY_STEPS, plan.rounds)):
                yield one_step(group, rate, RISKY, index, RISKY_SECONDS)
    except WorkerError as error:
        # Where packages lie on this machine is nobody's business.
        reason = re.sub(r"\S*/site-packages/", "", str(error))
        yield {"mbit_per_s": rate, "method": RISKY, "status": f"failed: {reason}"}


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
        options = METHODS.get(name, RISKY_OPTIONS)
        failures = part["status"][part["status"] != "ok"]
        good = part[part["status"] == "ok"].set_index("round")
        row: dict[str, Any] = {"mbit_per_s": rate, "method": name, "hook": options["hook"]}
        row |= {"rank": options.get("rank"), "factor_dtype": options.get("factor_dtype", "")}
        row |= {"buckets": "one" if "bucket_mb" in options else "default"}
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


class Rank:
    """The worker: a model per method, all of them trained in turns, one step when asked."""

    def start(self, size: Size) -> None:
        """Join the process group."""
        join(TIMEOUT)
        self.size, self.methods = size, dict[str, Trainer]()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def prepare(self, name: str, options: Options) -> None:
        """Build a method and train it for a few steps."""
        self.methods[name] = Trainer(self.size, options)
        for _ in range(WARM_UP):
            self.methods[name].step(gpt.batch(self.size, self.generator))

    def step(self, name: str) -> dict[str, Any]:
        """One timed step: seconds, bytes by formula, and bytes that left the interface."""
        method, text = self.methods[name], gpt.batch(self.size, self.generator)
        dist.barrier()
        sent = sent_bytes()
        started, *ends = method.step(text)
        moments = [seconds_between(started, end) for end in ends]
        # The peer may still be waiting for what lies in this host's queue.
        dist.barrier()
        answer = {"seconds": moments[-1], "bytes": method.bytes, "wire": sent_bytes() - sent}
        return answer | {"moments": moments, "complete": method.complete}

    def messages(self, name: str) -> list[list[Message]]:
        """Messages of this rank in a step of one of our methods: per bucket, collective by collective."""
        method, channels = self.methods[name], list[list[Message]]()
        assert method.handle is not None
        with mock.patch.object(method.handle.engine, "open_channel", noting(channels)):
            method.step(gpt.batch(self.size, self.generator))
        return channels

    def collective(self, kind: str, entries: int) -> dict[str, float | int]:
        """Time one collective on a buffer of so many fp32 numbers."""
        dist.barrier()
        sent = sent_bytes()
        seconds = time_collective(kind, entries)
        dist.barrier()
        return {"seconds": seconds, "wire": sent_bytes() - sent}
