"""Predicted against measured training steps on the testbed: methods x limits x numbers of workers.

Nothing that a limit slows down is used for its prediction but collectives timed by themselves. In a round every method
trains one step, as in :mod:`experiments.bench.network`; the first rounds are without a limit and tell what a method
costs beside its messages, and the step without communication is timed in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from experiments.bench import network
from experiments.bench.children import Group
from experiments.bench.collectives import ALL_REDUCE, KINDS, Sent, sent_in, total
from experiments.bench.engine_table import spread
from experiments.bench.gpt import Size
from experiments.bench.options import at_least, check_delay, check_rates
from experiments.bench.step_model import Compute, Link, links_of, overhead_of, predict
from experiments.bench.testbed import Testbed

COMPUTE = "compute"
# fp32 entries of the collectives that tell what a link does.
PROBES = dict.fromkeys(KINDS, (1 << 16, 1 << 18, 1 << 20, 3 << 20))
PROBE_ROUNDS = 5  # gloo's exchanges take one of two times, so some are needed for the median
FREE = 0.0  # no limit, in the tables


def methods() -> dict[str, dict[str, Any]]:
    """Name -> settings of :class:`experiments.bench.network_worker.Method`."""
    found: dict[str, dict[str, Any]] = {
        COMPUTE: {"hook": "ready"},
        "none": {"hook": "dense"},
        "bf16": {"hook": "bf16"},
    }
    for rank, dtype in ((4, "fp32"), (32, "fp32"), (128, "fp32"), (32, "int8"), (64, "int4")):
        name = f"powersgd_r{rank}" + (f"_{dtype}" if dtype != "fp32" else "")
        found[name] = {"hook": "edgc", "rank": rank, "factor_dtype": dtype}
    for bits in (8, 4):
        found[f"int{bits}"] = {"hook": "edgc", "method": "quantize", "bits": bits}
    found["topk"] = {"hook": "edgc", "method": "topk", "density": 0.01}
    return found


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    workers: tuple[int, ...] = (2, 4)  # numbers of data-parallel workers
    rates: tuple[float, ...] = (100.0, 300.0, 1000.0)  # limits in Mbit/s
    delay_ms: float = 0.0  # that every packet is delayed where there is a limit
    rounds: int = 5  # per number of workers and limit, after one that is not counted
    threads: int = 1  # of each worker
    size: Size = field(default_factory=lambda: Size(sequence=128, batch=2))

    def __post_init__(self) -> None:
        at_least(1, repeats=self.rounds)
        at_least(2, workers=self.workers)
        check_rates(self.rates)
        check_delay(self.delay_ms)

    @property
    def turns(self) -> int:
        """How often :func:`measure` reports progress."""
        return len(self.workers) * (len(self.rates) + 1) * (self.rounds + 1)


@dataclass(frozen=True)
class Measured:
    """``rounds``: a row per worker count, limit, method and round; ``probes``: per timed collective; ``sent``: per
    worker count and method what rank 0 sends, per bucket and collective."""

    rounds: pd.DataFrame
    probes: pd.DataFrame
    sent: dict[int, dict[str, list[list[Sent]]]]


def measure(plan: Plan, advance: Callable[[str], None]) -> Measured:
    """Run everything in testbeds of its own. UserError if none can be made."""
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    sent: dict[int, dict[str, list[list[Sent]]]] = {}
    for workers in plan.workers:
        with Testbed(workers) as testbed, network.ranks_on(testbed, plan.size, plan.threads) as group:
            for name, settings in methods().items():
                group.ask({"do": "prepare", "name": name, "settings": settings}, network.STEP_SECONDS)
            sent[workers] = messages(group, workers)
            for rate in (FREE, *plan.rates):
                testbed.limit(rate or None, plan.delay_ms if rate else 0.0)
                at = {"workers": workers, "mbit_per_s": rate}
                probes += [at | row for row in probe(group, PROBES, workers)]
                for index in range(-1, plan.rounds):
                    rounds += [at | row for row in one_round(group, index) if index >= 0]
                    advance(f"{workers} workers, {network.words(rate or None)}")
    return Measured(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


def messages(group: Group, workers: int) -> dict[str, list[list[Sent]]]:
    """What each method sends, by its own count; of torch's all-reduces by the formula of the ring."""
    ready = group.ask({"do": "step", "name": COMPUTE}, network.STEP_SECONDS)[0]["complete"]
    found: dict[str, list[list[Sent]]] = {COMPUTE: [[] for _ in ready]}
    for name, settings in methods().items():
        if settings["hook"] == "edgc":
            found[name] = group.ask({"do": "messages", "name": name}, network.STEP_SECONDS)[0]
        elif name != COMPUTE:
            share = 0.5 if settings["hook"] == "bf16" else 1.0
            found[name] = [[(ALL_REDUCE, share * sent_in(ALL_REDUCE, entries, workers))] for _, entries in ready]
    return found


def probe(group: Group, sizes: Mapping[str, Sequence[int]], ranks: int, **options: int) -> Iterable[dict[str, Any]]:
    """Messages by themselves: bytes that a rank sends and seconds of the slowest.

    Args:
        sizes: in fp32 entries, by kind.
        ranks: that take part in a collective.
        options: of the request to the workers.
    """
    for kind, entries in [(kind, entries) for kind, of_kind in sizes.items() for entries in of_kind]:
        request = {"do": "collective", "kind": kind, "entries": entries, **options}
        for index in range(-1, PROBE_ROUNDS):
            seconds = max(answer["seconds"] for answer in group.ask(request))
            if index >= 0:
                yield {"kind": kind, "bytes": sent_in(kind, entries, ranks), "seconds": seconds}


def one_round(group: Group, index: int) -> Iterable[dict[str, Any]]:
    """A step of every method, in an order that turns round."""
    names = list(methods())
    for name in names if index % 2 == 0 else names[::-1]:
        answers = group.ask({"do": "step", "name": name}, network.STEP_SECONDS)
        slowest = max(answers, key=lambda answer: float(answer["seconds"]))
        row = {"method": name, "round": index, "seconds": slowest["seconds"]}
        row |= dict(zip(("forward", "backward", "step"), slowest["moments"], strict=True))
        complete = [at for at, _ in slowest["complete"]]
        yield row | {"complete": " ".join(f"{at:.6f}" for at in complete)}


def compute_of(rounds: pd.DataFrame) -> Compute:
    """Medians of the steps without communication in ``rounds``."""
    own = rounds[rounds["method"] == COMPUTE]
    forward = float(own["forward"].median())
    backward = float((own["backward"] - own["forward"]).median())
    complete = np.median([[float(word) for word in text.split()] for text in own["complete"]], axis=0)
    shares = tuple(float(min(1.0, (at - forward) / backward)) for at in complete)
    rest = float((own["seconds"] - own["backward"]).median())
    return Compute(forward=forward, backward=backward, rest=rest, complete=shares)


def table(found: Measured) -> pd.DataFrame:
    """One row per worker count, limit and method: measured and predicted seconds, and the error of the prediction.

    ``used``: ``calibration`` (no limit, and the step without communication) or ``validation``.
    """
    rows = []
    for workers, of_workers in found.rounds.groupby("workers"):
        probes = found.probes[found.probes["workers"] == workers]
        free = of_workers[of_workers["mbit_per_s"] == FREE]
        at_first, first_links = compute_of(free), links_of(probes[probes["mbit_per_s"] == FREE])
        for rate, part in of_workers.groupby("mbit_per_s"):
            compute, links = compute_of(part), links_of(probes[probes["mbit_per_s"] == rate])
            for name in methods():
                seconds = part[part["method"] == name]["seconds"]
                sent = tuple(tuple(bucket) for bucket in found.sent[int(workers)][name])
                alone = float(free[free["method"] == name]["seconds"].median())
                extra = 0.0 if name == COMPUTE else overhead_of(at_first, sent, first_links, alone)
                used = "calibration" if rate == FREE or name == COMPUTE else "validation"
                rows.append(
                    {"workers": workers, "layout": f"DP{workers}", "mbit_per_s": rate, "micro_batches": 1}
                    | {"method": name, "used": used, "bytes": sum(map(total, sent))}
                    | compared(seconds, predict(compute, sent, links, extra))
                    | {"seconds_compute": compute.forward + compute.backward + compute.rest}
                    | based_on(extra, links[ALL_REDUCE])
                )
    return pd.DataFrame(rows)


def compared(seconds: pd.Series, predicted: float) -> dict[str, float]:
    """Columns of measured and predicted times."""
    error = predicted / float(seconds.median()) - 1
    return {"rounds": len(seconds)} | spread("seconds", seconds) | {"seconds_predicted": predicted, "error": error}


def based_on(overhead: float, link: Link) -> dict[str, float]:
    """Columns of what a prediction was made from, beside the compute."""
    return {"seconds_overhead": overhead, "link_latency": link.latency, "link_bandwidth": link.bandwidth}


def summary(table: pd.DataFrame) -> dict[str, float]:
    """Number of validated configurations, median and largest absolute error of their predictions."""
    errors = table[table["used"] == "validation"]["error"].abs()
    return {"configurations": len(errors), "median_error": errors.median(), "worst_error": errors.max()}
