"""``python -m experiments.pages.side_by_side write|check``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.common.cli import main_guard
from experiments.common.files import ROOT, atomic_write
from experiments.pages.side_by_side.page import Place, pages
from experiments.pages.side_by_side.spec import PATH, load_pages

DOCS = ROOT / "docs" / "paper"
RESULTS = ROOT / "results" / "reference"
app = typer.Typer(add_completion=False)
Docs = Annotated[Path, typer.Option(help="folder of the pages")]
Results = Annotated[Path, typer.Option(help="committed results, a folder for each scale")]
Spec = Annotated[Path, typer.Option(help="what the pages show")]


def stale(made: dict[str, str], docs: Path) -> list[str]:
    """Names of files of ``docs`` that are not as they would be made, and of pages that no longer are, sorted."""
    there = {path.name for path in (*docs.glob("*.md"), *docs.glob("*.svg"))}
    wrong = {name for name, text in made.items() if name not in there or (docs / name).read_text("utf-8") != text}
    return sorted(wrong | (there - set(made)))


@app.command("write")
@main_guard
def write(docs: Docs = DOCS, results: Results = RESULTS, spec: Spec = PATH) -> None:
    """Write the pages that are not as the tables say, and delete those that are no longer made."""
    made = pages(load_pages(spec), Place(docs, results, spec))
    changed = stale(made, docs)
    for name in changed:
        if name in made:
            atomic_write(docs / name, made[name])
        else:
            (docs / name).unlink()
        print(f"{'written' if name in made else 'deleted'}: {docs / name}")
    print(f"{len(made)} files, {len(changed)} changed")


@app.command("check")
@main_guard
def check(docs: Docs = DOCS, results: Results = RESULTS, spec: Spec = PATH) -> None:
    """Compare the pages with the tables; exit code 1 and the names of those that are stale."""
    wrong = stale(pages(load_pages(spec), Place(docs, results, spec)), docs)
    for name in wrong:
        print(f"error: stale page {docs / name}; python -m experiments.pages.side_by_side write", file=sys.stderr)
    if wrong:
        raise SystemExit(1)
    print("all pages are as the tables say")


if __name__ == "__main__":
    app()
