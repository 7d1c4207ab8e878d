"""What would compression do to a model? ``python -m edgc.rehearsal`` trains W replicas of it in this process and says
what they sent, what that did to their gradients, and how the loss went."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgc.checks import integer, require
from edgc.config import EDGCConfig
from edgc.errors import Parser, UserError
from edgc.rehearsal import gpt
from edgc.rehearsal.rehearsal import Loss, Rehearsal, model_loss
from edgc.strategies.base import StrategyConfig

COLUMNS = ["method", "settings", "strategy", "model", "replicas", "steps", "seed", "loss", "validation", "bytes"]
COLUMNS += ["share", "rank", "mean_error", "gap", "skipped", "torch", "device", "seconds"]  # of the table
_TAIL = 0.1  # share of the steps over whose losses the final one is a mean


@dataclass
class Task:
    """What is trained: a model, its optimizer, batches of one replica each, the loss, and what is held out."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Loss = model_loss
    validation: Sequence[Any] = ()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options.

    Raises:
        UserError: they are no such options.
    """
    parser = Parser("python -m edgc.rehearsal", description=__doc__)
    add = parser.add_argument
    say = "function that returns (model, optimizer, iterable of batches) or these and loss(model, batch); without one a"
    add("target", nargs="?", metavar="FILE.py:FUNCTION", help=f"{say} GPT of 0.4 M parameters learns Python's library")
    add("--replicas", type=int, default=8, metavar="W")
    add("--steps", type=int, default=200)
    add("--method", default="none", help="of compression (none)")
    add("--rank", type=int, help="of a low-rank method")
    add("--set", nargs="+", default=[], action="extend", metavar="KEY=VALUE", help="other settings of the method")
    add("--strategy", nargs="+", default=["every_step"], metavar="NAME", help="what is exchanged, then its KEY=VALUE")
    add("--micro-batches", type=int, default=1, metavar="N", help="batches of each replica in a step (1)")
    add("--clip", type=float, help="norm to which gradients are clipped (1 for the GPT)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--seed", type=int, default=0)
    add("--compare", action="store_true", help="train without compression, too, on the same batches")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write curves for TensorBoard")
    add("--table", type=Path, metavar="FILE.csv", help="add a row with the results")
    options = parser.parse_args(arguments)
    for key in ("replicas", "steps", "micro_batches"):
        integer(f"--{key.replace('_', '-')}", getattr(options, key), 2 if key == "replicas" else 1)
    require(0 <= options.seed < 2**63, "--seed", options.seed, "use a whole number of at least 0 and below 2**63")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        what = f"--device = {options.device} cannot be used: {str(error).splitlines()[0]}"
        raise UserError(what, fix="use cpu, or cuda where torch sees a GPU") from None
    return options


def settings(items: Sequence[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` as a mapping, values as in JSON or else text; dots in keys lead into sections.

    Raises:
        UserError: an item has no ``=``.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"{option} {item} is not valid", fix="use KEY=VALUE, and FILE.py:FUNCTION before options")
        inner, (*sections, last) = found, key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise UserError(f"{option} {item} follows another {section}=", fix=f"give {section} or parts of it")
        try:
            inner[last] = json.loads(value)
        except json.JSONDecodeError:
            inner[last] = value
    return found


def own_task(target: str) -> Task:
    """What the user's function returns.

    Raises:
        UserError: there is no such file or function, or it returns something else.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py" or not name:
        raise UserError(f"there is no Python file for {target}", fix="give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"there is no function {name}", where=path, fix="give FILE.py:FUNCTION")
    made = function()
    if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Module):
        fix = "return (model, optimizer, batches) or (model, optimizer, batches, loss)"
        raise UserError(f"{name} returned {type(made).__name__}", where=path, fix=fix)
    if not isinstance(made[2], Iterable):
        what, fix = f"{name} returned batches that are {made[2]!r}", "return an iterable of them"
        raise UserError(what, where=path, fix=fix)
    if len(made) == 4 and not callable(made[3]):
        what, fix = f"{name} returned a loss that is {made[3]!r}", "return a function of the model and a batch"
        raise UserError(what, where=path, fix=fix)
    return Task(*made)


def gpt_task(seed: int) -> Task:
    """The built-in model on Python's standard library."""
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = gpt.library_text()
    end = int(len(text) * (1 - gpt.HELD_OUT))
    held_out = list(itertools.islice(gpt.batches(text[end:], 16, model.context, 1), 32))
    return Task(model, optimizer, gpt.batches(text[:end], 4, model.context, seed), validation=held_out)


def without_end(batches: Iterable[Any], target: str) -> Iterator[Any]:
    """Batches again and again.

    Raises:
        UserError: they cannot be begun again.
    """
    while True:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            yield batch
        if count == 0 or iter(batches) is batches:
            raise UserError("the batches have ended", where=target, fix="return more, or an iterable to begin again")


def moved(batch: Any, device: str) -> Any:
    """A batch, its tensors on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


class Run:
    """A rehearsal, the losses of its steps, and its seconds."""

    def __init__(self, task: Task, options: argparse.Namespace, config: EDGCConfig, strategy: StrategyConfig) -> None:
        self.task, self.losses, self.seconds = task, list[float](), 0.0
        task.model.to(options.device)
        torch.manual_seed(options.seed)
        self.rehearsal = Rehearsal(
            task.model,
            optimizer=task.optimizer,
            config=config,
            strategy=strategy,
            replicas=options.replicas,
            iterations=options.steps,
            loss=task.loss,
            micro_batches=options.micro_batches,
            clip=options.clip,
        )

    def step(self, batches: Sequence[Any]) -> float:
        """Train a step; returns the bytes that each replica sent."""
        before, started = self.rehearsal.bytes, time.perf_counter()
        self.losses.append(self.rehearsal.step(batches))
        self.seconds += time.perf_counter() - started
        return self.rehearsal.bytes - before

    @property
    def loss(self) -> float:
        """Mean of the last losses."""
        tail = self.losses[-max(1, int(_TAIL * len(self.losses))) :]
        return sum(tail) / len(tail)

    @torch.no_grad()
    def validation(self) -> float:
        """Mean loss of what is held out, of the mean of the replicas' weights; nan where nothing is."""
        model = self.rehearsal.averaged().eval()
        losses = [float(self.task.loss(model, batch)) for batch in self.task.validation]
        return sum(losses) / len(losses) if losses else math.nan


class Writer:
    """Curves for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"--tensorboard needs TensorBoard: {error}", fix="pip install tensorboard") from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"--tensorboard cannot be written: {error}", fix="choose another folder") from None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def train(options: argparse.Namespace) -> list[Run]:
    """Train the replicas, and with ``--compare`` as many without compression; a line on stderr says how far it is."""
    method, more = {"method": options.method, "rank": options.rank}, settings(options.set, "--set")
    if twice := method.keys() & more.keys():
        key = min(twice)
        raise UserError(f"--set {key}= is another place for --{key}", fix=f"give --{key} alone")
    config = EDGCConfig.from_dict({key: value for key, value in method.items() if value is not None} | more)
    name, *items = options.strategy
    strategy = StrategyConfig.from_dict({"name": name, **settings(items, "--strategy")})
    if options.clip is None and options.target is None:
        options.clip = 1.0
    write = Writer(options.tensorboard) if options.tensorboard else None
    choices = [(config, strategy), *[(EDGCConfig(), StrategyConfig.from_dict("every_step"))] * options.compare]
    runs = []
    for each in choices:
        torch.manual_seed(options.seed)
        runs.append(Run(own_task(options.target) if options.target else gpt_task(options.seed), options, *each))
    batches = (moved(batch, options.device) for batch in without_end(runs[0].task.batches, str(options.target)))
    whole, dense = sys.stderr.isatty(), runs[0].rehearsal.dense_bytes
    with contextlib.closing(write) if write else contextlib.nullcontext():
        for step in range(1, options.steps + 1):
            taken = [list(itertools.islice(batches, options.micro_batches)) for _ in range(options.replicas)]
            given = taken if options.micro_batches > 1 else [batch for (batch,) in taken]
            sent, *_ = [run.step(given) for run in runs]
            values = {"loss": runs[0].losses[-1], "bytes": sent, "share of dense": sent / dense}
            values |= {"entropy": runs[0].rehearsal.entropy, "error of the mean": runs[0].rehearsal.mean_error}
            if options.compare:
                values["loss without compression"] = runs[1].losses[-1]
            if write:
                write(step, values)
            if whole or step % max(1, options.steps // 10) == 0 or step == options.steps:
                other = f" (without compression {runs[1].losses[-1]:.4f})" if options.compare else ""
                line = f"step {step}/{options.steps}: loss {values['loss']:.4f}{other}, {sent:,.0f} bytes, "
                line += f"{sent / dense:.2%} of dense"
                print(f"\r\033[K{line}" if whole else line, end="" if whole else "\n", file=sys.stderr, flush=True)
    if whole:
        print(file=sys.stderr)
    return runs


def check_table(path: Path) -> None:
    """Make a table that there is not yet.

    Raises:
        UserError: it cannot be written, or has other columns.
    """
    try:
        with path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            columns = next(csv.reader(file), None)
            if columns is None:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--table cannot be written: {error}", fix="choose another file") from None
    if columns not in (None, COLUMNS):
        raise UserError(f"--table {path} has other columns", fix="choose another file")


def append(path: Path, values: dict[str, Any]) -> None:
    """Add a row to the table. Raises ``UserError`` where there is no room for it."""
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(values)
    except OSError as error:
        raise UserError(f"--table cannot be written: {error}", fix="make room, or choose another file") from None


def row(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Results for a table."""
    report = run.rehearsal.report()
    return {
        "method": options.method,
        "settings": " ".join([*([] if options.rank is None else [f"rank={options.rank}"]), *options.set]),
        "strategy": " ".join(options.strategy),
        "model": options.target or "gpt",
        "replicas": report.replicas,
        "steps": report.steps,
        "seed": options.seed,
        "loss": run.loss,
        "validation": run.validation(),
        "bytes": report.sent,
        "share": report.share,
        "rank": report.rank,
        "mean_error": report.mean_error,
        "gap": report.gap,
        "skipped": report.skipped,
        "torch": torch.__version__,
        "device": str(run.rehearsal.device),
        "seconds": run.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    try:
        options = parse(arguments)
        if options.table:
            check_table(options.table)
        runs = train(options)
        print(runs[0].rehearsal.report())
        for run, what in zip(runs, ("", " without compression"), strict=False):
            held_out = run.validation()
            text = f"loss of the last steps{what} {run.loss:.4f}"
            print(text + (f", held out {held_out:.4f}" if math.isfinite(held_out) else ""))
        if options.table:
            append(options.table, row(options, runs[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
