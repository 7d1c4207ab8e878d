"""Predicted against measured steps of two pipeline stages with two replicas each, every rank on a host of the testbed.

Megatron trains; activations and gradients share the limited cable of their host. Calibrated without a limit at two
numbers of micro-batches; predicted under limits at others. Of a limited link nothing is used but messages timed by
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from scipy.optimize import brentq

from experiments.bench import stages
from experiments.bench.collectives import ALL_REDUCE, KINDS, SEND, Sent, total
from experiments.bench.options import at_least, check_rates
from experiments.bench.pipeline_model import Compute, Traffic, predict
from experiments.bench.step_model import Links, links_of
from experiments.bench.steps import FREE, based_on, compared, probe
from experiments.bench.testbed import Testbed

STAGES, REPLICAS = 2, 2
LAYOUT = f"DP{REPLICAS} x PP{STAGES}"
VOCABULARY = 256  # of the worker's text
WARM_UP = 2  # iterations that are not counted
SECONDS = 600.0
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


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    rates: tuple[float, ...] = (20.0, 50.0, 200.0)  # limits in Mbit/s
    micro_batches: tuple[int, ...] = (2, 8)  # of a replica in a step, to be predicted
    rounds: int = 9  # counted iterations of each run
    layers: int = 4
    hidden: int = 128
    sequence: int = 64
    micro_batch: int = 2

    def __post_init__(self) -> None:
        at_least(1, repeats=self.rounds)
        at_least(STAGES, micro_batches=self.micro_batches)
        check_rates(self.rates)

    @property
    def configurations(self) -> list[tuple[float, int, str]]:
        """Limit, micro-batches and method of every run, those that calibrate first."""
        free = [(FREE, count, name) for count in CALIBRATED for name in METHODS]
        limited = [(rate, count, name) for rate in self.rates for count in self.micro_batches for name in METHODS]
        return [*free, *limited]


@dataclass(frozen=True)
class Measured:
    """``rounds``: a row per configuration and counted iteration; ``probes``: per timed message; ``sent``: per method
    and stage what a rank sends, collective by collective."""

    rounds: pd.DataFrame
    probes: pd.DataFrame
    sent: dict[str, list[list[Sent]]]


def settings(plan: Plan, method: str, micro_batches: int) -> dict[str, Any]:
    """A run, as :class:`experiments.spec.settings.RunConfig` takes it."""
    model = {"layers": plan.layers, "hidden": plan.hidden, "sequence_length": plan.sequence}
    train = {"iterations": WARM_UP + plan.rounds, "micro_batch": plan.micro_batch}
    train |= {"global_batch": plan.micro_batch * micro_batches * REPLICAS}
    parallel = {"pipeline": STAGES, "data": REPLICAS}
    return stages.run_settings("pipeline_steps", method, model, parallel, train, METHODS[method])


def measure(plan: Plan, advance: Callable[[str], None]) -> Measured:
    """Run everything in a testbed of its own. UserError if none can be made."""
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    sent: dict[str, list[list[Sent]]] = {}
    limit = None
    world = STAGES * REPLICAS
    with Testbed(world) as testbed, stages.ranks(world, testbed) as group:
        for rate, count, name in plan.configurations:
            if rate != limit:
                testbed.limit(rate or None)
                limit = rate
                probes += [{"mbit_per_s": rate} | row for row in probe(group, PROBES, REPLICAS, stages=STAGES)]
            request = {"do": "train", "run": settings(plan, name, count), "bandwidths": [None] * STAGES}
            answers = group.ask(request, SECONDS)
            at = {"mbit_per_s": rate, "micro_batches": count, "method": name}
            rounds += [at | row for row in _rounds(answers)]
            if rate == FREE:
                sent[name] = [
                    next(a["iterations"][-1]["messages"] for a in answers if a["stage"] == stage)
                    for stage in range(STAGES)
                ]
            advance(f"{LAYOUT}, {rate:g} Mbit/s, {name}")
    return Measured(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


def _rounds(answers: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The slowest rank's seconds of every counted iteration, and per stage the median time of a micro-batch."""
    for index in range(WARM_UP, len(answers[0]["iterations"])):
        found = [(answer["stage"], answer["iterations"][index]) for answer in answers]
        row: dict[str, Any] = {"round": index - WARM_UP, "seconds": max(one["seconds"] for _, one in found)}
        for kind, stage in itertools.product(("forward", "backward"), range(STAGES)):
            spans = [span for at, one in found if at == stage for span in one["spans"]]
            times = [end - start for name, start, end in spans if name == f"{kind}-compute"]
            row[f"{kind}_{stage}"] = float(pd.Series(times).median())
        yield row


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
    uncompressed = seconds.loc["none"]
    rest = [float(uncompressed[count]) - predict(full, traffic, links, count) for count in CALIBRATED]
    return replace(full, rest=max(0.0, sum(rest) / len(rest)))


def overhead(rounds: pd.DataFrame, compute: Compute, traffic: Traffic, links: Links) -> float:
    """What a method adds to its steps in ``rounds`` beyond its messages; the mean over :data:`CALIBRATED`."""
    seconds = rounds.groupby("micro_batches")["seconds"].median()
    extra = [float(seconds[count]) - predict(compute, traffic, links, count) for count in CALIBRATED]
    return max(0.0, sum(extra) / len(extra))


def table(plan: Plan, found: Measured) -> pd.DataFrame:
    """One row per limit, number of micro-batches and method, with the columns of :func:`experiments.bench.steps.table`.

    ``used``: ``calibration`` (no limit) or ``validation``.
    """
    # fp32 activations; the ring of the two end stages' embeddings has two ranks.
    activations = 4.0 * plan.sequence * plan.micro_batch * plan.hidden
    embedding = 4.0 * VOCABULARY * plan.hidden
    traffic = {
        name: Traffic(activations=activations, sent=tuple(map(tuple, sent)), embedding=embedding)
        for name, sent in found.sent.items()
    }
    free = found.rounds[found.rounds["mbit_per_s"] == FREE]
    without = links_of(found.probes[found.probes["mbit_per_s"] == FREE])
    compute = compute_of(free, traffic["none"], without)
    extra = {str(name): overhead(part, compute, traffic[str(name)], without) for name, part in free.groupby("method")}
    rows = []
    for (rate, count, name), part in found.rounds.groupby(["mbit_per_s", "micro_batches", "method"], sort=False):
        links = links_of(found.probes[found.probes["mbit_per_s"] == rate])
        silent = replace(traffic[name], sent=((),) * STAGES, embedding=0.0)
        rows.append(
            {"workers": STAGES * REPLICAS, "layout": LAYOUT, "mbit_per_s": rate, "micro_batches": count, "method": name}
            | {"used": "calibration" if rate == FREE else "validation", "bytes": max(map(total, traffic[name].sent))}
            | compared(part["seconds"], predict(compute, traffic[name], links, int(count), extra[name]))
            | {"seconds_compute": predict(compute, silent, links, int(count))}
            | based_on(extra[name], links[ALL_REDUCE])
        )
    return pd.DataFrame(rows)
