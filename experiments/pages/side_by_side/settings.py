"""The paper's setting and ours, side by side, read from the studies' files and from the runs that are kept.

Ours are those of the runs behind the committed tables. Where they lie in an archive they are read from it: a study's
file may say something else by now, and the page then says so.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from edgc.errors import UserError, nearest
from experiments.cluster.resources import parameters
from experiments.common.yaml_settings import validate
from experiments.pages.kept import as_list, is_simulated
from experiments.pages.side_by_side import markdown
from experiments.pages.side_by_side.spec import Setting, Sides
from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from experiments.spec.study import Study
from experiments.verdicts import archive

PAPER = "paper"  # the scale whose files hold what the authors' scripts say
UNKNOWN = "not known here"
NONE = "-"
TEXTS = {
    "stdlib": "documentation and source of Python's standard library",
    "debian": "documentation of Debian packages",
    "openwebtext": "OpenWebText",
    "folder": "a folder of text",
}


@dataclass(frozen=True)
class Side:
    """A run and where it ran. ``now`` is the run as the study's file has it today, where that is another one."""

    name: str
    run: RunConfig
    hardware: str
    now: RunConfig | None = None


def _size(run: RunConfig) -> str:
    count = parameters(run)
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _edgc(run: RunConfig) -> str:
    """Window in iterations, and the shares of iterations and entries that are read; a dash without a policy."""
    if run.edgc.method != "edgc":
        return NONE
    entropy = run.edgc.entropy
    return f"{run.edgc.window}, {entropy.iteration_rate:g}, {entropy.entry_rate:g}"


FIELDS: dict[str, Callable[[RunConfig], str]] = {
    "model": lambda run: f"{run.model.architecture.upper()}, {run.model.layers} layers, {run.model.hidden} wide",
    "parameters": _size,
    "pipeline stages x replicas x tensor ranks": lambda run: (
        f"{run.parallel.pipeline} x {run.parallel.data} x {run.parallel.tensor}"
    ),
    "text": lambda run: TEXTS[run.data.source],
    "sequence length": lambda run: str(run.model.sequence_length),
    "sequences in a step": lambda run: str(run.train.global_batch),
    "iterations": lambda run: f"{run.train.iterations:,}".replace(",", " "),
    "peak learning rate": lambda run: f"{run.train.lr:g}",
    "precision": lambda run: run.train.precision,
    "EDGC: window, alpha, beta": _edgc,
}


@cache
def kept_run(path: Path, name: str | None) -> dict[str, Any]:
    """Settings of the run ``name`` in an archive, by default of its first; ``UserError`` where it has none."""
    try:
        with tarfile.open(path, mode="r:xz") as opened:
            while (entry := opened.next()) is not None:
                run, _, file = entry.name.partition("/")
                content = opened.extractfile(entry) if file == "run.yaml" and name in (None, run) else None
                if content is not None:
                    return dict(yaml.safe_load(content.read()))
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"cannot read the runs: {error}", where=path, fix="restore it from version control") from None
    raise UserError(f"no run {name!r} is kept", where=path, fix=nearest(str(name), archive.members(path)))


@cache
def definition(study: str) -> Study:
    """A study's file, read once."""
    return matrix.load_study(study)


@cache
def runs(study: str, scale: str) -> dict[str, RunConfig]:
    """All runs of a study by their names, made once."""
    return {run.name: run for run in matrix.runs(study, scale)}


def of_study(study: str, scale: str, name: str | None = None) -> RunConfig:
    """A run as the study's file has it; a study that evaluates other studies' models has those of its first one."""
    needs = definition(study).needs
    trained = next(iter(needs)) if needs else study
    known = runs(trained, scale)
    if name is None and known:
        return next(iter(known.values()))
    if name not in known:
        what = f"study {trained} has no run {name!r} at scale {scale}"
        raise UserError(what, where=matrix.study_path(trained), fix=nearest(name, known))
    return known[name]


def side(setting: Setting, results: Path) -> Side:
    """What a column of the table of settings is of.

    Args:
        setting: as the page names it.
        results: folder with a folder of committed results for each scale.
    """
    study = definition(setting.study)
    if is_simulated(study) or setting.scale == PAPER:
        run = of_study(setting.study, PAPER, setting.run)
        hardware = _cluster(study.cluster or {})
        if setting.scale != PAPER:
            return Side(setting.name or "ours, SIMULATED", run, f"SIMULATED: {hardware}")
        return Side(setting.name or "paper", run, hardware)
    now = of_study(setting.study, setting.scale, setting.run)
    packed = results / setting.scale / now.study / archive.NAME
    run = _as_kept(packed, now) if packed.is_file() else now
    name = setting.name or f"ours, {setting.scale}"
    return Side(name, run, _machine(results / setting.scale, now.study), None if run == now else now)


def _as_kept(packed: Path, now: RunConfig) -> RunConfig:
    """The kept run of the same name; keys that settings no longer have are left out of it."""
    values = kept_run(packed, now.name)
    parts = {}
    for key in ("data", "model", "parallel", "train"):
        kind = type(getattr(now, key))
        parts[key] = validate(kind, {k: v for k, v in values[key].items() if k in kind.model_fields}, packed)
    run = now.model_copy(update={**parts, "compression": values["compression"]})
    return now if all(field(run) == field(now) for field in FIELDS.values()) else run


def _cluster(cluster: Mapping[str, Any]) -> str:
    """``64 H100 on 16 nodes``; empty where a study says nothing of machines."""
    if not cluster:
        return UNKNOWN
    nodes, each, name = cluster["nodes"], cluster["gpus_per_node"], cluster["gpu"]["name"]
    guess = " (assumed)" if name["kind"] == "assumed" else ""
    return f"{nodes['value'] * each['value']} {name['value']}{guess} on {nodes['value']} nodes"


def _machine(root: Path, study: str) -> str:
    """The machine that a study's runs name, or all studies' together."""
    for path in (root / study / "provenance.yaml", root / "provenance.yaml"):
        if path.is_file():
            record = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            found = [f"{one['cores']} CPU cores ({one['cpu']})" for one in as_list(record.get("hardware"))]
            if found:
                return " and ".join(dict.fromkeys(found)) + ", no GPU"
    return "not recorded"


def table(sides: Sides, results: Path) -> str:
    """The settings as a table and, below it, where the kept runs are from before a change of the study's file."""
    columns = [side(setting, results) for setting in (*sides.theirs, *sides.ours)]
    theirs = len(sides.theirs)
    if not theirs:
        header = ["", "paper", *(column.name for column in columns)]
    else:
        header = ["", *(column.name for column in columns)]
    filler = [] if theirs else [UNKNOWN]
    fields = {name: [field(column.run) for column in columns] for name, field in FIELDS.items()}
    rows = [[name, *filler, *shown] for name, shown in fields.items() if set(shown) != {NONE}]
    rows.append(["machine", *filler, *(column.hardware for column in columns)])
    parts = [markdown.table(header, rows)]
    parts += [_changed(column) for column in columns if column.now is not None]
    if sides.unknown:
        parts.append(sides.unknown)
    return "\n\n".join(parts)


def _changed(column: Side) -> str:
    assert column.now is not None
    new = {name: field(column.now) for name, field in FIELDS.items() if field(column.now) != field(column.run)}
    said = ", ".join(f"{name} {value}" for name, value in new.items())
    return (
        f"The kept runs of study `{column.run.study}` ({column.name}) are from before a change of its settings. "
        f"Its file now says: {said}. The next run of the workflow trains them again."
    )
