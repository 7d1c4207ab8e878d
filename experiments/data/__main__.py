"""``python -m experiments.data prepare --scale ci --name stdlib``: what a scale or a study trains on, prepared."""

from __future__ import annotations

import itertools
import os
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
    if name == default.path:
        return default
    studies, _ = matrix.all_runs(scale)
    known: dict[str, DataConfig] = {}
    for run in itertools.chain.from_iterable(studies.values()):
        known.setdefault(run.data.path, run.data)  # the first one, as in the workflow
    if name not in known:
        raise UserError(
            f"no data.path = {name!r} at scale {scale}", where=path, fix=nearest(name, sorted({*known, default.path}))
        )
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
    tokenizer_files: Annotated[Path | None, typer.Option(help="Folder with GPT-2's tokenizer files.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that tokenise [all cores].")] = None,
) -> None:
    """Read a corpus, train or load its tokenizer and write Megatron indexed datasets."""
    folder = out or Path("results") / scale / "data" / name
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read by `tokenizers`
    prepare(find_config(scale, name), folder, tokenizer_files=tokenizer_files)


if __name__ == "__main__":
    app()
