"""``python -m experiments.data prepare --scale ci --name stdlib``: what a scale or a study trains on, prepared."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError, nearest
from experiments.common.cli import main_guard
from experiments.common.yaml_settings import validate
from experiments.data.folder import prepare
from experiments.spec import matrix
from experiments.spec.settings import DataConfig

app = typer.Typer(add_completion=False)


def find_config(scale: str, name: str) -> DataConfig:
    """The ``data`` settings with this ``path``, of the scale or else of a study; ``UserError`` where there are none."""
    path = matrix.scale_path(scale)
    default = validate(DataConfig, matrix.load_scale(scale).defaults.get("data", {}), f"{path}, data")
    known = {default.path: default}
    for run in itertools.chain.from_iterable(matrix.all_runs(scale).values()) if name not in known else ():
        known.setdefault(run.data.path, run.data)  # the first one, as in the workflow
    if name not in known:
        raise UserError(f"no data.path = {name!r} at scale {scale}", where=path, fix=nearest(name, sorted(known)))
    return known[name]


@app.callback()
def _group() -> None:
    """Prepare the text that models are trained on."""


@app.command("prepare")
@main_guard
def prepare_command(
    scale: Annotated[str, typer.Option(help="Scale file with the data settings.")] = "ci",
    name: Annotated[str, typer.Option(help="data.path of the settings to prepare.")] = "stdlib",
    out: Annotated[Path | None, typer.Option(help="Output folder [results/<scale>/data/<name>].")] = None,
) -> None:
    """Read a corpus, train or load its tokenizer and write Megatron indexed datasets."""
    prepare(find_config(scale, name), out or Path("results") / scale / "data" / name)


if __name__ == "__main__":
    app()
