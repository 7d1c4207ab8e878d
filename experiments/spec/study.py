"""The files of studies and scales, and the settings of the pipeline: their keys and the checks of them.

This is the one check of these files; Snakemake and every program read them through :mod:`experiments.spec.matrix`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt

from edgc.errors import UserError, nearest
from experiments.common.files import ROOT
from experiments.common.source import constant
from experiments.common.yaml_settings import Settings

ANALYSES = ROOT / "experiments" / "analyse"
CLUSTER_MODEL = "experiments.simulation.cluster_model"
SCENARIOS = "experiments.simulation.break_even"
EVALUATION = "experiments.evaluation.evaluate"
# Standard task of lm-eval -> its file below lm_eval/tasks. Building an index of all its tasks would take 12 to 25 s.
STANDARD = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "mathqa": "mathqa/mathqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "race": "race/race.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "wikitext": "wikitext/wikitext.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "copa": "super_glue/copa/default.yaml",
}


def _once(values: list[Any]) -> list[Any]:
    """Refuse a value given twice: two runs would have one name, and one folder."""
    for value in values:
        if values.count(value) > 1:
            kind = "seed " if isinstance(value, int) else ""
            raise ValueError(f"{kind}{value} appears twice; give it once")
    return values


def _name(value: str) -> str:
    """Refuse what is no name of a file, a folder and a target."""
    if not re.fullmatch("[a-z][a-z0-9_]*", value):
        raise ValueError("this is no name; use small letters, digits and _, and begin with a letter")
    return value


def _standard_task(value: str) -> str:
    """Refuse what is no standard task."""
    if value not in STANDARD:
        raise ValueError(f"unknown standard task {value!r}; {nearest(value, STANDARD, 'known tasks')}")
    return value


def _plain_path(value: str) -> str:
    """Refuse a path that a shell takes apart."""
    if not value or re.search(r"[\s'\"$`]", value):
        raise ValueError("a path with a space, a quote, $ or ` cannot be used; choose another folder")
    return value


Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Name], AfterValidator(_once)]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], AfterValidator(_once)]


class MoreSeeds(Settings):
    """Variants that are trained with ``seeds`` as well as with those that all variants have."""

    variants: Annotated[Names, Field(min_length=1)]
    seeds: Annotated[Seeds, Field(min_length=1)]


class Setting(Settings):
    """What is laid over a study in one of its settings, which may lack variants (null); ``seeds`` and ``more_seeds``
    replace the study's."""

    base: dict[str, Any] = {}
    variants: dict[Name, dict[str, Any] | None] = {}
    seeds: Seeds = []
    more_seeds: MoreSeeds | None = None


class StudyLayer(Setting):
    """The part of a study that a scale may override; its ``settings`` replace the study's."""

    settings: dict[Name, Setting] = {}
    evaluation: dict[str, Any] = {}


class Evaluation(Settings):
    """Tasks and options of a study with ``needs``, which evaluates models.

    ``held_out``: the tasks made from the held-out text; ``standard``: names of lm-eval's tasks, whose data is
    fetched beforehand; ``batch_size``: documents at once.
    """

    held_out: bool = False
    standard: Annotated[list[Annotated[str, AfterValidator(_standard_task)]], AfterValidator(_once)] = []
    batch_size: PositiveInt = 16


class Study(StudyLayer):
    """A study file (``experiments/studies/<study>.yaml``).

    ``analysis`` names the module of :mod:`experiments.analyse` that makes tables of the runs; where the study is
    ``frozen`` that module and all settings are in the commit of this name. Instead of it,
    ``cluster`` holds inputs of the cluster model, ``scenarios`` clusters that it is asked about, and ``needs`` the
    variants of other studies whose models are evaluated. ``only_by_name`` lists the scales at which the study is too
    long for `all` and is made by its own target alone.
    """

    study: Name
    title: Text
    question: Text
    frozen: Text | None = None
    analysis: Name | None = None
    scales: dict[Name, StudyLayer] = {}
    only_by_name: Names = []
    cluster: dict[str, Any] | None = None
    scenarios: dict[str, Any] | None = None
    needs: dict[Name, Literal["all"] | Annotated[Names, Field(min_length=1)]] | None = None

    @property
    def program(self) -> str | None:
        """The module that writes the tables, and says which in ``RESULTS`` and ``DETAILS``; None where it is frozen."""
        if self.frozen:
            return None
        for key, module in (("cluster", CLUSTER_MODEL), ("scenarios", SCENARIOS), ("needs", EVALUATION)):
            if getattr(self, key) is not None:
                return module
        return f"experiments.analyse.{self.analysis}" if self.analysis else None

    @property
    def simulated(self) -> bool:
        """True of a study that is computed from a model of a cluster, not measured."""
        return self.program in (CLUSTER_MODEL, SCENARIOS)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the tables that are committed with the study's results."""
        return tables_of(self.program, "RESULTS") if self.program else ()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of all tables, with those too long to be committed."""
        return tables_of(self.program) if self.program else ()


def tables_of(program: str, *kinds: str) -> tuple[str, ...]:
    """Names of the tables that a program says it writes, by default of both kinds."""
    path = ROOT.joinpath(*program.split(".")).with_suffix(".py")
    return tuple(name for kind in kinds or ("RESULTS", "DETAILS") for name in constant(path, kind) or ())


class Scale(Settings):
    """A scale file (``experiments/scales/<scale>.yaml``): settings of every run, and seeds."""

    scale: Name
    title: Text
    defaults: dict[str, Any]
    seeds: Annotated[Seeds, Field(min_length=1)]


class PipelineSettings(Settings):
    """``snakemake --config key=value``.

    ``results`` is the folder of all results. With ``keep_runs`` a finished run stays although the code that made it
    has changed; the report says which these are.
    """

    scale: Name = "ci"
    results: Annotated[str, AfterValidator(_plain_path)] = "results"
    keep_runs: bool = False


def analyses() -> list[str]:
    """The modules that make the tables of a study, ``table.csv`` among them."""
    return sorted(path.stem for path in ANALYSES.glob("*.py") if "table.csv" in (constant(path, "RESULTS") or ()))


def check_names(study: Study, where: Path, scales: Iterable[str], studies: Iterable[str]) -> None:
    """Raise ``UserError`` for unknown scales, studies or analyses, and for runs of which nothing makes tables."""
    for key, names, known in (
        ("scales", study.scales, scales),
        ("only_by_name", study.only_by_name, scales),
        ("needs", study.needs or (), studies),
        ("scenarios.of", [(study.scenarios or {}).get("of", study.study)], studies),
        ("analysis", [study.analysis] if study.analysis and not study.frozen else (), analyses()),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"{key}: unknown name {name!r}", where=where, fix=nearest(name, known))
    trains = bool(study.variants) or any(layer.variants for layer in study.scales.values())
    if trains and study.program is None and not study.frozen:
        fix = f"add analysis: with one of {', '.join(analyses())}, or a new module of experiments/analyse"
        raise UserError("missing key analysis: nothing makes tables of the runs", where=where, fix=fix)
