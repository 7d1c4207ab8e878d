"""The pages of docs/paper say what the tables and the claims say, and what they ask for in vain is one line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from experiments.pages.side_by_side.__main__ import DOCS, RESULTS, app, stale
from experiments.pages.side_by_side.page import GENERATED, Place, pages
from experiments.pages.side_by_side.spec import PATH, load_pages
from experiments.spec import matrix
from experiments.verdicts.claims import load_claims

PAGES = sorted(DOCS.glob("*.md"))
LINKS = re.compile(r"\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages(load_pages(), Place(DOCS, RESULTS, PATH))


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def spec_with(tmp_path: Path, **changes: Any) -> Path:
    """A file of pages with one that has every claim and ``changes``."""
    page = {"id": "one", "title": "One", "item": "figure", "shows": "something"}
    page |= {"claims": [claim.id for claim in load_claims()], **changes}
    path = tmp_path / "pages.yaml"
    values = {"scales": ["ci"], "about": "about", "versions": {}, "pages": [page]}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def refused(tmp_path: Path, **changes: Any) -> str:
    """The one line about a page that asks for something in vain."""
    done = call("check", "--spec", str(spec_with(tmp_path, **changes)), "--docs", str(tmp_path / "docs"))
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def ranks(**changes: Any) -> dict[str, Any]:
    """A comparison of fixed ranks at ci scale."""
    values = {"title": "t", "table": "rank_sweep/table.csv", "scales": ["ci"]}
    return values | {"columns": [{"name": "rank", "ours": "rank", "theirs": ["edgc.rank"]}], **changes}


# --- what is committed -----------------------------------------------------------------------------------------------


def test_the_pages_are_as_the_tables_say(made: dict[str, str]) -> None:
    fix = "python -m experiments.pages.side_by_side write"
    assert not stale(made, DOCS), fix


def test_every_claim_is_on_one_page_with_its_verdict_at_every_scale(made: dict[str, str]) -> None:
    for claim in load_claims():
        shown = [name for name, text in made.items() if f"(`{claim.id}`)" in text]
        assert len(shown) == 1, claim.id
        rows = [line for line in made[shown[0]].splitlines() if f"(`{claim.id}`)" in line]
        for scale in load_pages().scales:
            table = pd.read_csv(RESULTS / scale / "claims.csv", keep_default_na=False)
            judged = table[table["id"] == claim.id].to_dict("records")
            found = [row for row in rows if f"| {scale} |" in row]
            assert len(found) == len(judged)
            for line, row in zip(judged, found, strict=True):
                assert f"**{line['verdict']}**" in row and line["kind"].upper() in row


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_that_it_is_made_and_its_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == GENERATED
    targets = [target for target in LINKS.findall(text) if not target.startswith("http")]
    assert targets
    for target in targets:
        assert (path.parent / target).resolve().exists(), target
    images = [line for line in text.splitlines() if line.startswith("![")]
    assert all(len(line.partition("](")[0]) > 10 for line in images), "an image without a text in its place"


def test_rows_of_a_table_are_as_long_as_its_header(made: dict[str, str]) -> None:
    for name, text in made.items():
        for block in text.split("\n\n"):
            if block.startswith("|"):
                lengths = {len(re.split(r"(?<!\\)\|", line)) for line in block.splitlines()}
                assert len(lengths) == 1, (name, block)


def test_simulated_numbers_say_so(made: dict[str, str]) -> None:
    for name, text in made.items():
        for block in text.split("\n\n"):
            if "](../../results/reference/workstation/gpt2" in block and block.startswith("Ours: "):
                assert block.endswith("SIMULATED."), (name, block)
            if block.startswith("| whose") and "Gbit/s" in block:
                assert all("SIMULATED" in line for line in block.splitlines()[2:] if not line.startswith("| paper"))


def test_the_papers_windows_and_ranks_are_those_of_the_studies_at_its_scale(made: dict[str, str]) -> None:
    windows = {run.edgc.window for run in matrix.runs("window_ablation", "paper")}  # type: ignore[attr-defined]
    for window in windows:
        assert f"| paper | {window} | 0.1 | {window // 10} |" in made["windows.md"]
    hidden = matrix.runs("rank_sweep", "paper")[0].model.hidden
    assert f"| paper | rank 64 | {100 * 64 / hidden:.1f} % | not known here |" in made["ranks.md"]


# --- write and check -------------------------------------------------------------------------------------------------


def test_check_names_what_is_stale_and_write_mends_it(tmp_path: Path) -> None:
    spec, docs = str(spec_with(tmp_path, comparisons=[ranks()])), tmp_path / "docs"
    options = ("--spec", spec, "--docs", str(docs))
    assert call("write", *options).exit_code == 0
    assert sorted(path.name for path in docs.iterdir()) == ["framework.svg", "index.md", "one.md"]
    assert call("check", *options).exit_code == 0
    page = docs / "one.md"
    page.write_text(page.read_text("utf-8").replace("| ours, ci | 4 |", "| ours, ci | 5 |"), encoding="utf-8")
    (docs / "old.md").write_text("no longer made", encoding="utf-8")
    (docs / "framework.svg").unlink()
    done = call("check", *options)
    assert done.exit_code == 1
    assert [name in done.stderr for name in ("one.md", "old.md", "framework.svg", "index.md")] == [
        True,
        True,
        True,
        False,
    ]
    assert call("write", *options).exit_code == 0
    assert call("check", *options).exit_code == 0 and not (docs / "old.md").exists()


def test_a_page_follows_its_table(tmp_path: Path) -> None:
    results = tmp_path / "reference"
    for name in ("claims.csv", "rank_sweep/table.csv"):
        (results / "ci" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / "ci" / name, results / "ci" / name)
    columns = [{"name": "loss", "ours": "validation_loss", "decimals": 3}]
    spec = load_pages(spec_with(tmp_path, comparisons=[ranks(columns=columns)]))
    place = Place(tmp_path / "docs", results, PATH)
    table = pd.read_csv(results / "ci" / "rank_sweep" / "table.csv")
    assert f"| ours, ci | {table['validation_loss'].iloc[0]:.3f} |" in pages(spec, place)["one.md"]
    table.loc[0, "validation_loss"] = 1.23456
    table.to_csv(results / "ci" / "rank_sweep" / "table.csv", index=False)
    assert "| ours, ci | 1.235 |" in pages(spec, place)["one.md"]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_unknown_names_are_one_line_with_the_nearest(tmp_path: Path) -> None:
    for changes, words in (
        ({"comparisons": [ranks(table="rank_swep/table.csv")]}, ("'rank_swep'", "rank_sweep?")),
        ({"comparisons": [ranks(table="rank_sweep/tabel.csv")]}, ("'rank_sweep/tabel.csv'", "rank_sweep/table.csv?")),
        ({"comparisons": [ranks(columns=[{"name": "n", "ours": "rnk"}])]}, ("column 'rnk'", "rank?", "page one")),
        ({"comparisons": [ranks(where={"statsu": "ok"})]}, ("column 'statsu'", "status?")),
        ({"comparisons": [ranks(where={"rank": 999})]}, ("no row", "where")),
        ({"comparisons": [ranks(columns=[{"name": "n", "theirs": ["model.hiden"]}], paper={"study": "rank_sweep"})]},
         ("model.hiden", "hidden?")),
        ({"comparisons": [ranks(paper={"study": "rank_sweep", "variants": ["r17"]})]}, ("'r17'", "r16")),
        ({"comparisons": [ranks(columns=[{"name": "n", "claim": "zero_sht"}])]}, ("claim 'zero_sht'", "zero_shot?")),
        ({"figures": [{"name": "method", "scale": "ci"}]}, ("figure 'method'", "methods?")),
        ({"settings": {"ours": [{"study": "rank_sweeep"}]}}, ("study 'rank_sweeep'", "rank_sweep?")),
        ({"policies": [{"study": "methods", "scale": "ci", "variants": ["edgc_cmq"]}]}, ("edgc_cmq", "edgc_cqm?")),
        ({"titel": "T"}, ("titel", "title?")),
    ):  # fmt: skip
        line = refused(tmp_path, **changes)
        assert all(word in line for word in words), (line, words)


def test_a_claim_is_on_one_page_alone(tmp_path: Path) -> None:
    names = [claim.id for claim in load_claims()]
    assert f"claim {names[0]} is on no page" in refused(tmp_path, claims=names[1:])
    assert f"claim {names[0]} appears twice" in refused(tmp_path, claims=[*names, names[0]])
    assert "unknown claim 'nothing'" in refused(tmp_path, claims=[*names, "nothing"])


def test_columns_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    for column, words in (
        ({"ours": "a", "low": "b"}, "two ends"),
        ({"theirs": ["edgc.rank"], "claim": "zero_shot"}, "two sources"),
        ({"only": "r16"}, "give claim as well"),
    ):
        assert words in refused(tmp_path, comparisons=[ranks(columns=[{"name": "n", **column}])])
    assert "write study/table.csv" in refused(tmp_path, comparisons=[ranks(table="table.csv")])
