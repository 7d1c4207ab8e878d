"""A table is read as it was written, or refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.analyse.tables import write_table
from experiments.verdicts import claims, measured, regression
from paper_figures import inputs

ROWS = [{"variant": f"r{rank}", "status": "ok", "loss": 5.0 + rank / 64} for rank in (4, 8, 16)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "ci" / "methods"
    folder.mkdir(parents=True)
    write_table(folder / "table.csv", ROWS)
    return folder / "table.csv"


def test_a_damaged_table_is_refused_by_whoever_reads_it(table: Path) -> None:
    root, content = table.parent.parent, table.read_bytes()
    check = regression.Check(study="methods", kind="rows", column="status", key=["variant"])
    for read, spoilt, problem in (
        (lambda: inputs.read(root, "methods"), content[:-3], "is cut short"),
        (lambda: measured.read(root, "methods/table.csv"), content[:-3], "is cut short"),
        (lambda: regression.read_table(root, check, "make it"), b"", "is empty"),
        (lambda: inputs.read(root, "methods"), b"a,b\n1,2\n1,2,3,4\n", "is not a table"),
    ):
        table.write_bytes(content)
        assert len(read()) == 3
        table.write_bytes(spoilt)
        with pytest.raises(UserError, match=rf"table\.csv {problem}.*delete it and start again") as caught:
            read()
        assert f"(in {table})" in str(caught.value)


def test_committed_lists_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    """At the end of an entry the rest is valid: fewer claims would be judged, and fewer tolerances checked."""
    for source, load, entry in (
        (claims.CLAIMS, claims.load_claims, "\n  - id:"),
        (regression.TOLERANCES, regression.load_tolerances, "\n  - "),
    ):
        path = tmp_path / source.name
        shutil.copy(source, path)
        assert load(path)
        text = path.read_text()
        path.write_text(text[: text.rindex(entry) + 1])
        with pytest.raises(UserError, match=r"cut short .*\.yaml.*version control"):
            load(path)
