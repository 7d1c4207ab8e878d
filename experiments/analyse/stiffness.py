"""How far CQM moves the rank for a small change of entropy, beside the noise of the entropy that it follows.

CQM keeps sigma g(r): with the entropy changed by d nats the rank goes from r to the r' with g(r') = exp(-d) g(r). Near
r = 0 that is 2 p / (1 + sqrt(lambda))^2 ranks per nat, p the smaller side and lambda = p / larger side; further on
more, since the directions that are still to be dropped hold less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.rank_model import StageModel, error, next_rank
from edgc.control.settings import PolicyConfig
from edgc.entropy.sampler import Sampler
from experiments.analyse.runs import Run

SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the smaller side: the ranks that are looked at
LARGE = ((1024, 1024), (4096, 4096))
LARGE_RANK = 64
LOWEST = 0.25  # r_min as a share of r_max, EDGC's default
STEP = 1e-4  # nats, of the numerical derivative
POINTS = 101  # of a curve
LEAST_WINDOWS = 3

Shape = tuple[int, int]


def stiffness(runs: Sequence[Run], reference: float) -> list[dict[str, Any]]:
    """A row per shape of the runs' matrices and of ``LARGE``, and rank.

    ``ranks_per_nat`` is the derivative of CQM's rank, ``limit_ranks_per_nat`` its value at rank 0, ``saturates_nats``
    by how much the entropy falls until CQM asks for ``LOWEST`` of the rank. ``noise_nats`` is the standard deviation of
    the mean entropy of a window (:func:`noise`) and ``moved_nats`` how far it went over the run, both medians over
    finished runs and stages; the same in every row.
    """
    measured = [pair for run in runs if run.ok for pair in noise(run)] or [(math.nan, math.nan)]
    noise_nats, moved_nats = np.median(measured, axis=0).tolist()
    rows = []
    for shape, count in [*_shapes(runs).items(), *((shape, 0) for shape in LARGE)]:
        p, large = min(shape), max(shape)
        used = float(min(reference, p) if count else LARGE_RANK)
        for rank in sorted({p * share for share in SHARES} | ({used} if math.isfinite(used) else set())):
            rate, saturation = per_nat(shape, rank), saturates(shape, rank)
            rows.append(
                {"rows": shape[0], "columns": shape[1], "matrices": count, "rank": rank, "in_use": rank == used}
                | {"ranks_per_nat": rate, "limit_ranks_per_nat": 2 * p / (1 + math.sqrt(p / large)) ** 2}
                | {"saturates_nats": saturation, "noise_nats": noise_nats, "moved_nats": moved_nats}
                | {"noise_ranks": noise_nats * rate, "noise_over_saturation": noise_nats / saturation}
            )
    return rows


def per_nat(shape: Shape, rank: float) -> float:
    """Derivative of CQM's rank by the entropy, in ranks per nat."""
    stage = StageModel([shape])
    return (next_rank(stage, rank, 0.0, STEP) - next_rank(stage, rank, 0.0, -STEP)) / (2 * STEP)


def saturates(shape: Shape, rank: float) -> float:
    """Fall of the entropy (nats) at which CQM asks for ``LOWEST`` of ``rank``."""
    return math.log(error(*shape, LOWEST * rank) / error(*shape, rank))


def noise(run: Run) -> list[tuple[float, float]]:
    """Per stage: standard deviation of a window's mean entropy around its trend, and |last - first window|, in nats.

    The mean is the one that the controller would get from all entries at the iterations that GDS measures, over the
    windows after warm-up. Second differences of the means are free of a linear trend; for independent noise their
    mean square is six times its variance. Stages with too few windows are left out.
    """
    settings, frame = run.edgc, run.stages.dropna(subset="entropy_full")
    frame = frame[frame["iteration"].astype(int).map(Sampler(settings.entropy).measures).astype(bool)]
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // settings.window)
    # Of a run without compression: as EDGC would have it.
    warm_up = (settings if isinstance(settings, PolicyConfig) else PolicyConfig).warmup_fraction
    first, last = warm_up * run.iterations / settings.window, run.iterations // settings.window - 1
    measured = []
    for _, stage in frame[frame["window"].between(first, last)].groupby("stage"):
        means = stage.groupby("window")["entropy_full"].mean().to_numpy()
        if len(means) >= LEAST_WINDOWS:
            bends = np.diff(means, 2)
            measured.append((math.sqrt(float((bends**2).mean()) / 6), abs(float(means[-1] - means[0]))))
    return measured


def rank_curves(runs: Sequence[Run], reference: float) -> pd.DataFrame:
    """CQM's rank against the change of entropy, for the commonest shape of the runs and the two of ``LARGE``.

    From the rank in use, or ``LARGE_RANK``; no limits and no rounding.
    """
    shapes = _shapes(runs)
    sizes = [(shape, float(LARGE_RANK)) for shape in LARGE]
    if shapes and math.isfinite(reference):
        commonest = max(shapes, key=lambda shape: (shapes[shape], shape[0] * shape[1]))
        sizes.insert(0, (commonest, min(reference, *commonest)))
    widest = 1.25 * max(saturates(shape, rank) for shape, rank in sizes)
    rows = [
        (*shape, rank, change, next_rank(StageModel([shape]), rank, 0.0, change))
        for shape, rank in sizes
        for change in np.linspace(-widest, widest, POINTS)
    ]
    return pd.DataFrame(rows, columns=["rows", "columns", "rank_start", "change_nats", "rank"])


def _shapes(runs: Sequence[Run]) -> dict[Shape, int]:
    """Shapes of the probed matrices and how many of each the model has, large ones last."""
    spectra = next((run.spectra for run in runs if not run.spectra.empty), None)
    if spectra is None:
        return {}
    counts = spectra.drop_duplicates(["stage", "parameter"]).groupby(["rows", "columns"]).size()
    return {(int(m), int(n)): int(counts[m, n]) for m, n in sorted(counts.index, key=lambda s: s[0] * s[1])}
