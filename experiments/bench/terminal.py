"""Command lines of the benchmarks: options, progress, and the tables that are written, shown and kept."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import numpy as np
import pandas as pd
import torch
import typer
from pydantic import ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from edgc.errors import UserError
from experiments.bench import machine, testbed
from experiments.bench.workers import WorkerError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.common.yaml_settings import Settings

RESULTS = Path("results/bench")
Rate = Annotated[float, Field(ge=1, le=1e4)]  # a limit in Mbit/s that a testbed can make
Delay = Annotated[float, Field(ge=0, le=1000)]
DELAY: Any = Field(0.0, alias="delay", description="milliseconds later that a packet arrives, where the kernel can")
ROUNDS: Any = Field(5, alias="repeats", description="rounds for each limit, after one that is not counted")
Positive = Annotated[int, Field(ge=1)]
Results = Annotated[Path, typer.Option(help="a folder named after the machine is made in it")]
Tables = Mapping[str, pd.DataFrame]  # by the names of their files
WIDEST = 40  # characters of a cell on the screen
screen = Console(stderr=True)


class Plan(Settings):
    """Base of a benchmark's settings; fields with a description are options of its command, named by their aliases."""

    model_config = ConfigDict(populate_by_name=True)


Run = Callable[[Any, Path], None]


def command(app: typer.Typer, name: str, plan: type[Plan]) -> Callable[[Run], Run]:
    """Register ``run(plan, results)`` as a command; lists are given with commas. Values that the plan refuses are one
    line and exit code 2."""
    fields = {key: field for key, field in plan.model_fields.items() if field.description}
    flags = {key: (field.alias or key).replace("_", "-") for key, field in fields.items()}

    def option(key: str) -> inspect.Parameter:
        field, flag = fields[key], f"--{flags[key]}"
        switch = bool in (field.annotation, *get_args(field.annotation))
        default = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
        text = f"{field.description} (default: {shown})" if shown and not switch else field.description
        info = typer.Option(f"{flag}/--no-{flags[key]}" if switch else flag, help=text)
        annotation: Any = Annotated[bool | None if switch else str | None, info]
        return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def read(given: dict[str, Any]) -> Plan:
        values = {key: value for key, value in given.items() if value is not None}
        for key in [key for key in values if get_origin(fields[key].annotation) is tuple]:
            values[key] = tuple(dict.fromkeys(word.strip() for word in values[key].split(",")))
        try:
            return plan(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            key = next(key for key in fields if problem["loc"][0] in (key, fields[key].alias))
            raise UserError(f"--{flags[key]} {given[key]} is not valid", fix=problem["msg"].lower()) from None

    def register(run: Run) -> Run:
        @main_guard
        def call(results: Path, **given: Any) -> None:
            run(read(given), results)

        folder = inspect.Parameter("results", inspect.Parameter.KEYWORD_ONLY, default=RESULTS, annotation=Results)
        setattr(call, "__signature__", inspect.Signature([*map(option, fields), folder]))  # noqa: B010
        call.__doc__ = run.__doc__
        app.command(name)(call)
        return run

    return register


def known(flag: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise UserError unless all of ``given`` are allowed."""
    names = list(allowed)
    for word in given:
        if word not in names:
            raise UserError(f"{flag} {word!r} is not known", fix=f"use some of {', '.join(names)}")


def device_of(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is a GPU if there is one. UserError if it is not known, or there is no GPU."""
    known("--device", [name], ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("this torch finds no GPU", where="--device cuda", fix="use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def need_testbed(delay_ms: float = 0.0) -> None:
    """End with exit code 0 and say why where no testbed (that delays packets, if they are to be) can be made."""
    reason = testbed.missing(delay=delay_ms > 0)
    if reason is not None:
        screen.print(f"skipped: {reason}", markup=False, soft_wrap=True)
        raise SystemExit(0)


@contextmanager
def measuring(
    results: Path, turns: int, device: str = "cpu"
) -> Iterator[tuple[dict[str, Any], Path, Callable[[str], None]]]:
    """Yield this machine, its folder under ``results``, which can be written to, and the function that moves a bar on
    stderr by one of ``turns``. A failed worker is one line and exit code 1."""
    host = machine.describe(device)
    folder = results / host["slug"]
    check_writable(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("starting", total=turns)
            yield host, folder, lambda text: bar.update(task, advance=1, description=text)
    except WorkerError as error:
        screen.print(f"error: a worker process failed: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def spread(name: str, values: Any) -> dict[str, float]:
    """Median and quartiles as three columns."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {name: float(middle), f"{name}_q1": float(low), f"{name}_q3": float(high)}


def save(folder: Path, name: str, host: Mapping[str, Any], plan: Plan, tables: Tables, **more: Any) -> None:
    """Write tables, and the machine and the settings behind them (and ``more``) as ``name``.json; each file whole or
    not at all."""
    for key, table in tables.items():
        write_table(folder / f"{key}.csv", table, host)
    described = {"machine": host, "settings": plan.model_dump(mode="json"), **more}
    atomic_write(folder / f"{name}.json", json.dumps(described, indent=1) + "\n")


def write_table(path: Path, table: pd.DataFrame, host: Mapping[str, Any]) -> None:
    """Write a table with the columns that say on which machine, whole or not at all."""
    text = machine.label(table, host).to_csv(index=False, lineterminator="\n", float_format="%.6g")
    atomic_write(path, text)


def show(folder: Path, table: pd.DataFrame, columns: str, values: str) -> None:
    """Print the folder on stdout, and the most important columns for the eye."""
    print(folder)
    printed = Table(*columns.split(), *values.split())
    for _, row in table.iterrows():
        cells = ["" if pd.isna(row[name]) else str(row[name])[:WIDEST] for name in columns.split()]
        cells += [f"{row[name]:.3g}" if pd.notna(row.get(name)) else "" for name in values.split()]
        printed.add_row(*cells)
    Console(stderr=True, markup=False, width=None if screen.is_terminal else 140).print(printed)


def keep(results: Path, reference: Path) -> Iterator[Path]:
    """Copy tables, settings and figures of every machine, a folder each, from ``results`` to ``reference``; yields what
    was written. Raises UserError where there is nothing. Traces stay where they are."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    if not folders:
        raise UserError("there are no results of a benchmark", where=results, fix="run: make bench")
    for folder in folders:
        for path in (*folder.glob("*.csv"), *folder.glob("*.json"), *folder.glob("figures/*.png")):
            target = reference / folder.name / path.relative_to(folder)
            atomic_write(target, path.read_bytes())
            yield target
