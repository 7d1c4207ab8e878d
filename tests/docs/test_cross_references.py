"""Cross references in docstrings, and files that README and docs name, lead to something that is there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edgc", "experiments", "paper_figures", "workflows")
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`[~.]?([\w.]+)`")
OURS = re.compile(r"`((?:edgc|experiments|paper_figures|tests|workflows)/[\w./*<>]+)`")
# CONTRIBUTING.md tells how to make them (tests/workflow/test_contributing.py does it); the last is another project's.
EXAMPLES = {"experiments/scales/small.yaml", "experiments/studies/two_ranks.yaml", "paper_figures/validation_loss.py"}
EXAMPLES |= {"tests/unit_tests"}


def stands(name: str, text: str) -> bool:
    """True if a reference leads to a module or a member; without its package, to a name in the rest of its file."""
    if not name.startswith(tuple(f"{package}." for package in PACKAGES)):
        return re.search(rf"\b{name.partition('.')[0]}\b", ROLE.sub("", text)) is not None
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        owner, _, field = name.rpartition(".")  # a field without a default is annotated alone
        return "." in owner and field in getattr(pkgutil.resolve_name(owner), "__annotations__", ())


def test_every_cross_reference_leads_somewhere() -> None:
    assert not stands("edgc.engine.Engine.reduces", "") and not stands("reduces", ":meth:`reduces`")
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    assert not [f"{path}: {name}" for path, text in texts.items() for name in ROLE.findall(text)
                if not stands(name, text)]  # fmt: skip


def test_the_files_that_a_page_names_exist() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named = set(OURS.findall(page.read_text(encoding="utf-8"))) - EXAMPLES
        missing = [name for name in sorted(named) if "<" not in name and not any(ROOT.glob(name.rstrip("/")))]
        assert not missing, f"{page.name} names {missing}"
