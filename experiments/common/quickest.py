"""Times of the seed in which a rank was quickest: a run that shared its machine tells of that, not of the rank."""

from __future__ import annotations

import pandas as pd


def least(times: pd.DataFrame, seconds: pd.Series) -> pd.DataFrame:
    """Of each stage and rank the row of the seed that took least: other work on the machine only adds time.

    Args:
        times: a row per stage and run, with columns ``stage`` and ``rank`` (nan: uncompressed).
        seconds: what each row took.
    """
    return times.loc[seconds.groupby([times["stage"], times["rank"]], dropna=False).idxmin().sort_values()]


def quickest(timings: pd.DataFrame) -> pd.DataFrame:
    """The rows of the seed whose median total was the least, for each stage and rank (:func:`least`)."""
    total = timings[timings["kind"] == "total"]
    keys = ["stage", "variant", "seed"]
    return timings.merge(least(total, total["seconds_median"])[keys], on=keys)
