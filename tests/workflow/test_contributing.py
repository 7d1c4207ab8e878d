"""What CONTRIBUTING.md tells to do for a study, a figure, a scale and a strategy, done literally in a copy of the
checkout."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest

from tests.workflow.checkout_copy import ROOT, Checkout, copy_repository

LINES = 10  # of what has to be done: the sentence and the file


def told(kind: str) -> tuple[Path, str, str]:
    """(file, its content, Snakemake's arguments) that the section about adding a ``kind`` names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"## Add a {kind}\n")[2].partition("\n## ")[0]
    _, block, _ = re.split(r"^```\w*\n", section, flags=re.MULTILINE)
    first = section.partition("```")[0].strip().splitlines()
    assert len([line for line in (*first, *block.splitlines()) if line]) <= LINES
    file, command = re.findall(r"`([^`]+)`", section)[:2]
    assert command.startswith(".venv/bin/snakemake ")
    return Path(file), block, command.removeprefix(".venv/bin/snakemake ")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A copy with the real programs in which all three have been added."""
    path = tmp_path_factory.mktemp("contributor")
    copy_repository(path)
    for kind in ("study", "figure", "scale"):
        file, content, _ = told(kind)
        assert not (path / file).exists()
        (path / file).write_text(content)
    return Checkout(path)


def test_the_commands_plan_what_was_added(followed: Checkout) -> None:
    study, figure, scale = (
        told(kind)[2].replace("-c2 ", "").removeprefix("-n ") for kind in ("study", "figure", "scale")
    )
    of_study, of_figure, of_scale = followed.plan([study], [figure], scale.split())
    assert of_study == {"data": 1, "train": 2, "two_ranks_tables": 1, "two_ranks": 1}
    assert of_figure["figure"] == of_figure["methods_tables"] == 1 and "two_ranks_tables" not in of_figure
    assert {"methods_tables", "two_ranks_tables", "evaluate", "claims", "report_html"} < of_scale.keys()
    assert of_scale["train"] >= 14


def test_the_figure_draws(followed: Checkout, tmp_path: Path) -> None:
    reference = str(ROOT / "results" / "reference" / "ci")
    done = followed.run("paper_figures", "validation_loss", "--results", reference, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert {path.suffix for path in tmp_path.iterdir()} == {".pdf", ".png", ".svg"}


def test_the_scale_has_settings_that_fit(followed: Checkout) -> None:
    done = followed.run("experiments.spec.matrix", "--study", "methods", "--scale", "small", COLUMNS="200")
    assert done.returncode == 0, done.stdout
    assert len(list(itertools.filterfalse(lambda line: "-s1" not in line, done.stdout.splitlines()))) == 3
    assert "DP2" in done.stdout and "method=edgc" in done.stdout


STRATEGY = Path(__file__).with_name("post_local_sgd.py")  # none of the library's


def test_a_strategy_of_one_file_is_found_and_held_to_the_laws(tmp_path: Path) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a strategy\n")[2]
    told, _, tests = section.partition("\n## ")[0].strip().partition("\n\n`pytest ")
    assert len([line for line in told.splitlines() if line]) <= LINES
    file, *_ = re.findall(r"`([^`]+)`", told)
    command = tests.partition("`")[0].replace("<name>", STRATEGY.stem).split()
    names = set(re.findall(r"`(\w+)(?:\(\))?`", told)) - {"LocalUpdates", "MomentumStrategy", "engine", "own_state"}
    assert {name for name in names if name not in STRATEGY.read_text(encoding="utf-8")} == set(), "it does not follow"
    skipped = shutil.ignore_patterns("__pycache__", "integration", "workflow", "docs", "slurm", "gpu")
    for folder in ("edgc", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    place = tmp_path / file.replace("<name>", STRATEGY.stem)
    assert not place.exists()
    shutil.copy(STRATEGY, place)
    done = Checkout(tmp_path).run("pytest", *command, "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 7, done.stdout
