"""Judgement of tables of runs whether a policy acted, for verdicts and figures.

The rule for one run, and the columns, are those of :mod:`experiments.analyse.acting`.
"""

from __future__ import annotations

import pandas as pd

SEEDS = 2 / 3  # in which a policy has to have acted
NOT_TESTED = "not tested"
COLUMNS = ("ranks_used", "windows_inside", "acted")


def acted(rows: pd.DataFrame) -> bool | None:
    """True if the policy acted in two thirds of these runs, a seed each; None where none of them has a policy."""
    verdicts = _verdicts(rows)
    return sum(verdicts) >= SEEDS * len(verdicts) if verdicts else None


def seeds_acted(rows: pd.DataFrame) -> int | None:
    """Number of these runs in which the policy acted; None where none of them has a policy."""
    verdicts = _verdicts(rows)
    return sum(verdicts) if verdicts else None


def _verdicts(rows: pd.DataFrame) -> list[bool]:
    return [str(value) == "True" for value in rows["acted"] if pd.notna(value) and str(value)]


def account(rows: pd.DataFrame) -> str:
    """Grounds of the judgement of these runs, in words: ranks in use and windows inside the limits, by seed."""
    ranks = ", ".join(f"{value:g}" for value in rows["ranks_used"])
    inside = ", ".join(f"{100 * value:.0f}" for value in rows["windows_inside"])
    return f"ranks used {ranks}, windows inside the limits {inside} % (seeds {', '.join(map(str, rows['seed']))})"


def idle(rows: pd.DataFrame) -> list[str]:
    """Labels of the variants of a table of runs whose policy did not act, in the order of the table."""
    variants = rows.groupby("variant", sort=False)
    return [str(group["label"].iloc[0]) for _, group in variants if acted(group) is False]
