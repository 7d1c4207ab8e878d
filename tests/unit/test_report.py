"""The report shows what the tables hold, all of it, and nothing that they do not hold."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lxml import html

from edgc.config import methods
from edgc.errors import UserError
from experiments.common.figures import INPUTS
from experiments.pages import board, claim_rows, curves, pictures, report
from experiments.pages.kept import Kept
from experiments.spec import matrix
from tests.unit import synthetic_report
from tests.unit.synthetic_report import HOSTILE

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = sorted(path for path in (ROOT / "results" / "reference").iterdir() if (path / "claims.csv").is_file())


def page_of(root: Path) -> tuple[str, Any]:
    text = report.render(Kept(root, root / "report.html"))
    return text, html.fromstring(text)


def data(tree: Any, name: str) -> Any:
    return json.loads(tree.get_element_by_id(name).text)


def words(node: Any) -> str:
    return " ".join(node.text_content().split())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_report.results(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def made(root: Path) -> tuple[str, Any]:
    return page_of(root)


@pytest.fixture(params=REFERENCES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return Kept(request.param, tmp_path / "report.html")


def test_every_claim_has_a_row_with_its_values(root: Path, made: tuple[str, Any]) -> None:
    text, tree = made
    assert page_of(root)[0] == text, "the same bytes again"
    rows = tree.xpath("//tbody[@data-claim]")
    assert [row.get("data-claim") for row in rows] == [row["id"] for row in synthetic_report.CLAIMS]
    for row, line in zip(rows, synthetic_report.CLAIMS, strict=True):
        text = words(row)
        assert line["verdict"] in text and " ".join(str(line["claim"]).split()) in text
        assert str(line["kind"]).upper() in text and claim_rows.rounded(str(line["our_value"] or "–")) in text
        assert (row.get("class").split() == ["claim", "simulated"]) == (line["kind"] == "simulated")
    simulated, measured = (words(row) for row in rows[:2])
    assert "-46.45 %" in simulated and "-27.6 to -1.49 %" in simulated and "6 bandwidths" in simulated
    assert "1, 2" in measured and "0123456789 + changes" in measured, "seeds and commit"
    assert rows[0].xpath(".//*[@data-image='figure-gpt2_12p1b_h100']")
    assert rows[1].xpath(".//a[@href='methods/table.csv']")


def test_the_interval_of_a_claim_is_that_of_the_values_that_were_judged(tmp_path: Path) -> None:
    claims = {claim.id: claim for claim in claim_rows.load_claims()}
    fixed = {"variant": "s", "status": "ok", "alpha": 0.1, "beta": 0.25, "share_of_step": 0.2}
    rows = [fixed | {"seed": seed, "change_percent": change} for seed, change in ((1, -90.0), (2, -92.0), (3, -94.0))]
    table = tmp_path / "sampling_ablation" / "timings.csv"
    synthetic_report.write(table, rows)
    # The t quantile of two degrees of freedom, 4.3027, times 2 / sqrt(3).
    assert claim_rows.interval_of(tmp_path, claims["entropy_cost"], "-92") == "-96.97 to -87.03"
    assert claim_rows.interval_of(tmp_path, claims["entropy_cost"], "-91") == "", "not the table that was judged"
    synthetic_report.write(table, rows[:1])
    assert claim_rows.interval_of(tmp_path, claims["entropy_cost"], "-90") == "", "one seed has none"
    fixed = {"variant": "edgc_cqm", "status": "ok", "method": "edgc", "policy": "cqm", "factor_dtype": "fp32"}
    fixed |= {"bytes_ratio": 0.4, "ranks_used": 5, "windows_inside": 0.6, "acted": True}
    rows = [fixed | {"seed": seed, "gap_nats": gap} for seed, gap in ((1, 0.001), (2, 0.0012), (3, 0.0011))]
    synthetic_report.write(tmp_path / "methods" / "table.csv", rows)
    found = claim_rows.interval_of(tmp_path, claims["accuracy_preserved"], "worse within the margin")
    assert found == "+0.0011 nats, +0.0009 to +0.0013", "words that judge a difference have its interval"


def test_every_number_of_the_board_is_that_of_its_table(kept: Kept) -> None:
    rows = list(board.rows(kept))
    sources = {row.source for row in rows}
    tables = {name: pd.read_csv(kept.root / name, keep_default_na=False, na_values=[""]) for name in sources}
    assert len(rows) == sum(map(len, tables.values())) > 0
    for row in rows:
        table = tables[row.source]
        [line] = table[table["variant"] == row.variant].to_dict("records")
        assert row.label == line["label"] and row.seeds == line["n"] and row.family != "other"
        trials = row.study == "budgets"  # the best trial of each method, over the best without compression
        share, gap = ("bytes_ratio", "above_best_nats") if trials else ("bytes_ratio_mean", "gap_nats_mean")
        assert (row.bytes, row.bytes_bf16, row.gap) == (line[share], 2 * line[share], line[gap])
        assert not trials or (row.verdict in ("", "not tested") and row.low is None), "trials decide nothing"
        assert not trials or row.family != "edgc" or row.verdict == "not tested", "its rank hardly moved in them"
        if not row.variant.endswith("none") and row.n > 1:
            assert (row.low, row.high) == (line["gap_nats_low"], line["gap_nats_high"])


def test_table_and_plot_of_the_board_have_the_same_rows_with_one_seed_last(made: tuple[str, Any]) -> None:
    _, tree = made
    records = data(tree, "board-data")["rows"]
    rows = tree.xpath("//table[@id='board-table']/tbody/tr")
    assert len(records) == len(rows) == len(synthetic_report.VARIANTS) + 3
    for record, row in zip(records, rows, strict=True):
        cells = [words(cell) for cell in row]
        assert cells[0] == " ".join(record["label"].split()) and cells[7:] == [record["verdict"], record["study"], "ci"]
        shares = [record["bytes"], record["bytes_bf16"]]
        assert [float(cell.removesuffix(" %")) / 100 for cell in cells[3:5]] == pytest.approx(shares, rel=5.1e-3)
        assert (float(cells[5]) if cells[5] else None) == pytest.approx(record["gap"], abs=5.1e-5)
        assert bool(cells[6]) == (record["low"] is not None)
    assert [record["n"] < 2 for record in records] == [False] * (len(records) - 2) + [True] * 2
    by = {(record["study"], record["variant"]): record for record in records}
    assert by["methods", "edgc_cqm"]["gap"] == 0.001171 and by["methods", "edgc_cqm"]["family"] == "edgc"
    assert by["methods", "lost"] | {"n": 0, "gap": None, "low": None} == by["methods", "lost"], "diverged, and kept"
    assert by["methods", "none"]["low"] is None, "a difference from itself is no estimate"


def test_every_method_has_a_family() -> None:
    families = {(kind.method, policy): board.family_of(kind.method, policy) for kind in methods()
                for policy in [getattr(kind, "policy", "")]}  # fmt: skip
    assert len(families) >= 12 and "other" not in families.values()
    assert families["topk", ""] == "sparsification" and families["sign", ""] == "quantization"
    assert families["edgc", "cqm"] == "edgc" and families["edgc", "schedule"] == "given"
    assert board.family_of("from_elsewhere", "") == "other"


def test_curves_are_those_of_all_runs(root: Path, made: tuple[str, Any]) -> None:
    _, tree = made
    study = data(tree, "curves-data")["studies"]["methods"]
    table = pd.read_csv(root / "methods" / "curves.csv")
    assert len(study["runs"]) == table.groupby(["variant", "seed"]).ngroups
    for run in study["runs"]:
        variant = study["variants"][run["of"]]["variant"]
        rows = table[(table["variant"] == variant) & (table["seed"] == run["seed"])].set_index("iteration")
        assert len(run["x"]) <= curves.POINTS
        np.testing.assert_allclose(run["y"], rows.loc[run["x"], "train_loss"], rtol=5.1e-5)
        np.testing.assert_allclose(run["b"], rows.loc[run["x"], "bytes"] / 1e6, rtol=5.1e-5)
        for step, loss in run["v"]:
            assert loss == pytest.approx(np.log(rows.loc[step, "validation_perplexity"]), rel=1e-4)
        if run["status"] == "ok":
            assert (run["x"][0], run["x"][-1]) == (1, synthetic_report.STEPS) and len(run["v"]) == 3


def test_what_is_missing_is_said(root: Path, made: tuple[str, Any], tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "ci")
    shutil.rmtree(copy / "figures")
    for name in ("curves.csv", "provenance.yaml", "summary.csv"):
        (copy / "methods" / name).unlink()
    before, after = words(made[1]), words(page_of(copy)[1])
    for part in ("No curves.csv is here", "No figure of this study is here",
                 "No record of machine and versions is kept here"):  # fmt: skip
        assert after.count(part) > before.count(part), part
    (tmp_path / "empty" / "ci").mkdir(parents=True)
    empty = words(page_of(tmp_path / "empty" / "ci")[1])
    for part in ("There is no claims.csv", "No comparison of methods", "No curves.csv", "No figure is here"):
        assert part in empty
    with pytest.raises(UserError, match="no results at scale paper"):
        report.main.__wrapped__("paper", tmp_path)  # type: ignore[attr-defined]


def test_labels_are_text_and_nothing_is_fetched_or_run(made: tuple[str, Any]) -> None:
    text, tree = made
    assert HOSTILE not in text and "onerror=alert(2)>" not in text
    assert len(tree.xpath("//script")) == 3, "two of data, one of ours"
    assert sum(" ".join(HOSTILE.split()) in words(row) for row in tree.xpath("//tbody/tr")) >= 3
    assert HOSTILE in {record["label"] for record in data(tree, "board-data")["rows"]}
    assert not tree.xpath("//img[not(starts-with(@src, 'data:image/'))]")
    for value in tree.xpath("//@src | //@href | //@srcset | //@action | //@data"):
        assert not re.match(r"(?i)\s*(https?:|//|javascript:)", value), value
    assert not tree.xpath("//@*[starts-with(name(), 'on')]")
    [policy] = tree.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    assert policy.startswith("default-src 'none'"), "not by style or script either"


def test_figures_have_texts_and_simulated_ones_say_so(made: tuple[str, Any]) -> None:
    _, tree = made
    figures = {node.get("id"): node for node in tree.xpath("//figure[@id]")}
    assert set(figures) == {"figure-methods", "figure-gpt2_12p1b_h100", "figure-a-machine-bench"}
    for name, node in figures.items():
        [alt] = node.xpath(".//img/@alt")
        assert len(alt) > 10 and "**" not in alt and "``" not in alt
        assert ("simulated" in (node.get("class") or "")) == ("SIMULATED" in words(node)) == ("gpt2" in name)
    assert figures["figure-methods"].xpath(".//a[@href='figures/methods.png']")


def test_a_study_that_was_removed_leaves_the_page(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and figures outlive the file of their study: a copy of the project may keep only a few."""
    shutil.copytree(matrix.FOLDER / "scales", tmp_path / "experiments" / "scales")
    studies = tmp_path / "experiments" / "studies"
    shutil.copytree(matrix.FOLDER / "studies" / "bases", studies / "bases")
    shutil.copy(matrix.study_path("methods"), studies)
    monkeypatch.setattr(matrix, "FOLDER", tmp_path / "experiments")
    _, tree = page_of(root)
    assert "figure-methods" in tree.xpath("//figure/@id")


def test_runs_are_told_and_linked_where_their_folders_are(made: tuple[str, Any]) -> None:
    _, tree = made
    text = words(tree.get_element_by_id("made-methods"))
    assert tree.xpath("//*[@id='made-methods']//a[@href='methods/none-s1']")
    assert not tree.xpath("//a[@href='methods/none-s2']") and "2 diverged, 12 ok" in text
    assert "2 versions made these runs" in text
    assert "A processor, 2 cores, no GPU, Linux" in words(tree.get_element_by_id("made"))


def test_committed_results_fit_and_every_claim_is_shown(kept: Kept) -> None:
    page = report.render(kept)
    assert len(page.encode()) < 5_000_000
    rows = html.fromstring(page).xpath("//tbody[@data-claim]")
    table = pd.read_csv(kept.root / "claims.csv", keep_default_na=False)
    assert [row.get("data-claim") for row in rows] == list(table["id"])
    found = claim_rows.rows(kept, [])
    assert found is not None
    for row, cells, line in zip(rows, found, table.to_dict("records"), strict=True):
        paper, seeds = str(line["paper_value"]), [line["n"], line["n_most"]]
        assert cells["paper"].removesuffix(" %") in (paper, paper.removesuffix(".0"))
        assert cells["n"] == " to ".join(str(int(float(n))) for n in seeds if n)
        paths = [path for key in ("evidence", "beside") for path in line[key].split("; ") if path]
        assert [link.name for link in cells["evidence"]] == (paths if line["evidence"] else [])
        assert line["verdict"] in words(row) and claim_rows.rounded(str(line["our_value"])) in words(row)
        assert not line["evidence"] or row.xpath(".//a/text()[contains(., '.csv')]")


def test_captions_are_rendered_and_run_nothing() -> None:
    shown = pictures.rendered("The *rest* <b>is</b> `code`. <script>1</script>")
    assert "<em>rest</em>" in shown and "&lt;b&gt;" in shown and "<code>code</code>" in shown and "<script" not in shown
    for text in (
        "[x](JavaScript:alert(1))",
        "[x](data:text/html,y)",
        "[x][y]\n\n[y]: vbscript:y",
        "[x](<java\tscript:y>)",
    ):
        assert "href" not in pictures.rendered(text)
    for address in ("https://a.b/c?d=e#f", "mailto:a@b.c", "methods.csv", "../a/b.csv#c", "#figure-a"):
        assert f'href="{address}"' in pictures.rendered(f"[x]({address})")


def test_a_claim_opens_to_the_figure_of_its_evidence() -> None:
    for evidence, figures, shown in (
        ("entropy_trend/moments.csv", set(INPUTS), "entropy_moments"),
        ("entropy_trend/table.csv", set(INPUTS), "entropy_trend"),
        ("window_ablation/correlation.csv", set(INPUTS), "window_correlation"),
        ("window_ablation/correlation.csv", {"window_ablation"}, "window_ablation"),
        ("methods/table.csv", {"learning_curves_methods"}, "learning_curves_methods"),
        ("methods/table.csv", {"rank_sweep"}, None),
        (None, set(INPUTS), None),
    ):
        assert claim_rows.figure_of(evidence, (evidence or "").partition("/")[0], figures) == shown
