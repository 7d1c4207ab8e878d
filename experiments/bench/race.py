"""Train over limited links until a validation loss is reached, by the clock (root only): race.csv, race_summary.csv,
race.json. About two hours on two cores; runs that are there are not repeated.

Each run is an ordinary one (:mod:`experiments.training.launch`), with a launcher on each host of the testbed. Its time
is the sum of its steps up to the one at which the validation loss first was at most the target, linear between
evaluations; evaluations and start-up do not count. The runs of one seed and limit follow each other, uncompressed
first.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import yaml
from pydantic import Field

from edgc.presets import deep_merge
from experiments.analyse.methods import loss_at, reached
from experiments.analyse.runs import Run, load_run
from experiments.analyse.tables import bf16_ratio
from experiments.bench import terminal
from experiments.bench.terminal import Rate, Say, one_of
from experiments.bench.testbed import INTERFACE, Testbed
from experiments.bench.workers import WorkerError, last_line
from experiments.common.files import ROOT, atomic_write
from experiments.common.processes import die_with_parent, stop
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.data.folder import prepare
from experiments.spec.matrix import load_scale
from experiments.spec.settings import RunConfig, lay, resolve

ON_TESTBED = True
SHOWN = "mbit_per_s place label reached of_uncompressed seconds iterations"
PATH = Path(__file__).with_suffix(".yaml")
PORT = 29400
RUN_SECONDS = 3600.0
RACED = ("seconds", "iterations", "seconds_step", "bytes_ratio", "bytes_ratio_bf16")


class Race(Settings):
    """The settings file ``race.yaml``."""

    scale: str
    base: dict[str, Any]
    target_share: Annotated[float, Field(gt=0.0, le=1.0)]
    variants: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


RACE: Race = validate(Race, load_yaml(PATH), PATH)


class Plan(terminal.Plan):
    """Settings of the race; every method has the same seeds, and the uncompressed one is always among them."""

    rates: tuple[Rate, ...] = Field((50.0, 200.0, 1000.0), description="limits in Mbit/s, with commas")
    seeds: tuple[int, ...] = Field((1, 2, 3), description="seeds, with commas")
    methods: tuple[Annotated[str, one_of(*RACE.variants)], ...] = Field(
        tuple(RACE.variants), description="variants of race.yaml, with commas"
    )

    def runs(self) -> list[RunConfig]:
        """The runs of one limit, seed after seed, uncompressed first."""
        chosen = [name for name in RACE.variants if name in ("none", *self.methods)]
        base = deep_merge(load_scale(RACE.scale).defaults, RACE.base)
        about = {"study": "race", "scale": RACE.scale}
        return [
            resolve(lay(base, RACE.variants[variant], PATH) | about | {"variant": variant, "seed": seed}, PATH)
            for seed in self.seeds
            for variant in chosen
        ]


def measure(plan: Plan, folder: Path, say: Say) -> Path:
    """Run what is not yet there.

    Returns:
        ``folder/race``: ``<Mbit/s>/<scale>/race/<run>``, over data in ``<scale>/data``.

    Raises:
        UserError: if no testbed can be made, or no data.
        WorkerError: a launcher failed; its last line.
    """
    runs, folder = plan.runs(), folder / "race"
    data = folder / RACE.scale / "data"
    prepare(runs[0].data, data / runs[0].data.path, show=False)
    with Testbed(runs[0].parallel.world) as testbed:
        for rate in plan.rates:
            testbed.limit(rate)
            results = folder / f"{rate:g}"
            here = results / RACE.scale
            here.mkdir(parents=True, exist_ok=True)
            if not (here / "data").exists():
                (here / "data").symlink_to(data.resolve())
            for run in runs:
                if not (here / "race" / run.name / "status").exists():
                    say(f"{rate:g} Mbit/s: {run.name}")
                    train(run, results, testbed)
    return folder


def train(run: RunConfig, results: Path, testbed: Testbed) -> None:
    """One run, a launcher per host."""
    config = results / "configs" / f"{run.name}.yaml"
    atomic_write(config, yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    command = [sys.executable, "-m", "experiments.training.launch"]
    command += ["--config", str(config), "--results", str(results)]
    command += ["--nodes", str(testbed.hosts), "--rendezvous", f"{testbed.address(0)}:{PORT}"]
    with ExitStack() as stack:
        launchers = []
        for node in range(testbed.hosts):
            log = stack.enter_context((results / "configs" / f"{run.name}-{node}.log").open("w+"))
            node_options = ["--node", str(node), "--address", testbed.address(node)]
            launcher = subprocess.Popen(
                [*testbed.inside(node), *command, *node_options],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
            stack.callback(stop, launcher)
            launchers.append((launcher, log))
        for launcher, log in launchers:
            if launcher.wait(RUN_SECONDS):
                log.seek(0)
                raise WorkerError(f"{run.name}: {last_line(log.read()) or launcher.returncode}")


def tables(plan: Plan, folder: Path) -> dict[str, pd.DataFrame]:
    """The summary, and a row per limit and run: iterations and seconds to the target, and the ratio to the
    uncompressed run's.

    ``seconds`` is empty where the target was never reached; ``seconds_step`` is the median of all steps.
    """
    rows = []
    for rate in plan.rates:
        runs = {c.name: load_run(folder / f"{rate:g}" / RACE.scale / "race" / c.name) for c in plan.runs()}
        for config in plan.runs():
            run, base = runs[config.name], runs[f"none-s{config.seed}"]
            end = RACE.target_share * config.train.iterations
            target = loss_at(base, end) if base.ok else math.nan
            seconds, ratio = seconds_to(run, target), run.number("bytes_ratio")
            rows.append(
                {"mbit_per_s": rate, "method": config.variant, "label": config.label, "seed": config.seed}
                | {"status": run.status, "bytes_ratio": ratio, "bytes_ratio_bf16": bf16_ratio(ratio)}
                | {"target_loss": target, "iterations": reached(run, target) if run.ok else math.nan}
                | {"seconds": seconds, "of_uncompressed": seconds / seconds_to(base, target)}
                | {"seconds_step": float(run.steps["seconds"].median()) if run.ok else math.nan}
            )
    table = pd.DataFrame(rows)
    return {"race_summary": summary(table), "race": table}


def seconds_to(run: Run, target: float) -> float:
    """Seconds of the steps until the validation loss was at most ``target``; nan if it never was."""
    iterations = reached(run, target) if run.ok else math.nan
    if not math.isfinite(iterations):
        return math.nan
    steps = run.steps.set_index("iteration")["seconds"]
    whole = int(iterations)
    return float(steps[steps.index <= whole].sum() + (iterations - whole) * steps.get(whole + 1, 0.0))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Per limit and method: seeds, how many reached the target, mean, smallest and largest ratio; ranked by the mean.

    A method of which more runs reached the target comes first, whatever their time.
    """
    ranking = table.groupby(["mbit_per_s", "method"], sort=False, as_index=False).agg(
        label=("label", "first"),
        seeds=("seed", "size"),
        reached=("of_uncompressed", "count"),
        of_uncompressed=("of_uncompressed", pd.Series.mean),
        lowest=("of_uncompressed", "min"),
        highest=("of_uncompressed", "max"),
        **{column: (column, pd.Series.mean) for column in RACED},
    )
    missed = 1 - ranking["reached"] / ranking["seeds"]
    order = ["mbit_per_s", "missed", "of_uncompressed"]
    ranking = ranking.assign(missed=missed).sort_values(order, kind="stable", ignore_index=True).drop(columns="missed")
    ranking.insert(1, "place", ranking.groupby("mbit_per_s").cumcount() + 1)
    return ranking
