"""Command lines of the benchmarks: options, and the tables that are written, shown and kept."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_origin

import numpy as np
import pandas as pd
import torch
import typer
from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from edgc.errors import UserError
from experiments.bench import machine, testbed
from experiments.bench.workers import WorkerError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.common.yaml_settings import Settings

RESULTS = Path("results/bench")
Rate = Annotated[float, Field(ge=1, le=1e4)]  # a limit in Mbit/s that a testbed can make
ROUNDS: Any = Field(5, alias="repeats", description="rounds for each limit, after one that is not counted")
Positive = Annotated[int, Field(ge=1)]
Results = Annotated[Path, typer.Option(help="a folder named after the machine is made in it")]
Say = Callable[[str], None]  # tells what is measured now


class Plan(Settings):
    """Base of a benchmark's settings; fields with a description are options of its command, named by their aliases."""

    model_config = ConfigDict(populate_by_name=True)

    @property
    def suffix(self) -> str:
        """End of the names of all files."""
        return ""


def one_of(*names: str) -> AfterValidator:
    """Refuse other words than ``names`` in a setting."""

    def check(word: str) -> str:
        if word not in names:
            raise ValueError(f"use some of {', '.join(names)}")
        return word

    return AfterValidator(check)


def schedule(names: Sequence[Any], rounds: int) -> Iterator[tuple[int, list[Any]]]:
    """Each round, from -1 on, which does not count, and the names in an order that turns round after round."""
    for index in range(-1, rounds):
        yield index, list(names if index % 2 == 0 else names[::-1])


def device_of(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is a GPU if there is one. UserError if there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("this torch finds no GPU", where="--device cuda", fix="use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


Device = Annotated[str, one_of("auto", "cpu", "cuda"), AfterValidator(device_of)]
DEVICE: Any = Field("auto", validate_default=True, description="auto, cpu or cuda")


def spread(name: str, values: Any) -> dict[str, float]:
    """Median and quartiles as three columns."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {name: float(middle), f"{name}_q1": float(low), f"{name}_q3": float(high)}


def register(app: typer.Typer, name: str, benchmark: ModuleType) -> None:
    """Make a benchmark a command; lists are given with commas. Values that its plan refuses are one line and exit code
    2.

    Args:
        benchmark: a module with ``Plan``; ``measure(plan, folder, say)``; ``tables(plan, data)`` of its result, by the
            names of their files; ``SHOWN``, columns of the first to be shown. Optional are ``record(data, table)``,
            written beside the settings; ``ON_TESTBED``; ``STRICT``: exit code 1 where a row is not ok.
    """
    fields = {key: field for key, field in benchmark.Plan.model_fields.items() if field.description}
    flags = {key: "--" + (field.alias or key).replace("_", "-") for key, field in fields.items()}

    def option(key: str) -> inspect.Parameter:
        field, switch = fields[key], fields[key].annotation is bool
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        default = ",".join(f"{value:g}" if isinstance(value, float) else str(value or "") for value in values)
        text = f"{field.description} (default: {default})" if default and not switch else field.description
        flag = f"{flags[key]}/--no-{flags[key][2:]}" if switch else flags[key]
        annotation: Any = Annotated[bool | None if switch else str | None, typer.Option(flag, help=text)]
        return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    @main_guard
    def call(results: Path, **words: Any) -> None:
        values = {key: value for key, value in words.items() if value is not None}
        for key in [key for key in values if get_origin(fields[key].annotation) is tuple]:
            values[key] = tuple(dict.fromkeys(word.strip() for word in values[key].split(",")))
        try:
            plan = benchmark.Plan(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            key = next(key for key in fields if problem["loc"][0] in (key, fields[key].alias))
            fix = problem["msg"].removeprefix("Value error, ").lower()
            raise UserError(f"{flags[key]} {words[key]} is not valid", fix=fix) from None
        run(benchmark, plan, results)

    folder = inspect.Parameter("results", inspect.Parameter.KEYWORD_ONLY, default=RESULTS, annotation=Results)
    setattr(call, "__signature__", inspect.Signature([*map(option, fields), folder]))  # noqa: B010
    app.command(name, help=benchmark.__doc__)(call)


def run(benchmark: ModuleType, plan: Plan, results: Path) -> None:
    """Measure, write ``results/<machine>``, print that folder on stdout, and the most important columns for the eye.

    Where no testbed can be made, say why and end with exit code 0; a failed worker is one line and exit code 1. What is
    measured bit by bit is written bit by bit: who ends it early keeps that.
    """
    if getattr(benchmark, "ON_TESTBED", False) and (reason := testbed.missing()) is not None:
        say(f"skipped: {reason}")
        raise SystemExit(0)
    host = machine.describe(getattr(plan, "device", "cpu"))
    folder = results / host["slug"]
    check_writable(folder)
    record = {"machine": host, "settings": plan.model_dump(mode="json")}
    try:
        data = benchmark.measure(plan, folder, say)
        for part in data if inspect.isgenerator(data) else [data]:
            table = write(benchmark, plan, part, folder, record)
    except WorkerError as error:
        say(f"error: a worker process failed: {error}")
        raise SystemExit(1) from None
    print(folder)
    ok = table["status"] == "ok" if "status" in table else np.full(len(table), True)
    columns = benchmark.SHOWN.split()
    shown = table if "status" in columns else table[ok]
    say(shown.reindex(columns=columns).to_string(index=False, na_rep="", float_format="{:.3g}".format))
    if getattr(benchmark, "STRICT", False) and not ok.all():
        raise SystemExit(1)


def say(text: str) -> None:
    """Print a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def write(benchmark: ModuleType, plan: Plan, data: Any, folder: Path, record: Mapping[str, Any]) -> pd.DataFrame:
    """Write all tables, with columns that say on which machine, and ``record``, its ``machine`` and ``settings``; each
    file whole or not at all. Returns the first table."""
    tables: dict[str, pd.DataFrame] = benchmark.tables(plan, data)
    host = record["machine"]
    caches = " ".join(f"{name} {size} KiB" for name, size in host["caches_kib"].items())
    for key, table in tables.items():
        labelled = table.assign(machine=host["name"], caches=caches, torch=host["versions"]["torch"])
        text = labelled.to_csv(index=False, lineterminator="\n", float_format="%.6g")
        atomic_write(folder / f"{key}{plan.suffix}.csv", text)
    first = next(iter(tables.values()))
    more = benchmark.record(data, first) if hasattr(benchmark, "record") else {}
    name = benchmark.__name__.rpartition(".")[2] + plan.suffix
    atomic_write(folder / f"{name}.json", json.dumps({**record, **more}, indent=1) + "\n")
    return first


def keep(results: Path, reference: Path) -> Iterator[Path]:
    """Copy tables, settings and figures of every machine, a folder each, from ``results`` to ``reference``; yields the
    paths that were written. Raises UserError where there is nothing. Traces stay where they are."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    if not folders:
        raise UserError("there are no results of a benchmark", where=results, fix="run: make bench")
    for folder in folders:
        for path in (*folder.glob("*.csv"), *folder.glob("*.json"), *folder.glob("figures/*.png")):
            target = reference / folder.name / path.relative_to(folder)
            atomic_write(target, path.read_bytes())
            yield target
