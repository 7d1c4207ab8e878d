"""What the benchmarks' commands read from the command line, show on the screen and write to a folder."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.bench import machine, testbed
from experiments.bench.children import ChildError
from experiments.common.files import atomic_write, check_writable

RESULTS = Path("results/bench")
Results = Annotated[Path, typer.Option(help="a folder named after the machine is made in it")]
WIDEST = 40  # characters of a cell on the screen
screen = Console(stderr=True)


@contextmanager
def measuring(
    results: Path, turns: int, device: str = "cpu"
) -> Iterator[tuple[dict[str, Any], Path, Callable[[str], None]]]:
    """Yields this machine, its folder under ``results``, which can be written to, and the function that moves a bar on
    stderr by one of ``turns``. A failed worker is one line and exit code 1."""
    host = machine.describe(device)
    folder = results / host["slug"]
    check_writable(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("starting", total=turns)
            yield host, folder, lambda text: bar.update(task, advance=1, description=text)
    except ChildError as error:
        screen.print(f"error: a worker process failed: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def need_testbed(delay_ms: float = 0.0) -> None:
    """Where no testbed (that delays packets, if they are to be) can be made, say why and end with exit code 0."""
    reason = testbed.missing(delay=delay_ms > 0)
    if reason is not None:
        screen.print(f"skipped: {reason}", markup=False, soft_wrap=True)
        raise SystemExit(0)
    # So that the namespaces are removed also when somebody ends the program.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def write(
    folder: Path, name: str, host: Mapping[str, Any], plan: Any, tables: Mapping[str, pd.DataFrame], **more: Any
) -> None:
    """:func:`save`, and the folder on stdout."""
    save(folder, name, host, plan, tables, **more)
    print(folder)


def save(
    folder: Path, name: str, host: Mapping[str, Any], plan: Any, tables: Mapping[str, pd.DataFrame], **more: Any
) -> None:
    """Tables, and the machine and the settings behind them (and ``more``) as ``name``.json; each file whole or not at
    all."""
    for key, table in tables.items():
        write_table(folder / f"{key}.csv", table, host)
    described = {"machine": host, "settings": asdict(plan), **more}
    atomic_write(folder / f"{name}.json", json.dumps(described, indent=1) + "\n")


def write_table(path: Path, table: pd.DataFrame, host: Mapping[str, Any]) -> None:
    """One table with the columns that say on which machine, whole or not at all."""
    text = machine.label(table, host).to_csv(index=False, lineterminator="\n", float_format="%.6g")
    atomic_write(path, text)


def show(table: pd.DataFrame, columns: list[str], values: list[str]) -> None:
    """The most important columns, for the eye."""
    printed = Table(*columns, *values)
    for _, row in table.iterrows():
        cells = ["" if pd.isna(row[name]) else str(row[name])[:WIDEST] for name in columns]
        cells += [f"{row[name]:.3g}" if pd.notna(row.get(name)) else "" for name in values]
        printed.add_row(*cells)
    Console(stderr=True, markup=False, width=None if screen.is_terminal else 140).print(printed)
