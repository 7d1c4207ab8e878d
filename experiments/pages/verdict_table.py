"""The table of verdicts on the paper's claims in README and docs, from ``claims.csv`` and the tables behind it."""

from __future__ import annotations

import functools
from pathlib import PurePosixPath

from experiments.common.files import ROOT
from experiments.pages.claim_rows import ClaimRow, rows
from experiments.pages.kept import Kept
from experiments.pages.references import BadReference

TITLES = ("claim", "verdict", "paper", "ours (95 % interval, or range)", "n", "kind", "evidence")


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
    ours = f"{row.ours} ({row.interval})" if row.interval else row.ours
    # The first by its name, others by their number: five names would make the column the widest of all.
    names = [PurePosixPath(link.name).parent.name if k == 1 else str(k) for k, link in enumerate(row.evidence, 1)]
    links = [f"[{name}]({link.href})" for name, link in zip(names, row.evidence, strict=True)]
    evidence = ", ".join(links or row.studies)
    count = row.n or row.counts
    return (row.claim, f"**{row.verdict}**", row.paper, ours or "-", count or "-", row.kind.upper(), evidence)
