"""What the project's own source says, read without importing it: constants, imports, and a fingerprint of a program.

A program's fingerprint covers all modules of the project that it imports, directly or not, as syntax trees without
comments, docstrings and layout. It changes exactly when something that the program may execute changes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edgc.errors import UserError
from experiments.common import source_memory
from experiments.common.files import ROOT

PACKAGES = ("edgc", "experiments", "paper_figures")
_PREFIXES = tuple(f"{package}." for package in PACKAGES)
DIGITS = 16  # of a fingerprint: 64 bits
# Which runs there are and how their settings come about is left out: the settings themselves say it.
SETTLED = frozenset({"experiments.spec.matrix"})


def constant(path: Path, name: str) -> Any:
    """The value of ``name = <literal>`` at the top of a Python file; None where there is no such line.

    Raises:
        UserError: the value is not written out.
    """
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and name in {getattr(target, "id", None) for target in node.targets}:
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                fix = "write it out: it is read without running the file"
                raise UserError(f"{name} is computed", where=path, fix=fix) from None
    return None


def fingerprint(*modules: str, files: Iterable[Path] = (), without: Iterable[str] = ()) -> str:
    """Of the code of ``modules`` and of every module of the project that they import, directly or not.

    Args:
        modules, files: names with dots, and other files that the programs read, by content.
        without: modules whose imports are not followed, because what they say is a parameter of its own.
    """
    total = hashlib.sha256()
    for path in closure(*modules, without=without):
        total.update(f"{path.relative_to(ROOT).as_posix()} {_said(path).digest}\n".encode())
    total.update(digest(files).encode())
    return total.hexdigest()[:DIGITS]


def digest(files: Iterable[Path]) -> str:
    """Of the names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:DIGITS]


def closure(*modules: str, without: Iterable[str] = ()) -> list[Path]:
    """Files of ``modules`` and of every module of the project that they import, in functions too; sorted.

    A package that is named in a call, ``find("edgc.compressors")``, is imported with all that is in it.

    Raises:
        ValueError: a module that the project does not have.
    """
    missing = [module for module in modules if not _files(module)]
    if missing:
        raise ValueError(f"no module {missing[0]} in {ROOT}")
    found: set[Path] = set()
    new = {path for module in modules for path in _files(module)}
    while new:
        found |= new
        names = {name for path in new for name in _imports(path)} - SETTLED - set(without)
        new = {path for name in names for path in _files(name)} - found
    return sorted(found)


def imported_packages(*modules: str) -> list[str]:
    """Top-level names of what the closure of ``modules`` imports from outside the project and the standard library."""
    # Settings of methods are read without torch: their files import it when it is first used.
    paths = closure(*modules, without=["edgc.config", *_inside("edgc.compressors")])
    names = {name.partition(".")[0] for path in paths for name in _imports(path)}
    return sorted(names - sys.stdlib_module_names - set(PACKAGES))


@functools.cache
def _files(module: str) -> list[Path]:
    """The file of a module of the project and those of the packages it lies in; nothing for other modules."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return []
    path = ROOT.joinpath(*parts)
    own = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not own.is_file():
        return []
    packages = [ROOT.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts))]
    return [own, *(package for package in packages if package.is_file())]


@functools.cache
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"not valid Python at line {error.lineno}", where=path, fix="correct it") from None


class _Said(NamedTuple):
    """What follows from the content of one file alone: of its syntax tree, what it imports, and packages that it names
    in calls."""

    digest: str
    imports: list[str]
    named: list[str]


@functools.cache
def _said(path: Path) -> _Said:
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    memory = source_memory.of(Path(__file__))
    if content not in memory:
        memory[content] = _read(_parsed(path))
    return _Said(*memory[content])


def _read(tree: ast.Module) -> _Said:
    imports: set[str] = set()
    named: set[str] = set()
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            # What is imported from a package may be a module of it, or a name in it.
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            texts = (getattr(argument, "value", None) for argument in node.args)
            named |= {text for text in texts if isinstance(text, str) and text.startswith(_PREFIXES)}
    return _Said(_digest(tree), sorted(imports), sorted(named))


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    said = _said(path)
    return frozenset((*said.imports, *(module for package in said.named for module in _inside(package))))


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes of a tree, without what only a type checker reads."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            nodes.extend(ast.iter_child_nodes(node))


def _inside(package: str) -> Iterator[str]:
    """The modules of a package of the project, itself among them."""
    for path in sorted(ROOT.joinpath(*package.split(".")).rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _digest(tree: ast.Module) -> str:
    """Of a tree, which loses its docstrings."""
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
