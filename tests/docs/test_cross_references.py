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
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / package).rglob("*.py"))}
    assert not [f"{path}: {match[1]}" for path, text in texts.items() for match in ROLE.finditer(text)
                if not stands(match[1])]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("edgc.control.policies.base.MeansPolicy.state_dict", True),  # inherited
        ("edgc.control.policies.base.Plan", False),
        ("edgc.control.policy.base", False),
        ("NoSuchPolicy.state_dict", False),
    ],
)
def test_what_is_not_there_is_seen(name: str, there: bool) -> None:
    assert stands(name) is there
