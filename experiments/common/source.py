"""Constants, imports and fingerprints of the project's own source, read without running it, and those on record.

The fingerprint of a program covers all modules of the project that it imports, directly or not, as syntax trees without
comments, docstrings and layout. It changes exactly when something that the program may execute changes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grimp

from edgc.errors import UserError
from experiments.common.files import ROOT
from experiments.common.yaml_settings import load_yaml

TRAINING = "experiments.training.train"  # what every rank of a run executes
REHEARSAL = "experiments.training.rehearse"  # what a run of one process does
DATA = "experiments.data.folder"
PACKAGES = ("edgc", "experiments", "paper_figures")
DIGITS = 16  # of a fingerprint: 64 bits
# Which runs there are and how their settings come about is left out: the settings themselves say it.
SETTLED = frozenset({"experiments.spec.matrix"})
# Packages whose modules register themselves: a program that uses settings may use any of them.
REGISTERED = {
    "edgc.config": ("edgc.compressors", "edgc.control.policies"),
    "edgc.rehearsal.rehearsal": ("edgc.strategies",),
}


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
    """Fingerprint of modules and of every module of the project that they import, directly or not.

    Args:
        modules: their names with dots.
        files: other files that the program reads, by content.
        without: modules whose imports are not followed, because what they say is a parameter of its own.
    """
    total = hashlib.sha256()
    for name in sorted(closure(*modules, without=without)):
        total.update(f"{name} {_digest(path_of(name))}\n".encode())
    total.update(digest(files).encode())
    return total.hexdigest()[:DIGITS]


def training_code(driver: str = "processes") -> str:
    """Fingerprint of the code that a training run is computed by."""
    return fingerprint(REHEARSAL if driver == "rehearsal" else TRAINING)


def data_code() -> str:
    """Fingerprint of the code that prepares text."""
    return fingerprint(DATA, without=["experiments.spec.settings", "edgc.config"])


def recorded_code(record: Path) -> str | None:
    """The fingerprint in a ``run.yaml`` or ``data.yaml``; None without such a file, or where it names none.

    A run that went on from a checkpoint of other code has the fingerprints of both, joined by ``+``.
    """
    try:
        values = load_yaml(record)
    except UserError:
        return None
    code = (values.get("provenance") or values).get("code")
    return str(code) if code else None


def digest(files: Iterable[Path]) -> str:
    """Digest of the names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:DIGITS]


def closure(*modules: str, without: Iterable[str] = ()) -> set[str]:
    """The modules and all of the project that they import, in functions too, with the packages around them.

    Raises:
        ValueError: a module that the project does not have.
    """
    graph = _graph()
    if missing := set(modules) - graph.modules:
        raise ValueError(f"no module {min(missing)} in {ROOT}")
    known: set[str] = set()
    new = set(modules)
    while new:
        known |= new
        names = {name for module in new for name in _imported(graph, module)} - SETTLED - set(without)
        parents = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
        new = (names | parents) - known
    return known


def path_of(module: str) -> Path:
    """The file of a module of the project."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def _imported(graph: grimp.ImportGraph, module: str) -> set[str]:
    registered = (graph.find_descendants(package) | {package} for package in REGISTERED.get(module, ()))
    return graph.find_modules_directly_imported_by(module).union(*registered)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"not valid Python at line {error.lineno}", where=path, fix="correct it") from None


@functools.cache
def _digest(path: Path) -> str:
    """Digest of a file's syntax tree without docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
