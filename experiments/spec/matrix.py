"""From study and scale files to the list of runs. Imports no torch: Snakemake calls it for every plan.

A study file (all keys: :class:`experiments.spec.study.Study`)::

    study: rank_sweep
    title: ...
    question: what the study answers
    analysis: rank_sweep             # the module of experiments/analyse that makes its tables
    base: {...}                      # laid over the scale's defaults; of its compression settings a variant takes
                                     # those that its method can use
    variants: {name: {label: ..., ...}}
    seeds: [1]
    more_seeds: {variants: [name, ...], seeds: [2, 3]}   # of these variants, after the seeds of all
    scales: {ci: {base: {...}, variants: {...}, seeds: [...], more_seeds: {...}}}   # laid over the keys above there

``branch`` in ``base`` is for the other variants of method ``edgc`` (:class:`experiments.spec.settings.RunConfig`). A
variant that branches from another one or follows it needs that one's run of each of its seeds.
``studies/frozen`` holds studies that are no longer run, each with the commit that computed its tables (``frozen``).
``extends: NAME`` lays the file over ``experiments/studies/bases/NAME.yaml``; there ``key: null`` takes a key away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edgc.config import EDGCConfig
from edgc.errors import UserError, nearest
from edgc.presets import deep_merge
from experiments.common.cli import main_guard
from experiments.common.files import ROOT
from experiments.common.yaml_settings import load_yaml, validate
from experiments.spec.settings import RunConfig, lay, resolve
from experiments.spec.study import Scale, Study, StudyLayer, check_names
from experiments.spec.task_catalogue import Evaluation

FOLDER = ROOT / "experiments"


def study_path(study: str) -> Path:
    return FOLDER / "studies" / ("frozen" if study in frozen() else "") / f"{study}.yaml"


def scale_path(scale: str) -> Path:
    return FOLDER / "scales" / f"{scale}.yaml"


def studies() -> list[str]:
    """Names of all study files that can be run, sorted."""
    return sorted(path.stem for path in (FOLDER / "studies").glob("*.yaml"))


def frozen() -> list[str]:
    """Names of studies that ended, sorted: settings and kept results are here, the code is at the commit they name."""
    return sorted(path.stem for path in (FOLDER / "studies" / "frozen").glob("*.yaml"))


def check_not_frozen(study: str) -> None:
    """Refuse to run or analyse a frozen study, by ``UserError`` that names the commit to check out."""
    if study in frozen():
        commit = load_study(study).frozen
        fix = f"git checkout {commit}, then snakemake -c2 {study}"
        raise UserError(f"study {study} is frozen at {commit}", where=study_path(study), fix=fix)


def scales() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "scales").glob("*.yaml"))


def _load(path: Path, kind: str, known: list[str]) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"unknown {kind} {path.stem!r}", where=path.parent, fix=nearest(path.stem, known))
    values = load_yaml(path)
    if values.get(kind) != path.stem:
        raise UserError(f"{kind} = {values.get(kind)!r} is not the file's name", where=path, fix=f"write {path.stem}")
    return values


def _base(name: Any, where: Path) -> dict[str, Any]:
    folder = FOLDER / "studies" / "bases"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise UserError(f"extends: unknown name {name!r}", where=where, fix=nearest(name, known))
    return load_yaml(folder / f"{name}.yaml")


def _without_null(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_null(value) for key, value in values.items() if value is not None}


def load_study(study: str) -> Study:
    path = study_path(study)
    values = _load(path, "study", studies())
    if (base := values.pop("extends", None)) is not None:
        values = _without_null(deep_merge(_base(base, path), values))
    result: Study = validate(Study, values, path)
    check_names(result, path, scales(), [*studies(), *frozen()])
    return result


def load_scale(scale: str) -> Scale:
    path = scale_path(scale)
    result: Scale = validate(Scale, _load(path, "scale", scales()), path)
    return result


def runs(study: str, scale: str) -> list[RunConfig]:
    """All runs, in the order of the file, a variant's seeds together, ``more_seeds`` after ``seeds``.

    Raises:
        UserError: naming the key, the file and the fix.
    """
    check_not_frozen(study)
    definition, at = load_study(study), load_scale(scale)
    layer = definition.scales.get(scale, StudyLayer())
    base = deep_merge(deep_merge(at.defaults, definition.base), layer.base)
    variants = deep_merge(definition.variants, layer.variants)
    seeds = _seeds(variants, layer.seeds or definition.seeds or at.seeds, definition, scale)
    # A setting that is missing or does not fit may be the scale's where the study says nothing of it.
    where = study_path(study) if scale in definition.scales else f"{study_path(study)} over {scale_path(scale)}"
    found = []
    for variant, overrides in variants.items():
        for seed in seeds[variant]:
            values = lay(base, overrides, study_path(study))
            if scale not in definition.scales:
                values = fitted(values)
            values |= {"study": study, "scale": scale, "variant": variant, "seed": seed}
            values.setdefault("label", variant)
            if variant == values.get("branch") or (values.get("compression") or {}).get("method") != "edgc":
                values.pop("branch", None)
            found.append(resolve(values, where))
            check_run(found[-1], where)
    return _connected(found, where)


def all_runs(scale: str) -> tuple[dict[str, list[RunConfig]], dict[str, UserError]]:
    """The runs of every study at ``scale``, and what is wrong with each study that cannot be read.

    Raises:
        UserError: the scale is wrong.
    """
    load_scale(scale)
    found: dict[str, list[RunConfig]] = {}
    broken: dict[str, UserError] = {}
    for study in studies():
        try:
            found[study] = runs(study, scale)
            if load_study(study).needs is not None:
                evaluation(study, scale)
        except UserError as error:
            broken[study] = error
    return found, broken


def _seeds(variants: Iterable[str], common: list[int], definition: Study, scale: str) -> dict[str, list[int]]:
    """The seeds of each variant, ``common`` first; ``UserError`` where ``more_seeds`` does not fit them."""
    result = {variant: list(common) for variant in variants}
    layer, key = definition.scales.get(scale, StudyLayer()), "more_seeds"
    if layer.more_seeds is not None:
        key = f"scales.{scale}.more_seeds"
    more = layer.more_seeds or definition.more_seeds
    if more is None:
        return result
    where = study_path(definition.study)
    for seed in more.seeds:
        if seed in common:
            what = f"{key}.seeds = {more.seeds}: all variants have seed {seed} already"
            raise UserError(what, where=where, fix="leave it out")
    for variant in more.variants:
        if variant not in result:
            what = f"{key}.variants: unknown variant {variant!r}"
            raise UserError(what, where=where, fix=nearest(variant, result))
        result[variant] += more.seeds
    return result


def _connected(found: list[RunConfig], where: object) -> list[RunConfig]:
    """Let runs that others branch from keep that state; ``UserError`` for a run that needs one which is not there."""
    variants, branched = {run.variant: run for run in found}, {run.branch for run in found}
    names = {run.name for run in found}
    for run in found:
        for key, name in (("branch", run.branch), ("follows.variant", run.follows and run.follows.variant)):
            if name is not None and name not in variants:
                what = f"{run.variant}: {key}: unknown variant {name!r}"
                raise UserError(what, where=where, fix=nearest(name, variants))
            if name is not None and variants[name].follows:
                what = f"{run.variant}: {key}: {name} follows another run itself"
                raise UserError(what, where=where, fix="name that run")
            if name is not None and f"{name}-s{run.seed}" not in names:
                what = f"{run.variant}: {key}: {name} has no seed {run.seed}, which {run.variant} has"
                raise UserError(what, where=where, fix=f"name {name} under more_seeds.variants as well")
    return [
        run.model_copy(update={"train": run.train.model_copy(update={"keep_warm_up": True})})
        if run.variant in branched
        else run
        for run in found
    ]


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of which its study says nothing at its scale, fitted to the scale's defaults.

    The micro-batch becomes the largest that divides a replica's share of the global batch, and EDGC's window a tenth of
    the run where nobody gives one and the default is longer than the run.
    """
    train, compression = values.get("train"), values.get("compression")
    result = dict(values)
    if isinstance(train, Mapping):
        micro, batch, iterations = (train.get(key) for key in ("micro_batch", "global_batch", "iterations"))
        data = (values.get("parallel") or {}).get("data", 1)
        if all(isinstance(value, int) and value > 0 for value in (micro, batch, data)) and batch % data == 0:
            share = batch // data
            fit = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
            result["train"] = {**train, "micro_batch": fit}
        chosen = compression if isinstance(compression, Mapping) else {}
        if chosen.get("method") == "edgc" and "window" not in chosen and isinstance(iterations, int):
            result["compression"] = {**chosen, "window": min(EDGCConfig().window, max(1, iterations // 10))}
    return result


def check_run(run: RunConfig, where: object) -> None:
    """Refuse, by ``UserError``, an EDGC window longer than the run: no rank would ever be decided."""
    window, iterations = run.edgc.window, run.train.iterations
    if run.edgc.method == "edgc" and window > iterations:
        what = f"compression.window = {window} is longer than the run, train.iterations = {iterations}"
        raise UserError(f"{run.variant}: {what}", where=where, fix=f"use at most {iterations}, or train longer")


def evaluation(study: str, scale: str) -> Evaluation:
    """What ``study`` evaluates its models on at ``scale``; ``UserError`` also where no task is named."""
    definition, path = load_study(study), study_path(study)
    layer = definition.scales.get(scale, StudyLayer())
    values = deep_merge(definition.evaluation, layer.evaluation)
    found: Evaluation = validate(Evaluation, values, f"{path}, evaluation")
    if definition.needs is None:
        fix = "choose a study with the key `needs`"
        raise UserError(f"study {study} evaluates no models", where=path, fix=fix)
    if not (found.held_out or found.standard):
        fix = "set held_out: true or name tasks under standard"
        raise UserError(f"no task at scale {scale}", where=f"{path}, evaluation", fix=fix)
    return found


def find(study: str, scale: str, name: str) -> RunConfig:
    """The run called ``name`` (``<variant>-s<seed>``)."""
    known = {run.name: run for run in runs(study, scale)}
    if name not in known:
        what = f"study {study} has no run {name!r} at scale {scale}"
        raise UserError(what, where=study_path(study), fix=nearest(name, known))
    return known[name]


@main_guard
def main(study: Annotated[str, typer.Option()], scale: Annotated[str, typer.Option()] = "ci") -> None:
    """Print the runs of a study."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "label", "model", "parallel", "iterations", "compression", title=f"{study} at scale {scale}")
    for run in runs(study, scale):
        model, parallel = run.model, run.parallel
        table.add_row(
            run.name,
            run.label,
            f"{model.architecture} {model.layers}x{model.hidden}",
            f"TP{parallel.tensor} PP{parallel.pipeline} DP{parallel.data}",
            str(run.train.iterations),
            " ".join(f"{key}={value}" for key, value in run.compression.items()),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
