"""Cross references in docstrings and comments, and files that README and docs name, lead to something that is there."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edgc", "experiments", "workflows", "paper_figures")
ROLE = re.compile(r":(?:class|func|mod|meth|attr|data|exc):`[~.]?([\w.]+)`")


@functools.lru_cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module, its classes and their instances bind, what it imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=imports) | ast.ImportFrom(names=imports):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    return frozenset(names)


@functools.lru_cache
def everywhere() -> frozenset[str]:
    """Names that any module binds, and names of modules: a member may be inherited from another module's class."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return frozenset().union(*map(defined, paths), (path.stem for path in paths))


def stands(name: str) -> bool:
    """Whether a reference leads somewhere; of a name without its package only the first part is looked up."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return parts[0] in everywhere() | sys.stdlib_module_names
    for end in range(len(parts), 0, -1):  # the longest prefix that is a module
        base = ROOT.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                members = parts[end:]
                return set(members[:1]) <= defined(path) and set(members[1:]) <= everywhere()
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_every_cross_reference_names_something(package: str) -> None:
    assert stands("edgc.control.policies.base.MeansPolicy.state_dict")
    wrong = ("edgc.control.policies.base.Plan", "edgc.control.policy.base", "NoSuchPolicy.state_dict")
    assert not any(map(stands, wrong))
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / package).rglob("*.py"))}
    assert not [f"{path}: {match[1]}" for path, text in texts.items() for match in ROLE.finditer(text)
                if not stands(match[1])]  # fmt: skip


OURS = re.compile(r"`((?:edgc|experiments|paper_figures|tests|workflows)/[\w./*<>]+)`")
# CONTRIBUTING.md tells how to make them (tests/workflow/test_contributing.py does it); the last is another project's.
EXAMPLES = {"experiments/scales/small.yaml", "experiments/studies/two_ranks.yaml", "paper_figures/validation_loss.py"}
EXAMPLES |= {"tests/unit_tests"}


def test_the_files_that_a_page_names_exist() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named = set(OURS.findall(page.read_text(encoding="utf-8"))) - EXAMPLES
        missing = [name for name in sorted(named) if "<" not in name and not any(ROOT.glob(name.rstrip("/")))]
        assert not missing, f"{page.name} names {missing}"
