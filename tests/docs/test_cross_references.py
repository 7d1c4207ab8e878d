"""Every cross reference in a docstring or comment names something that is defined, by reading the sources alone."""

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
            case ast.Import(names=found) | ast.ImportFrom(names=found):
                names |= {(one.asname or one.name).partition(".")[0] for one in found}
    return frozenset(names)


@functools.lru_cache
def everywhere() -> frozenset[str]:
    """Names that any module binds, and names of modules: a member may be inherited from another module's class."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return frozenset().union(*map(defined, paths), (path.stem for path in paths))


def module(parts: list[str]) -> tuple[Path, list[str]] | None:
    """The file of the longest prefix that is a module, and what is left of the name."""
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, parts[end:]
    return None


def stands(name: str) -> bool:
    """Whether a reference leads somewhere; of a name without its package only the first part is looked up."""
    first, *members = name.split(".")
    if first not in PACKAGES:
        return first in everywhere() | sys.stdlib_module_names
    found = module([first, *members])
    if found is None:
        return False
    path, rest = found
    return all(one in (everywhere() if place else defined(path)) for place, one in enumerate(rest))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_cross_reference_names_something(package: str) -> None:
    lost = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found[1]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        for found in ROLE.finditer(text)
        if not stands(found[1])
    ]
    assert not lost


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("edgc.control.policies.base", True),
        ("edgc.control.policies.base.MeansPolicy.state_dict", True),  # inherited
        ("edgc.control.policies.base.Plan", False),
        ("edgc.control.policy.base", False),
        ("MeansPolicy.state_dict", True),
        ("NoSuchPolicy.state_dict", False),
    ],
)
def test_what_is_not_there_is_seen(name: str, there: bool) -> None:
    assert stands(name) is there
