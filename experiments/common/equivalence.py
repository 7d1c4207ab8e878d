"""Two one-sided t tests: that a difference is smaller than a margin, which no test of "no difference" can show."""

from __future__ import annotations


def equivalence_p(centre: float, error: float, margin: float, freedom: float) -> float:
    """The larger p value of two one-sided t tests: of a gap at most -margin, and of one at least margin.

    Below a level a, the 1 - 2a t interval of the gap lies inside the margin (Schuirmann, 1987).
    """
    from scipy import stats

    if error == 0:
        return 0.0 if abs(centre) < margin else 1.0
    return float(stats.t.sf((margin - abs(centre)) / error, freedom))
