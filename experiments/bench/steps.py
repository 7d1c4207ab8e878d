"""Compare predicted with measured training steps over limited links (root only): steps.csv, steps_rounds.csv,
steps_probes.csv, steps.json.

Nothing that a limit slows down is used for its prediction but collectives timed by themselves. In a round every method
trains one step, as in :mod:`experiments.bench.network`; the first rounds are without a limit and tell what a method
costs beside its messages, and the step without communication, with the moment at which each bucket is complete, is
timed in every round. The model is :mod:`experiments.simulation.iteration_model`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field
from scipy.optimize import brentq

from experiments.bench import collectives, network, terminal
from experiments.bench.collectives import ALL_REDUCE, KINDS, bytes_sent, total_bytes
from experiments.bench.gpt import Options, Size
from experiments.bench.terminal import ROUNDS, Positive, Rate, Say, schedule, spread
from experiments.bench.testbed import Testbed
from experiments.bench.workers import Group, ranks
from experiments.simulation.iteration_model import CORE_SHARE, Bucket, Stage, iterate

ON_TESTBED = True
SHOWN = "workers mbit_per_s method used seconds seconds_predicted error"
COMPUTE = "compute"
METHODS: dict[str, Options] = {
    COMPUTE: {"hook": "compute"},
    "none": {"hook": "dense"},
    "bf16": {"hook": "bf16"},
    **{f"powersgd_r{rank}": {"hook": "edgc", "rank": rank, "factor_dtype": "fp32"} for rank in (4, 32, 128)},
    "powersgd_r32_int8": {"hook": "edgc", "rank": 32, "factor_dtype": "int8"},
    "powersgd_r64_int4": {"hook": "edgc", "rank": 64, "factor_dtype": "int4"},
    "int8": {"hook": "edgc", "method": "quantize", "bits": 8},
    "int4": {"hook": "edgc", "method": "quantize", "bits": 4},
    "topk": {"hook": "edgc", "method": "topk", "density": 0.01},
}
# fp32 entries of the collectives that tell what a link does.
PROBES = (1 << 16, 1 << 18, 1 << 20, 3 << 20)
PROBE_ROUNDS = 5  # gloo's exchanges take one of two times, so some are needed for the median
FREE = 0.0  # no limit, in the tables
SHARES = tuple(round(0.05 * step, 2) for step in range(6, 21))  # that are tried where CORE_SHARE is fitted


class Plan(terminal.Plan):
    """Settings of the benchmark."""

    workers: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (2, 4), description="numbers of data-parallel workers, with commas"
    )
    rates: tuple[Rate, ...] = Field((100.0, 300.0, 1000.0), description="limits in Mbit/s, with commas")
    rounds: Positive = ROUNDS
    threads: int = 1  # of each worker
    size: Size = Size(sequence=128, batch=2)


@dataclass(frozen=True)
class Measurements:
    """Rounds and probes of a benchmark that predicts steps.

    Attributes:
        rounds: a row per worker count, limit, method and round.
        probes: a row per timed collective.
        sent: messages of a rank, by number of workers (as JSON has it) and method, per bucket.
    """

    rounds: pd.DataFrame
    probes: pd.DataFrame
    sent: dict[str, Any]


def read(path: Path, record: Mapping[str, Any]) -> Measurements:
    """Measurements of an earlier time, from the tables beside their ``record`` in ``path``."""
    rounds, probes = (pd.read_csv(path.with_name(f"{path.stem}_{part}.csv")) for part in ("rounds", "probes"))
    return Measurements(rounds.fillna({"complete": ""}), probes, record["sent"])


def measure(plan: Plan, folder: Path, say: Say) -> Measurements:
    """Run everything in testbeds of its own. UserError if none can be made."""
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    sent: dict[str, Any] = {}
    for workers in plan.workers:
        start: dict[str, Any] = {"threads": plan.threads, "size": plan.size}
        with Testbed(workers) as testbed, ranks(network.Rank, workers, testbed=testbed, **start) as group:
            for name, options in METHODS.items():
                group.ask("prepare", within=network.STEP_SECONDS, name=name, options=options)
            sent[str(workers)] = messages(group, workers)
            for rate in (FREE, *plan.rates):
                say(f"{workers} workers, {network.limit_name(rate)}")
                testbed.limit(rate or None)
                place = {"workers": workers, "mbit_per_s": rate}
                probes += [place | row for row in probe(group, workers)]
                for index, order in schedule(list(METHODS), plan.rounds):
                    steps = [place | one_step(group, index, name) for name in order]
                    rounds += steps if index >= 0 else []
    return Measurements(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


def messages(group: Group, workers: int) -> dict[str, list[list[collectives.Message]]]:
    """Messages of each method, by its own count; of torch's all-reduces by the formula of the ring."""
    ready = group.ask("step", within=network.STEP_SECONDS, name=COMPUTE)[0]["complete"]
    sent: dict[str, list[list[collectives.Message]]] = {COMPUTE: [[] for _ in ready]}
    for name, options in METHODS.items():
        if options["hook"] == "edgc":
            sent[name] = group.ask("messages", within=network.STEP_SECONDS, name=name)[0]
        elif name != COMPUTE:
            share = 0.5 if options["hook"] == "bf16" else 1.0
            sent[name] = [[(ALL_REDUCE, share * bytes_sent(ALL_REDUCE, entries, workers))] for _, entries in ready]
    return sent


def probe(group: Group, workers: int) -> Iterable[dict[str, Any]]:
    """Collectives by themselves: bytes that a rank sends and seconds of the slowest."""
    for kind, entries in itertools.product(KINDS, PROBES):
        for index in range(-1, PROBE_ROUNDS):
            answers = group.ask("collective", kind=kind, entries=entries)
            if index >= 0:
                seconds = max(answer["seconds"] for answer in answers)
                yield {"kind": kind, "bytes": bytes_sent(kind, entries, workers), "seconds": seconds}


def one_step(group: Group, index: int, name: str) -> dict[str, Any]:
    """A step of a method, of the slowest rank."""
    answers = group.ask("step", within=network.STEP_SECONDS, name=name)
    slowest = max(answers, key=lambda answer: float(answer["seconds"]))
    row = {"method": name, "round": index, "seconds": slowest["seconds"]}
    row |= dict(zip(("forward", "backward", "step"), slowest["moments"], strict=True))
    return row | {"complete": " ".join(f"{moment:.6f}" for moment, _ in slowest["complete"])}


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication.

    Attributes:
        forward, backward, rest: seconds; the rest is the optimizer.
        complete: per bucket, the share of backward after which its gradients are complete, in (0, 1].
    """

    forward: float
    backward: float
    rest: float
    complete: tuple[float, ...]


@dataclass(frozen=True)
class Link:
    """A collective of one kind, by timed ones.

    Attributes:
        points: (bytes that a rank sends, seconds), ascending in the bytes, which begin at 0. Between them a line, and
            beyond the last the line through the last two. One line through all would not do: a limit lets the first
            bytes of a message through at once (:func:`experiments.bench.testbed.burst`), so large ones are slower.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def through(cls, probes: Iterable[tuple[float, float]], latency: float = 0.0) -> Link:
        """The link through timed (bytes, seconds), of which nothing takes ``latency`` seconds, but at most as long as
        the fewest bytes."""
        timed = sorted(probes)
        return cls(((0.0, min(latency, timed[0][1])), *timed))

    def seconds(self, sent: float) -> float:
        """Seconds of a message of so many bytes."""
        sizes = [size for size, _ in self.points[1:-1]]
        place = bisect_left(sizes, sent)
        (low, first), (high, second) = self.points[place : place + 2]
        return first + (second - first) * (sent - low) / (high - low)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of what a message has more than the largest that was timed."""
        (low, first), (high, second) = self.points[-2:]
        return (high - low) / (second - first)


Links = Mapping[str, Link]  # by kind of message
Messages = Sequence[Sequence[collectives.Message]]  # per bucket or stage, what a rank sends, collective by collective


def links_of(probes: pd.DataFrame, rate: float) -> dict[str, Link]:
    """Links by kind at a limit from timed collectives (columns ``mbit_per_s``, ``kind``, ``bytes``, ``seconds``);
    medians of each size count, and the latency is that of a line through those without a limit, which have no burst."""
    medians = probes.groupby(["mbit_per_s", "kind", "bytes"])["seconds"].median()
    kinds = medians.index.unique("kind")
    return {str(kind): Link.through(medians[rate, kind].items(), latency(medians[FREE, kind])) for kind in kinds}


def latency(timed: pd.Series) -> float:
    """Seconds of nothing, not negative: the line through (bytes, seconds) with the least relative errors."""
    matrix = np.stack([1 / timed, timed.index / timed], axis=1)
    found, _ = np.linalg.lstsq(matrix, np.ones(len(timed)), rcond=None)[0]
    return max(0.0, float(found))


def messages_of(sent: Iterable[collectives.Message], links: Links) -> tuple[tuple[float, float], ...]:
    """One bucket's messages as :class:`~experiments.simulation.iteration_model.Bucket` has them."""
    return tuple((0.0, links[kind].seconds(size)) for kind, size in sent if size)


def predict(
    compute: Compute, sent: Messages, links: Links, overhead: float = 0.0, core_share: float = CORE_SHARE
) -> float:
    """Seconds of a step.

    Args:
        sent: per bucket, in the order in which they are complete.
        overhead: seconds of the processor in a step, beside the compute. They are spread over the buckets as these
            were cut, and within a bucket evenly: before its messages, between them (a second factor is computed from
            the mean of the first) and after them. What comes before and between delays backward.
        core_share: as of :func:`~experiments.simulation.iteration_model.iterate`.
    """
    shares = np.diff([0.0, *compute.complete])
    buckets = []
    for complete, share, bucket in zip(compute.complete, shares, sent, strict=True):
        messages = messages_of(bucket, links)
        part = overhead * share / compute.complete[-1] / (len(messages) + 1)
        behind = part if messages else 0.0
        buckets.append(Bucket(share=complete, compress=part, between=part, decompress=behind, messages=messages))
    stage = Stage(forward=compute.forward, backward=compute.backward, buckets=tuple(buckets))
    return iterate((stage,), 1, overlap=True, after=compute.rest, one_machine=True, core_share=core_share).seconds


def overhead_of(
    compute: Compute, sent: Messages, links: Links, seconds: float, core_share: float = CORE_SHARE
) -> float:
    """Seconds that a method adds to a step of ``seconds`` over ``links`` beyond its messages; not negative."""

    def missing(overhead: float) -> float:
        return seconds - predict(compute, sent, links, overhead, core_share)

    if missing(0.0) <= 0:
        return 0.0
    most = seconds
    while missing(most) > 0:  # where all but the last part of it is hidden behind messages
        most *= 2
    return float(brentq(missing, 0.0, most))


def compute_of(rounds: pd.DataFrame) -> Compute:
    """Medians of the steps without communication in ``rounds``."""
    alone = rounds[rounds["method"] == COMPUTE]
    forward = float(alone["forward"].median())
    backward = float((alone["backward"] - alone["forward"]).median())
    complete = np.median([[float(word) for word in text.split()] for text in alone["complete"]], axis=0)
    shares = tuple(float(min(1.0, (moment - forward) / backward)) for moment in complete)
    rest = float((alone["seconds"] - alone["backward"]).median())
    return Compute(forward=forward, backward=backward, rest=rest, complete=shares)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A number of workers, a limit and a method.

    Attributes:
        compute, links: at the limit, and ``free_`` of both without one.
        sent: messages of a rank, per bucket.
        alone: seconds of a step without a limit.
        seconds: of the measured steps.
    """

    workers: int
    rate: float
    method: str
    compute: Compute
    links: Links
    free_compute: Compute
    free_links: Links
    sent: Messages
    alone: float
    seconds: pd.Series

    @property
    def validates(self) -> bool:
        """True if nothing of it was used for its prediction."""
        return self.rate != FREE and self.method != COMPUTE

    def predicted(self, core_share: float = CORE_SHARE) -> tuple[float, float]:
        """(Seconds that the method adds beside its messages, seconds of a step)."""
        extra = 0.0
        if self.method != COMPUTE:
            extra = overhead_of(self.free_compute, self.sent, self.free_links, self.alone, core_share)
        return extra, predict(self.compute, self.sent, self.links, extra, core_share)


def configurations(data: Measurements) -> Iterator[Configuration]:
    """Configurations that were measured."""
    for workers, rounds in data.rounds.groupby("workers"):
        probes = data.probes[data.probes["workers"] == workers]
        free = rounds[rounds["mbit_per_s"] == FREE]
        free_compute, free_links = compute_of(free), links_of(probes, FREE)
        for rate, part in rounds.groupby("mbit_per_s"):
            compute, links = compute_of(part), links_of(probes, float(rate))
            for name in METHODS:
                yield Configuration(
                    workers=int(workers), rate=float(rate), method=name, sent=data.sent[str(workers)][name],
                    compute=compute, links=links, free_compute=free_compute, free_links=free_links,
                    alone=float(free[free["method"] == name]["seconds"].median()),
                    seconds=part[part["method"] == name]["seconds"],
                )  # fmt: skip


def tables(plan: Plan, data: Measurements) -> dict[str, pd.DataFrame]:
    """One row per worker count, limit and method: measured and predicted seconds, and the error of the prediction; the
    rounds and the probes.

    ``used``: ``calibration`` (no limit, and the step without communication) or ``validation``.
    """
    rows = []
    for case in configurations(data):
        extra, predicted = case.predicted()
        compute = case.compute
        rows.append(
            {"workers": case.workers, "layout": f"DP{case.workers}", "mbit_per_s": case.rate, "micro_batches": 1}
            | {"method": case.method, "used": "validation" if case.validates else "calibration"}
            | {"bytes": sum(map(total_bytes, case.sent))}
            | compared(case.seconds, predicted)
            | {"seconds_compute": compute.forward + compute.backward + compute.rest, "seconds_overhead": extra}
            | {"link_bandwidth": case.links[ALL_REDUCE].bandwidth}
        )
    return {"steps": pd.DataFrame(rows), "steps_rounds": data.rounds, "steps_probes": data.probes}


def compared(seconds: pd.Series, predicted: float) -> dict[str, float]:
    """Columns of measured and predicted times."""
    error = predicted / float(seconds.median()) - 1
    return {"rounds": len(seconds)} | spread("seconds", seconds) | {"seconds_predicted": predicted, "error": error}


def record(data: Measurements, table: pd.DataFrame) -> dict[str, Any]:
    """Messages of every method; number of validated configurations, median and largest absolute error of their
    predictions; and how these come out where :data:`CORE_SHARE` is fitted to others."""
    return {"sent": data.sent, "summary": summary(table), "held_out": held_out(data)}


def summary(table: pd.DataFrame) -> dict[str, float]:
    """Number of validated configurations, median and largest absolute error of their predictions."""
    errors = table[table["used"] == "validation"]["error"].abs()
    return {"configurations": len(errors), "median_error": errors.median(), "worst_error": errors.max()}


def held_out(data: Measurements) -> dict[str, dict[str, float]]:
    """By number of workers: the ``core_share`` that leaves the steps of the other numbers of workers with the least
    median error, and with it the share of its own steps that took longer than predicted, and their median absolute
    error. Of one number of workers alone nothing is held out."""
    cases = [(case, float(case.seconds.median())) for case in configurations(data) if case.validates]
    errors = pd.DataFrame(
        {share: [case.predicted(share)[1] / seconds - 1 for case, seconds in cases] for share in SHARES},
        index=[case.workers for case, _ in cases],
    )
    found = {}
    for workers in errors.index.unique() if errors.index.nunique() > 1 else ():
        best = errors.drop(workers).median().abs().idxmin()
        own = errors.loc[workers, best]
        found[str(workers)] = {"core_share": float(best), "low": (own < 0).mean(), "median_error": own.abs().median()}
    return found
