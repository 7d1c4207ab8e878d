"""Every column of every committed table is described, and the page of them is as the program writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.pages import columns

ROOT = Path(__file__).resolve().parents[2]


def test_every_column_is_described() -> None:
    assert sum(map(len, columns.tables().values())) > 400
    assert not columns.undescribed(), f"describe it in {columns.DESCRIPTIONS}"


def test_no_description_is_left_over() -> None:
    assert not columns.unused(), f"remove it from {columns.DESCRIPTIONS}"


def test_the_page_is_as_written() -> None:
    assert (ROOT / columns.PAGE).read_text(encoding="utf-8") == columns.page(), "make numbers"


def test_a_column_takes_its_stem_and_a_table_its_own(tmp_path: Path) -> None:
    for name, header in (
        ("ci/one/t.csv", "loss_low,error"),
        ("long/one/t.csv", "loss_low,other"),
        ("bench/m/t.csv", "error"),
    ):
        path = tmp_path / "results" / "reference" / name
        path.parent.mkdir(parents=True)
        path.write_text(f"{header}\n")
    (tmp_path / "docs").mkdir()
    listed = tmp_path / "docs" / "columns.yaml"
    text = "suffixes: {_low: lower end}\ncolumns: {loss: the loss, error: in per cent, old: gone}\n"
    listed.write_text(f"{text}tables: {{bench/t.csv: {{error: in seconds}}}}\n")
    assert columns.undescribed(tmp_path) == ["one/t.csv: other"] and columns.unused(tmp_path) == ["old"]
    with pytest.raises(UserError, match=r"without a description: one/t\.csv: other"):
        columns.page(tmp_path)
    listed.write_text(listed.read_text().replace("old: gone", "other: another"))
    page = columns.page(tmp_path)
    assert "## bench/t.csv\n\n| column | what it holds |\n| --- | --- |\n| `error` | in seconds |\n" in page
    assert "| `loss_low` | the loss: lower end |\n| `error` | in per cent |\n| `other` | another |\n" in page
