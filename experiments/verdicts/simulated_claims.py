"""Our values for the claims that can only be simulated, and the sentences about them.

No value of a simulated grid (bandwidth and recorded entropy) stands for the others, so what is told of one is the
range, where the rule holds, and between which bandwidths the paper's number lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from experiments.verdicts.measured import Measured, Place, join, numbers, read

EXPOSED, LATE = "the exposed time", "with warm-up as late as by windows of a twentieth of the run"


def _cluster(root: Path, column: str, readings: Mapping[str, str], table: str, where: Mapping[str, object]) -> Measured:
    """Percent change, a value for each bandwidth and recorded entropy.

    Args:
        readings: columns of other meanings, by what they are.
        table: of the values at the mean rank that is assumed half-way between the limits, ``where`` it has them.
    """
    relative, later = (f"gpt2_12p1b_h100/{name}.csv" for name in ("traces", "traces_late"))
    frame, late = read(root, relative), read(root, later)
    grid = tuple(zip(frame["entropy"].astype(str), frame["gbits_per_second"].astype(float), strict=True))
    medians = (-frame[column]).groupby(frame["entropy"], sort=False).median().sort_values()
    note = join(
        "median over bandwidths " + ", ".join(f"{text} ({names})" for text, names in _alike(
            {str(name): f"{median:.2g}" for name, median in medians.items()}).items()),
        "entropies of uncompressed runs, the rule of stable entropy on: warm-up ends after "
        f"{_percent(frame['share_uncompressed'])} of the run, and by windows of a twentieth of it after "
        f"{_percent(late['share_uncompressed'])}",
    )  # fmt: skip
    counts = {"bandwidths": frame["gbits_per_second"].nunique(), "entropies": frame["entropy"].nunique()}
    rows = read(root, f"gpt2_12p1b_h100/{table}.csv")
    rows = rows[(rows[list(where)] == pd.Series(where)).all(axis=1)]
    assumed = tuple(zip(rows["gbits_per_second"].astype(float), numbers(-rows[column]), strict=True))
    others = {name: numbers(-frame[other]) for name, other in readings.items()} | {LATE: numbers(-late[column])}
    if EXPOSED in readings:
        others[f"{EXPOSED}, {LATE}"] = numbers(-late[readings[EXPOSED]])
    return Measured(
        numbers(-frame[column]), relative, note, "simulated", counts=counts, grid=grid, assumed=assumed,
        readings=others, more_evidence=(later,),
    )  # fmt: skip


def _percent(shares: pd.Series) -> str:
    """``10 to 11 %``, of shares."""
    least, most = (f"{100 * share:.2g}" for share in (shares.min(), shares.max()))
    return f"{least} %" if least == most else f"{least} to {most} %"


def cluster_communication(root: Path) -> Measured:
    """Change of the slowest stage's time for communication under the ranks that EDGC's controller takes.

    The slowest stage counts even where DAC leaves it uncompressed. Beside it stands the other thing that the claim may
    mean: the change of a step's exposed time, that of reductions which nothing hides, compression included.
    """
    readings = {EXPOSED: "reduction_exposed_percent", "compression included": "reduction_with_compress_percent"}
    return _cluster(root, "reduction_communication_percent", readings, "table", {"method": "edgc", "stage": "slowest"})


def cluster_training_time(root: Path) -> Measured:
    """Change of the simulated step under the ranks that EDGC's controller takes, reductions after backward."""
    readings = {"reductions beside backward": "reduction_time_overlap_percent"}
    return _cluster(root, "reduction_time_percent", readings, "steps", {"method": "edgc", "overlap": False})


def extent(values: Sequence[float]) -> str:
    """Range from the most that is saved to the least: ``-40 to -0.47``."""
    return f"{min(values):.4g} to {max(values):.4g}"


def _crossed(points: Sequence[tuple[float, float]], number: float) -> str:
    """Between which neighbouring bandwidths ``number`` lies, in words; ``points`` ascend in the bandwidth."""
    return ", ".join(
        f"between {a:g} and {b:g} Gbit/s"
        for (a, first), (b, second) in pairwise(points)
        if (first - number) * (second - number) <= 0
    )


def _alike(words: Mapping[str, str]) -> dict[str, str]:
    """The names that have the same words, by these, in the order in which they come."""
    names: dict[str, list[str]] = {}
    for name, text in words.items():
        names.setdefault(text, []).append(name)
    return {text: ", ".join(alike) for text, alike in names.items() if text}


def account(measured: Measured, holds: Callable[[float], bool], number: float) -> str:
    """Sentences on where the rule holds, and where ``number`` lies, by recorded entropy; of most other meanings on how
    often it holds."""
    notes = [_account(measured.grid, [float(value) for value in measured.values], holds, number)]
    for name, values in measured.readings.items():
        if name == EXPOSED:
            notes.append(f"of {name}: {_account(measured.grid, values, holds, number)}")
        else:
            notes.append(f"{name} {extent(values)} %, the rule holds for {sum(map(holds, values))} of {len(values)}")
    return join(*notes)


def _account(grid: Sequence[Place], values: Sequence[float], holds: Callable[[float], bool], number: float) -> str:
    points = dict[str, list[tuple[float, float]]]()
    for value, (name, gbits) in sorted(zip(values, grid, strict=True), key=lambda item: item[1][1]):
        points.setdefault(name, []).append((gbits, value))
    points = {name: points[name] for name, _ in grid}
    where = {name: ", ".join(f"{gbits:g}" for gbits, value in row if holds(value)) for name, row in points.items()}
    between = _alike({name: _crossed(row, number) for name, row in points.items()})
    places = ", and ".join(f"{names} at {text} Gbit/s" for text, names in _alike(where).items())
    crossings = ", and ".join(f"{names} {text}" for text, names in between.items())
    note = f"the rule holds for {sum(map(holds, values))} of {len(values)} values" + (f": {places}" if places else "")
    return f"{note}; {number:g} % itself: {crossings or 'at no bandwidth'}"


def at_assumed_rank(measured: Measured, number: float) -> str:
    """The range at the mean rank that is assumed, and where ``number`` lies in it, in words; empty without any."""
    if not measured.assumed:
        return ""
    where = _crossed(sorted(measured.assumed), number) or "at no bandwidth"
    values = extent([value for _, value in measured.assumed])
    return f"at a mean rank assumed half-way {values} %, {number:g} % {where}"
