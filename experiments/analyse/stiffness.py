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


def stiffness(runs: Sequence[Run], reference: float) -> list[dict[str, Any]]:
    """A row per shape of the runs' matrices and of ``LARGE``, and rank.

    ``ranks_per_nat`` is the derivative of CQM's rank, ``limit_ranks_per_nat`` its value at rank 0, ``saturates_nats``
    by how much the entropy falls until CQM asks for ``LOWEST`` of the rank. ``noise_nats`` is the standard deviation of
    the mean entropy of a window (:func:`noise`) and ``moved_nats`` how far it went over the run, both medians over
    finished runs and stages; the same in every row.
    """
    fine = [run for run in runs if run.ok]
    measured = [pair for run in fine for pair in noise(run)]
    middle = np.median(measured, axis=0).tolist() if measured else [math.nan, math.nan]
    measure = dict(zip(("noise_nats", "moved_nats"), middle, strict=True))
    rows = []
    for shape, count in [*_shapes(runs).items(), *((shape, 0) for shape in LARGE)]:
        p, large = min(shape), max(shape)
        used = min(reference, p) if count else LARGE_RANK
        ranks = {p * share for share in SHARES} | ({float(used)} if math.isfinite(used) else set())
        for rank in sorted(ranks):
            rate, saturation = per_nat(shape, rank), saturates(shape, rank)
            row = {"rows": shape[0], "columns": shape[1], "matrices": count, "rank": rank, "in_use": rank == used}
            row |= {"ranks_per_nat": rate, "limit_ranks_per_nat": 2 * p / (1 + math.sqrt(p / large)) ** 2}
            row |= {"saturates_nats": saturation} | measure | {"noise_ranks": measure["noise_nats"] * rate}
            rows.append(row | {"noise_over_saturation": measure["noise_nats"] / saturation})
    return rows


def per_nat(shape: tuple[int, int], rank: float) -> float:
    """Derivative of CQM's rank by the entropy, in ranks per nat."""
    stage = StageModel([shape])
    return (next_rank(stage, rank, 0.0, STEP) - next_rank(stage, rank, 0.0, -STEP)) / (2 * STEP)


def saturates(shape: tuple[int, int], rank: float) -> float:
    """Fall of the entropy (nats) at which CQM asks for ``LOWEST`` of ``rank``."""
    return math.log(error(*shape, LOWEST * rank) / error(*shape, rank))


def noise(run: Run) -> list[tuple[float, float]]:
    """Per stage: standard deviation of a window's mean entropy around its trend, and |last - first window|, in nats.

    The mean is the one that the controller would get from all entries at the iterations that GDS measures, over the
    windows after warm-up. Second differences of the means are free of a linear trend; for independent noise their
    mean square is six times its variance. Stages with too few windows are left out.
    """
    settings = run.edgc
    window, sampler, frame = settings.window, Sampler(settings.entropy), run.stages
    measured = frame["iteration"].astype(int).map(sampler.measures).astype(bool)
    frame = frame[measured & frame["entropy_full"].notna()]
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // window)
    # Of a run without compression: as EDGC would have it.
    warm_up = (settings if isinstance(settings, PolicyConfig) else PolicyConfig).warmup_fraction
    whole = frame["window"].between(warm_up * run.iterations / window, run.iterations // window - 1)
    found = []
    for _, stage in frame[whole].groupby("stage"):
        means = stage.groupby("window")["entropy_full"].mean().to_numpy()
        if len(means) >= LEAST_WINDOWS:
            bends = np.diff(means, 2)
            found.append((math.sqrt(float((bends**2).mean()) / 6), abs(float(means[-1] - means[0]))))
    return found


def curves(runs: Sequence[Run], reference: float) -> pd.DataFrame:
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


def _shapes(runs: Sequence[Run]) -> dict[tuple[int, int], int]:
    """Shapes of the probed matrices and how many of each the model has, large ones last."""
    spectra = next((run.spectra for run in runs if not run.spectra.empty), pd.DataFrame())
    if spectra.empty:
        return {}
    matrices = spectra.drop_duplicates(["stage", "parameter"])
    counts = matrices.groupby(["rows", "columns"]).size()
    return {(int(m), int(n)): int(counts[m, n]) for m, n in sorted(counts.index, key=lambda s: s[0] * s[1])}
