"""``python -m experiments.data prepare --scale ci --name stdlib``: what a scale or a study trains on, prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.common.cli import main_guard
from experiments.data.folder import prepare
from experiments.spec import matrix

app = typer.Typer(add_completion=False)


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
    prepare(matrix.data_config(scale, name), out or Path("results") / scale / "data" / name)


if __name__ == "__main__":
    app()
