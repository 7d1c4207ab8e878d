"""The network benchmark: seconds per training step of two ranks over a link of limited bandwidth, method by method.

Both ranks hold one model per method. In a round each method trains one step, in an order that turns round after round;
the limit is changed between rounds while the processes live on. torch's ``powerSGD_hook`` with several buckets is
tried in processes of its own, since it has been seen to crash them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from experiments.bench import children
from experiments.bench.children import ChildError, Group
from experiments.bench.engine_table import spread
from experiments.bench.gpt import Size
from experiments.bench.options import at_least, check_delay, check_rates
from experiments.bench.testbed import Testbed

MODULE = "experiments.bench.network_worker"
RANKS = 2
STEP_SECONDS = 60.0
RISKY_SECONDS = 40.0
RISKY_STEPS = 3


def methods(ranks: tuple[int, ...], quantised: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Name -> settings of :class:`experiments.bench.network_worker.Method`, in the order of the table.

    Args:
        ranks: of torch's hook and of ours with fp32 factors.
        quantised: of ours with int8 and int4 factors.
    """
    found: dict[str, dict[str, Any]] = {
        "compute": {"hook": "compute"},
        "dense": {"hook": "dense"},
        "dense, one bucket": {"hook": "dense", "one_bucket": True},
        "bf16 hook": {"hook": "bf16"},
    }
    for rank in ranks:
        found[f"torch r{rank}, one bucket"] = {"hook": "torch", "rank": rank, "one_bucket": True}
    for dtype, of in (("fp32", ranks), ("int8", quantised), ("int4", quantised)):
        for rank in of:
            found[f"edgc r{rank} {dtype}"] = {"hook": "edgc", "rank": rank, "factor_dtype": dtype}
    return found


def risky(ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Methods that may end their processes."""
    rank = min(ranks, key=lambda value: abs(value - 32))
    return {f"torch r{rank}, default buckets": {"hook": "torch", "rank": rank}}


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    rates: tuple[float | None, ...] = (100.0, 1000.0, None)  # limits in Mbit/s; None is no limit
    delay_ms: float = 0.0  # that every packet is delayed, at every limit
    ranks: tuple[int, ...] = (4, 32, 128)  # see :func:`methods`
    quantised: tuple[int, ...] = (32, 128)
    rounds: int = 5  # per limit, after one that is not counted
    threads: int = 1  # of each rank
    size: Size = field(default_factory=Size)

    def __post_init__(self) -> None:
        at_least(1, repeats=self.rounds, threads=self.threads, ranks=self.ranks, quantised=self.quantised)
        check_rates(self.rates, "use 1 to 10000 Mbit/s, or 0 for no limit")
        check_delay(self.delay_ms)

    @property
    def turns(self) -> int:
        """How often :func:`measure` reports progress."""
        return len(self.rates) * (self.rounds + 2)


def measure(plan: Plan, advance: Callable[[str], None]) -> pd.DataFrame:
    """Run the benchmark in a testbed of its own; one row per method, limit and round. UserError if none can be made."""
    rows: list[dict[str, Any]] = []
    with Testbed(RANKS) as testbed:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            chosen, failed = _prepare(group, methods(plan.ranks, plan.quantised))
            for rate in plan.rates:
                testbed.limit(rate, plan.delay_ms)
                rows += [_row(rate, name, status=reason) for name, reason in failed.items()]
                for index in range(-1, plan.rounds):
                    for name in chosen if index % 2 == 0 else chosen[::-1]:
                        answers = group.ask({"do": "step", "name": name}, STEP_SECONDS)
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
    return children.ranks(MODULE, testbed.hosts, threads=threads, testbed=testbed, size=size)


def _prepare(group: Group, wanted: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Build every method; those that fail on all ranks before they communicate are left out, with the reason."""
    chosen, failed = [], {}
    for name, settings in wanted.items():
        try:
            group.ask({"do": "prepare", "name": name, "settings": settings}, STEP_SECONDS)
            chosen.append(name)
        except ChildError as error:
            failed[name] = str(error)
    return chosen, failed


def _try(testbed: Testbed, plan: Plan, rate: float | None, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A few steps of a method in processes of its own; its crash is its result."""
    rows = []
    testbed.limit(None)
    try:
        with ranks_on(testbed, plan.size, plan.threads) as group:
            group.ask({"do": "prepare", "name": name, "settings": settings}, RISKY_SECONDS)
            testbed.limit(rate, plan.delay_ms)
            for index in range(min(RISKY_STEPS, plan.rounds)):
                answers = group.ask({"do": "step", "name": name}, RISKY_SECONDS)
                rows.append(_row(rate, name, index, answers))
    except ChildError as error:
        # Where packages lie on this machine is nobody's business.
        reason = re.sub(r"\S*/site-packages/", "", str(error))
        rows.append(_row(rate, name, status=f"failed: {reason}"))
    return rows


def _row(
    rate: float | None, name: str, index: int | None = None, answers: Sequence[dict[str, Any]] = (), status: str = "ok"
) -> dict[str, Any]:
    """A round of a method: the slower rank's seconds, the mean of the ranks' bytes."""
    row: dict[str, Any] = {"mbit_per_s": rate or 0, "method": name, "round": index, "status": status}
    if answers:
        ranks = pd.DataFrame(answers)
        row |= {"seconds": ranks["seconds"].max()} | ranks[["bytes", "wire"]].astype(float).mean().to_dict()
    return row


def words(rate: float | None) -> str:
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
