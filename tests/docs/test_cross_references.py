"""Files that README and docs name are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"`((?:edgc|experiments|paper_figures|tests|workflows)/[\w./*<>]+)`")
# CONTRIBUTING.md tells how to make them (tests/workflow/test_contributing.py does it); the last is another project's.
EXAMPLES = {"experiments/scales/small.yaml", "experiments/studies/two_ranks.yaml", "paper_figures/validation_loss.py"}
EXAMPLES |= {"tests/unit_tests"}


def test_the_files_that_a_page_names_exist() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named = set(OURS.findall(page.read_text(encoding="utf-8"))) - EXAMPLES
        missing = [name for name in sorted(named) if "<" not in name and not any(ROOT.glob(name.rstrip("/")))]
        assert not missing, f"{page.name} names {missing}"
