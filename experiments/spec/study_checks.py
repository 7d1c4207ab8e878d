"""What no single setting can say about a study, a scale or a run: names that have to exist, values that go together.

:mod:`experiments.spec.matrix` asks for these checks wherever it reads a study, a scale or the runs of both. So
Snakemake, the pipeline, the launcher and every other program refuse the same mistakes in the same line.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from edgc.errors import UserError
from experiments.spec.settings import RunConfig

ROOT = Path(__file__).resolve().parents[2]
ANALYSES = ROOT / "experiments" / "analyse"


@functools.cache
def constant(path: Path, name: str) -> Any:
    """The value of ``name = <literal>`` at the top of a Python file, read without running it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in {getattr(target, "id", None) for target in targets}:
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise KeyError(name)


def figures() -> dict[str, tuple[str, ...]]:
    """The studies that each figure reads."""
    return dict(constant(ROOT / "paper_figures" / "__init__.py", "FIGURES"))


class Layer(Protocol):
    """The part of a study that a scale may override (:class:`experiments.spec.matrix.StudyLayer`)."""

    @property
    def variants(self) -> Mapping[str, Any]: ...

    @property
    def seeds(self) -> Sequence[int]: ...


class Outline(Layer, Protocol):
    """A study (:class:`experiments.spec.matrix.Study`)."""

    @property
    def study(self) -> str: ...

    @property
    def scales(self) -> Mapping[str, Layer]: ...

    @property
    def only_by_name(self) -> Sequence[str]: ...

    @property
    def figures(self) -> Sequence[str]: ...

    @property
    def cluster(self) -> Mapping[str, Any] | None: ...

    @property
    def scenarios(self) -> Mapping[str, Any] | None: ...

    @property
    def needs(self) -> Mapping[str, Any] | None: ...


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant: the closest names, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def check_study(study: Outline, where: Path, scales: Sequence[str], studies: Sequence[str]) -> None:
    """Check a study file against what else there is.

    Args:
        study, where: the study and its file.
        scales, studies: names of all files of their kinds.

    Raises:
        UserError: an unknown scale, study or figure, a seed given twice, or a study whose runs nothing analyses.
    """
    for key, names, known in (
        ("scales", study.scales, scales),
        ("only_by_name", study.only_by_name, scales),
        ("figures", study.figures, figures()),
        ("needs", study.needs or (), studies),
        ("scenarios.of", [(study.scenarios or {}).get("of", study.study)], studies),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"{key}: unknown name {name!r}", where=where, fix=nearest(name, known))
    check_seeds(study.seeds, "seeds", where)
    for name, layer in study.scales.items():
        check_seeds(layer.seeds, f"scales.{name}.seeds", where)
    trains = bool(study.variants) or any(layer.variants for layer in study.scales.values())
    elsewhere = study.cluster or study.scenarios or study.needs
    if trains and not elsewhere:
        _check_analysis(study.study, where)


def _check_analysis(study: str, where: Path) -> None:
    script = ANALYSES / f"{study}.py"
    registry = "STUDIES in experiments/analyse/__init__.py"
    if study not in constant(ANALYSES / "__init__.py", "STUDIES"):
        fix = f"write experiments/analyse/{study}.py and add {study} to {registry}"
        raise UserError(f"study: nothing analyses the runs of {study!r}", where=where, fix=fix)
    if not script.is_file():
        fix = f"write it, or take {study} out of {registry}"
        raise UserError(f"study: the analysis of {study!r} has no file", where=script, fix=fix)


def check_seeds(seeds: Sequence[int], key: str, where: Path) -> None:
    """Refuse a seed given twice: both runs would have one name, and one folder.

    Raises:
        UserError: naming the key and the seed.
    """
    twice = next((seed for seed in seeds if list(seeds).count(seed) > 1), None)
    if twice is not None:
        raise UserError(f"{key} = {list(seeds)}: seed {twice} appears twice", where=where, fix="give it once")


def check_run(run: RunConfig, where: object) -> None:
    """Refuse a run that could not do what it says.

    Raises:
        UserError: EDGC's window is longer than the run, so no rank would ever be decided.
    """
    window, iterations = run.edgc.window, run.train.iterations
    if run.edgc.method == "edgc" and window > iterations:
        what = f"compression.window = {window} is longer than the run, train.iterations = {iterations}"
        fix = f"use at most {iterations}, or train longer"
        raise UserError(f"{run.variant}: {what}", where=where, fix=fix)
