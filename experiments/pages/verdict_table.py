"""The table of verdicts on the paper's claims in README and docs, from ``claims.csv`` and the tables behind it."""

from __future__ import annotations

import functools
import re

from experiments.common.files import ROOT
from experiments.pages.claim_rows import ClaimRow, rows
from experiments.pages.kept import Kept
from experiments.pages.references import BadReference

TITLES = ("claim", "paper", "ours (95 % interval; simulated: range)", "n", "kind", "verdict", "evidence")

DIGITS = re.compile(r"\d+\.\d{2,}")


@functools.lru_cache
def verdict_table(scale: str, page: str = "README.md") -> str:
    """Markdown rows of a scale's ``claims.csv`` in its order.

    Args:
        scale: a folder of ``results/reference``.
        page: the page that holds the table, below the project: links lead from there.

    Raises :class:`~experiments.pages.references.BadReference` where the scale has no claims.
    """
    found = rows(Kept(ROOT / "results" / "reference" / scale, ROOT / page), ())
    if found is None:
        raise BadReference(f"there is no claims.csv at scale {scale}", f"make keep-claims SCALE={scale}")
    lines = [TITLES, ("---",) * len(TITLES), *map(_cells, found)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _cells(row: ClaimRow) -> tuple[str, ...]:
    ours = DIGITS.sub(lambda found: f"{float(found[0]):.3g}", row.ours)
    ours = f"{ours} ({row.interval})" if row.interval else ours
    evidence = f"[{row.study}]({row.evidence.href})" if row.evidence else row.study
    count = f"{row.n}" if row.n else row.counts
    return (row.claim, row.paper, ours or "-", count or "-", row.kind.upper(), f"**{row.verdict}**", evidence)
