"""How long steps of the workflow took, kept per scale, and what that says about the time left.

``results/reference/<scale>/durations.csv`` is the table that a workflow writes to its results folder, kept by
``make reference``; ``make help`` says how long everything takes. ``python -m workflows.durations SECONDS`` adds what
``make test`` took.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import ROOT, atomic_write

COLUMNS = ("rule", "study", "name", "threads", "seconds")
NAME = "durations.csv"
TABLES = "_tables"  # the rule of a study's tables is called <study>_tables
# Kept beside the steps, with the cores of the machine: everything from the start to the end, and all tests.
ALL, TESTS = "all", "tests"


@dataclass(frozen=True)
class Step:
    """One job: its rule, the study and the run, figure or data that it makes ("" where there is none)."""

    rule: str
    study: str = ""
    name: str = ""
    threads: int = 1

    @classmethod
    def of_job(cls, rule: str, wildcards: Mapping[str, Any], threads: int = 1) -> Step:
        """A step from the rule and the wildcards of Snakemake's job."""
        if rule.endswith(TABLES):
            return cls("tables", rule.removesuffix(TABLES), "", threads)
        known = {key: str(value) for key, value in wildcards.items()}
        study = known.pop("study", "")
        return cls(rule, study, "/".join(known[key] for key in sorted(known)), threads)


def read(path: Path) -> dict[Step, float]:
    """Seconds of each step; empty where there is no table.

    Raises:
        UserError: the table is damaged.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            return {
                Step(row["rule"], row["study"], row["name"], int(row["threads"])): float(row["seconds"])
                for row in csv.DictReader(handle)
            }
    except (KeyError, TypeError, ValueError):
        raise UserError("table of durations is damaged", where=path, fix="delete it; it is made again") from None


def write(path: Path, durations: Mapping[Step, float]) -> None:
    """The table, sorted, so that two of them can be compared line by line."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for step in sorted(durations, key=lambda step: (step.rule, step.study, step.name)):
        rows.writerow([step.rule, step.study, step.name, step.threads, f"{durations[step]:.1f}"])
    atomic_write(path, text.getvalue())


def kept(scale: str) -> dict[Step, float]:
    """What is committed of a scale."""
    return read(ROOT / "results" / "reference" / scale / NAME)


class Expected:
    """Seconds that steps take by themselves, from kept ones."""

    def __init__(self, durations: Mapping[Step, float]) -> None:
        self.known = {(step.rule, step.study, step.name): seconds for step, seconds in durations.items()}
        self.rules: dict[str, list[float]] = {}
        for step, seconds in durations.items():
            self.rules.setdefault(step.rule, []).append(seconds)

    def seconds(self, step: Step) -> float | None:
        """Of the step itself, else the median of its rule; None where nothing is known of either."""
        found = self.known.get((step.rule, step.study, step.name))
        if found is None and step.rule in self.rules:
            found = statistics.median(self.rules[step.rule])
        return found


class Estimate:
    """Time left of a workflow whose steps start and end, in seconds of any clock that goes forward.

    The kept seconds of what is left are multiplied by how much longer (or shorter) the steps that have ended here took
    than they did where they were kept, so the first steps correct the estimate on a slower machine. Steps side by side
    share the cores, each as many as it has threads.

    Args:
        steps: all that are to run, by number.
        durations: kept ones; where there are none of a rule, those that end here take their place.
        cores: of this machine; 0 where it does not limit the steps (on a cluster): then the longest one counts.
    """

    def __init__(self, steps: Mapping[int, Step], durations: Mapping[Step, float], cores: int) -> None:
        self.steps, self.cores = dict(steps), cores
        self.expected = Expected(durations)
        self.running: dict[int, float] = {}
        self.took: dict[int, float] = {}
        self.failed: set[int] = set()

    def start(self, number: int, now: float) -> None:
        self.failed.discard(number)
        self.running[number] = now

    def end(self, number: int, now: float, *, failed: bool = False) -> None:
        started = self.running.pop(number, now)
        if failed:
            self.failed.add(number)
        else:
            self.took[number] = max(now - started, 0.0)

    @property
    def done(self) -> int:
        return len(self.took)

    def _typical(self) -> float | None:
        """Of a step whose rule is known neither here nor there: what a rule takes in the median."""
        known = [*self.expected.rules.items(), *self._here().rules.items()]
        medians = [statistics.median(seconds) for rule, seconds in known if rule not in (ALL, TESTS)]
        return statistics.median(medians) if medians else None

    def ratio(self) -> float:
        """Seconds of what has ended here over its kept seconds; 1 before anything has."""
        pairs = [
            (self.took[number], known)
            for number in self.took
            if (known := self.expected.seconds(self.steps[number])) is not None and known > 0
        ]
        here, there = sum(took for took, _ in pairs), sum(known for _, known in pairs)
        return here / there if here > 0 and there > 0 else 1.0

    def _here(self) -> Expected:
        return Expected({self.steps[number]: seconds for number, seconds in self.took.items()})

    def seconds_left(self, now: float) -> float | None:
        """Never negative; None while nothing is known of any step."""
        ratio, here, typical = self.ratio(), self._here(), self._typical()
        total = longest = 0.0
        for number, step in self.steps.items():
            if number in self.took or number in self.failed:
                continue
            known = self.expected.seconds(step)
            seconds = known * ratio if known is not None else here.seconds(step)
            seconds = typical if seconds is None else seconds
            if seconds is None:
                return None
            if number in self.running:
                seconds = max(seconds - (now - self.running[number]), 0.0)
            total += seconds * (min(step.threads, self.cores) / self.cores if self.cores else 0.0)
            longest = max(longest, seconds)
        return max(total, longest)


def add(path: Path, durations: Mapping[Step, float]) -> None:
    """Write steps to the table at ``path``, in place of what it says of the same ones.

    Raises:
        UserError: the table is damaged.
    """
    new = {(step.rule, step.study, step.name) for step in durations}
    old = {step: took for step, took in read(path).items() if (step.rule, step.study, step.name) not in new}
    write(path, old | dict(durations))


@main_guard
def main(
    seconds: Annotated[float, typer.Argument(help="that `make test` took")],
    cores: Annotated[int, typer.Option(help="that tests shared")] = 2,
    scale: Annotated[str, typer.Option(help="file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="folder of all results")] = Path("results"),
) -> None:
    """Note how long all tests took, for `make reference` to keep."""
    add(results / scale / NAME, {Step(TESTS, threads=cores): seconds})


if __name__ == "__main__":
    typer.run(main)
