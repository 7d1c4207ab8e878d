"""List of runs, from study and scale files. Imports no torch: Snakemake calls it for every plan.

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
    settings: {name: {base: ..., variants: ..., seeds: ..., more_seeds: ...}}   # every variant in each of them
    scales: {ci: {base: ..., variants: ..., seeds: ..., more_seeds: ..., settings: ...}}   # laid over these keys

With ``settings`` a variant is called ``SETTING_VARIANT``, and ``branch`` and ``follows`` name one of the same setting,
which lacks the variants that are null there.
``branch`` in ``base`` is for the other variants of method ``edgc`` (:class:`experiments.spec.settings.RunConfig`); with
``driver: rehearsal`` it is left out, for there all begin alike to the last bit without it. A variant that branches from
another one or follows it needs that one's run of each of its seeds.
``studies/frozen`` names studies that are no longer run, each with the commit that computed its tables (``frozen``) and
has its settings.
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
from experiments.spec.settings import DataConfig, RunConfig, lay, resolve
from experiments.spec.study import Evaluation, MoreSeeds, Scale, Setting, Study, StudyLayer, check_names

FOLDER = ROOT / "experiments"


def study_path(study: str) -> Path:
    """File of a study."""
    return FOLDER / "studies" / ("frozen" if study in frozen() else "") / f"{study}.yaml"


def scale_path(scale: str) -> Path:
    """File of a scale."""
    return FOLDER / "scales" / f"{scale}.yaml"


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.yaml"))


def studies() -> list[str]:
    """Names of all study files that can be run, sorted."""
    return _names("studies")


def frozen() -> list[str]:
    """Names of studies that ended, sorted: kept results are here, code and settings at the commit they name."""
    return _names("studies/frozen")


def check_not_frozen(study: str) -> None:
    """Refuse to run or analyse a frozen study, by ``UserError`` that names the commit to check out."""
    if study in frozen():
        commit = load_study(study).frozen
        fix = f"git checkout {commit}, then snakemake -c2 {study}"
        raise UserError(f"study {study} is frozen at {commit}", where=study_path(study), fix=fix)


def scales() -> list[str]:
    """Names of all scale files, sorted."""
    return _names("scales")


def _load(path: Path, kind: str) -> dict[str, Any]:
    if not path.exists():
        fix = nearest(path.stem, _names(path.parent.name))
        raise UserError(f"unknown {kind} {path.stem!r}", where=path.parent, fix=fix)
    values = load_yaml(path)
    if values.get(kind) != path.stem:
        raise UserError(f"{kind} = {values.get(kind)!r} is not the file's name", where=path, fix=f"write {path.stem}")
    return values


def _without_null(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_null(value) for key, value in values.items() if value is not None}


def load_study(study: str) -> Study:
    """Read a study file; ``UserError`` names the key, the file and the fix."""
    path = study_path(study)
    values = _load(path, "study")
    if (base := values.pop("extends", None)) is not None:
        if base not in (known := _names("studies/bases")):
            raise UserError(f"extends: unknown name {base!r}", where=path, fix=nearest(base, known))
        values = _without_null(deep_merge(load_yaml(FOLDER / "studies" / "bases" / f"{base}.yaml"), values))
    result: Study = validate(Study, values, path)
    check_names(result, path, scales(), [*studies(), *frozen()])
    return result


def load_scale(scale: str) -> Scale:
    """Read a scale file; ``UserError`` names the key, the file and the fix."""
    path = scale_path(scale)
    result: Scale = validate(Scale, _load(path, "scale"), path)
    return result


def runs(study: str, scale: str) -> list[RunConfig]:
    """Runs in the order of the file, a variant's seeds together, ``more_seeds`` after ``seeds``.

    Raises:
        UserError: naming the key, the file and the fix.
    """
    check_not_frozen(study)
    definition, at = load_study(study), load_scale(scale)
    layer = definition.scales.get(scale, StudyLayer())
    # A setting that is missing or does not fit may be the scale's where the study says nothing of it.
    where = study_path(study) if scale in definition.scales else f"{study_path(study)} over {scale_path(scale)}"
    configs = []
    for place, setting in (layer.settings or definition.settings or {"": Setting()}).items():
        base = deep_merge(deep_merge(deep_merge(at.defaults, definition.base), layer.base), setting.base)
        laid = deep_merge(deep_merge(definition.variants, layer.variants), setting.variants)
        variants = {name: values for name, values in laid.items() if values is not None}
        common = setting.seeds or layer.seeds or definition.seeds or at.seeds
        more = setting.more_seeds or layer.more_seeds or definition.more_seeds
        key = f"scales.{scale}.more_seeds" if layer.more_seeds else "more_seeds"
        seeds = _seeds(variants, common, more, f"settings.{place}.more_seeds" if setting.more_seeds else key, study)
        for variant, seed in ((name, number) for name in variants for number in seeds[name]):
            values = lay(base, variants[variant], study_path(study))
            if scale not in definition.scales:
                values = fitted(values)
            values = {"label": variant, **values, "study": study, "scale": scale, "variant": variant, "seed": seed}
            edgc = (values.get("compression") or {}).get("method") == "edgc"
            if not edgc or values.get("driver") == "rehearsal" or variant == values.get("branch"):
                values.pop("branch", None)
            configs.append(resolve(_in_setting(values, place) if place else values, where))
            check_run(configs[-1], where)
    return _connected(configs, where)


def _in_setting(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a run with its variant, and those that it names, called as in setting ``name``."""
    values = {**values, "setting": name, "variant": f"{name}_{values['variant']}"}
    if values.get("branch"):
        values["branch"] = f"{name}_{values['branch']}"
    if follows := values.get("follows"):
        values["follows"] = {**follows, "variant": f"{name}_{follows['variant']}"}
    return values


def all_runs(scale: str) -> tuple[dict[str, list[RunConfig]], dict[str, UserError]]:
    """The runs of every study at ``scale``, and the error of each study that cannot be read or needs such a one.

    Raises:
        UserError: the scale is wrong.
    """
    load_scale(scale)
    readable, broken, needs = dict[str, list[RunConfig]](), dict[str, UserError](), dict[str, set[str]]()
    for study in studies():
        try:
            definition = load_study(study)
            needs[study] = {*(definition.needs or ()), *filter(None, [(definition.scenarios or {}).get("of")])}
            if definition.needs:
                evaluation(study, scale)
            readable[study] = runs(study, scale)
        except UserError as error:
            broken[study] = error
    for study in [name for name in readable if needs[name] & broken.keys()]:
        broken[study] = broken[min(needs[study] & broken.keys())]
        del readable[study]
    return readable, broken


def data_config(scale: str, name: str) -> DataConfig:
    """The ``data`` settings with this ``path``, of the scale or else of the first run that has them.

    Raises:
        UserError: there are none.
    """
    path = scale_path(scale)
    default = validate(DataConfig, load_scale(scale).defaults.get("data", {}), f"{path}, data")
    known = {default.path: default}
    for run in (run for configs in all_runs(scale)[0].values() for run in configs) if name not in known else ():
        known.setdefault(run.data.path, run.data)
    if name not in known:
        raise UserError(f"no data.path = {name!r} at scale {scale}", where=path, fix=nearest(name, sorted(known)))
    return known[name]


def _seeds(
    variants: Iterable[str], common: list[int], more: MoreSeeds | None, key: str, study: str
) -> dict[str, list[int]]:
    """The seeds of each variant, ``common`` first; ``UserError`` where ``more``, given as ``key``, does not fit."""
    result, where = {variant: list(common) for variant in variants}, study_path(study)
    if more is None:
        return result
    for seed in more.seeds:
        if seed in common:
            message = f"{key}.seeds = {more.seeds}: all variants have seed {seed} already"
            raise UserError(message, where=where, fix="leave it out")
    for variant in more.variants:
        if variant not in result:
            raise UserError(f"{key}.variants: unknown variant {variant!r}", where=where, fix=nearest(variant, result))
        result[variant] += more.seeds
    return result


def _connected(configs: list[RunConfig], where: object) -> list[RunConfig]:
    """Let runs that others branch from keep that state; ``UserError`` for a run that needs one which is not there."""
    variants, names = {run.variant: run for run in configs}, {run.name for run in configs}
    for run in configs:
        for key, name in (("branch", run.branch), ("follows.variant", run.follows and run.follows.variant)):
            if name is None:
                continue
            problem, fix = "", ""
            if name not in variants:
                problem, fix = f"unknown variant {name!r}", nearest(name, variants)
            elif variants[name].follows:
                problem, fix = f"{name} follows another run itself", "name that run"
            elif f"{name}-s{run.seed}" not in names:
                problem = f"{name} has no seed {run.seed}, which {run.variant} has"
                fix = f"name {name} under more_seeds.variants as well"
            if problem:
                raise UserError(f"{run.variant}: {key}: {problem}", where=where, fix=fix)
    branched = {run.branch for run in configs}
    return [
        run.model_copy(update={"train": run.train.model_copy(update={"keep_warm_up": True})})
        if run.variant in branched
        else run
        for run in configs
    ]


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of which its study says nothing at its scale, fitted to the scale's defaults.

    The micro-batch becomes the largest that divides a replica's share of the global batch, and EDGC's window a tenth of
    the run where nobody gives one and the default is longer than the run.
    """
    result = dict(values)
    train, compression = values.get("train"), values.get("compression")
    if isinstance(train, Mapping):
        micro, batch, iterations = (train.get(key) for key in ("micro_batch", "global_batch", "iterations"))
        data = (values.get("parallel") or {}).get("data", 1)
        if all(isinstance(value, int) and value > 0 for value in (micro, batch, data)) and batch % data == 0:
            share = batch // data
            result["train"] = {
                **train,
                "micro_batch": next(n for n in range(min(micro, share), 0, -1) if share % n == 0),
            }
        if isinstance(compression, Mapping) and compression.get("method") == "edgc" and isinstance(iterations, int):
            result["compression"] = {"window": min(EDGCConfig().window, max(1, iterations // 10)), **compression}
    return result


def check_run(run: RunConfig, where: object) -> None:
    """Refuse, by ``UserError``, an EDGC window longer than the run: no rank would ever be decided."""
    window, iterations = run.edgc.window, run.train.iterations
    if run.edgc.method == "edgc" and window > iterations:
        message = f"compression.window = {window} is longer than the run, train.iterations = {iterations}"
        raise UserError(f"{run.variant}: {message}", where=where, fix=f"use at most {iterations}, or train longer")


def evaluation(study: str, scale: str) -> Evaluation:
    """Tasks on which ``study`` evaluates its models at ``scale``; ``UserError`` also where no task is named."""
    definition, path = load_study(study), study_path(study)
    layer, where = definition.scales.get(scale, StudyLayer()), f"{path}, evaluation"
    result: Evaluation = validate(Evaluation, deep_merge(definition.evaluation, layer.evaluation), where)
    if definition.needs is None:
        fix = "choose a study with the key `needs`"
        raise UserError(f"study {study} evaluates no models", where=path, fix=fix)
    if not (result.held_out or result.standard):
        fix = "set held_out: true or name tasks under standard"
        raise UserError(f"no task at scale {scale}", where=where, fix=fix)
    return result


def find(study: str, scale: str, name: str) -> RunConfig:
    """The run called ``name`` (``<variant>-s<seed>``)."""
    known = {run.name: run for run in runs(study, scale)}
    if name not in known:
        message = f"study {study} has no run {name!r} at scale {scale}"
        raise UserError(message, where=study_path(study), fix=nearest(name, known))
    return known[name]


@main_guard
def main(study: Annotated[str, typer.Option()], scale: Annotated[str, typer.Option()] = "ci") -> None:
    """Print the runs of a study."""
    for run in runs(study, scale):
        model, parallel = run.model, run.parallel
        compression = " ".join(f"{key}={value}" for key, value in run.compression.items())
        compression += "".join(f" strategy.{key}={value}" for key, value in run.strategy.items())
        layout = f"TP{parallel.tensor} PP{parallel.pipeline} DP{parallel.data}"
        shape = f"{model.architecture} {model.layers}x{model.hidden}"
        print(f"{run.name:24} {shape:14} {layout:12} {run.train.iterations:6} iterations  {compression}")


if __name__ == "__main__":
    typer.run(main)
