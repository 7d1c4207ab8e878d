"""Settings, comparisons and the picture, of which the pages of docs/paper are made."""

from __future__ import annotations

import io
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.common import acting
from experiments.pages.side_by_side import comparison, framework, markdown, settings
from experiments.pages.side_by_side.__main__ import DOCS, RESULTS
from experiments.pages.side_by_side.spec import Column, Comparison, Setting, Sides
from experiments.spec import matrix
from experiments.verdicts import archive
from experiments.verdicts.claims import load_claims


def test_numbers_are_rounded_as_their_column_says() -> None:
    assert comparison.number(0.123456, Column(name="n")) == "0.1235"
    assert comparison.number(0.12345, Column(name="n", percent=True, decimals=1)) == "12.3 %"
    assert comparison.number(2.0, Column(name="n", factor=-1, decimals=1)) == "-2.0"
    assert comparison.number(-0.0001, Column(name="n", decimals=2)) == "0.00"
    assert comparison.number(float("nan"), Column(name="n")) == "-"
    assert comparison.number("none", Column(name="n", names={"none": "no compression"})) == "no compression"


def render(tmp_path: Path, frame: pd.DataFrame, **values: Any) -> list[list[str]]:
    """Cells of a comparison whose table is ``frame``."""
    path = tmp_path / "reference" / "ci" / "rank_sweep" / "table.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    spec = Comparison.model_validate({"title": "t", "table": "rank_sweep/table.csv", "scales": ["ci"]} | values)
    text = comparison.render(spec, tmp_path / "reference", tmp_path / "page.md", "here")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_a_column_is_spread_over_the_values_of_another(tmp_path: Path) -> None:
    frame = pd.DataFrame({"m": ["a", "a", "b"], "speed": [10, 1, 10], "t": [0.5, 0.25, 4.0]})
    columns = [{"name": "method", "ours": "m"}, {"name": "at", "ours": "t", "across": "speed", "unit": "Gbit/s"}]
    rows = render(tmp_path, frame, columns=columns, theirs="none")
    assert rows[0] == ["whose", "method", "at 1 Gbit/s", "at 10 Gbit/s"]
    assert rows[1:] == [["ours, ci", "a", "0.25", "0.5"], ["ours, ci", "b", "-", "4"]]


def test_intervals_claims_and_what_is_not_known(tmp_path: Path) -> None:
    frame = pd.DataFrame({"v": [1.0, 0.0], "low": [0.5, 0.0], "high": [1.5, 0.0], "w": [1, 2]})
    value = {"name": "v", "ours": "v", "low": "low", "high": "high", "decimals": 1}
    known = {"claim": "window_correlation", "only": "w1000", "text": "at least {}"}
    paper = {"study": "window_ablation", "variants": ["w500", "w1000"]}
    rows = render(tmp_path, frame, columns=[value | known, {"name": "w", "ours": "w"}], paper=paper)
    claimed = next(claim.paper_value for claim in load_claims() if claim.id == "window_correlation")
    assert rows[1:3] == [["paper", "not known here", ""], ["paper", f"at least {claimed}", "not known here"]]
    assert rows[3:] == [["ours, ci", "1.0 (0.5 to 1.5)", "1"], ["ours, ci", "0.0", "2"]]


def packed(tmp_path: Path, **train: Any) -> Path:
    """Committed results with one kept run of study rank_sweep at ci, of other training settings than today's."""
    run = matrix.find("rank_sweep", "ci", "r16-s1").model_dump()
    run["train"] |= train
    content = yaml.safe_dump(run).encode()
    path = tmp_path / "reference" / "ci" / "rank_sweep" / archive.NAME
    path.parent.mkdir(parents=True)
    with tarfile.open(path, mode="w:xz") as opened:
        entry = tarfile.TarInfo("r16-s1/run.yaml")
        entry.size = len(content)
        opened.addfile(entry, io.BytesIO(content))
    return tmp_path / "reference"


def test_settings_are_those_of_the_kept_runs(tmp_path: Path) -> None:
    setting = Setting(study="rank_sweep", scale="ci", run="r16-s1")
    results = packed(tmp_path, lr=0.125, a_key_of_old=1)
    found = settings.side(setting, results)
    assert found.run.train.lr == 0.125 and found.now is not None
    text = settings.table(Sides(ours=(setting,)), results)
    today = matrix.find("rank_sweep", "ci", "r16-s1").train.lr
    assert "| peak learning rate | not known here | 0.125 |" in text
    assert f"Its file now says: peak learning rate {today:g}." in text


def test_kept_runs_as_the_file_has_them_need_no_remark(tmp_path: Path) -> None:
    found = settings.side(Setting(study="rank_sweep", scale="ci", run="r16-s1"), packed(tmp_path))
    assert found.now is None


def test_a_run_that_is_not_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run 'r8-s1' is kept.*r16-s1"):
        settings.side(Setting(study="rank_sweep", scale="ci", run="r8-s1"), packed(tmp_path))


def test_captions_become_markdown() -> None:
    caption = "**Losses [nats] of ``a``.** Below,\nthe ``b``."
    assert markdown.plain(caption) == "**Losses [nats] of `a`.** Below, the `b`."
    assert markdown.alternative(caption) == "Losses (nats) of a"
    assert markdown.alternative(caption, "Both [a] and b fall.") == "Losses (nats) of a. Both (a) and b fall"
    assert markdown.table(["a"], [["x|y"]]).splitlines()[-1] == r"| x\|y |"


def test_the_picture_is_whole_and_its_texts_fit() -> None:
    root = ElementTree.fromstring(framework.svg())
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title") is not None and root.find(f"{space}desc") is not None
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = root.findall(f"{space}text")
    words = " ".join(text.text or "" for text in texts)
    paper: Any = EDGCConfig(method="edgc")
    for part in ("GDS", "CQM", "DAC", "PowerSGD", f"window of {paper.window} iterations"):
        assert part in words
    for text in texts:
        half = 0.58 * float(text.attrib["font-size"]) * len(text.text or "") / 2
        assert half < float(text.attrib["x"]) < width - half, text.text
        assert 0 < float(text.attrib["y"]) < height


def test_a_benchmarks_table_is_by_the_clock() -> None:
    columns = (Column(name="method", ours="label"), Column(name="at", ours="of_uncompressed", across="mbit_per_s"))
    machine = "intel-r-xeon-r-processor-2-cores"
    spec = Comparison(title="t", table="race_summary.csv", machine=machine, columns=columns)
    text = comparison.render(spec, RESULTS, DOCS / "page.md", "here")
    table = pd.read_csv(RESULTS / "bench" / machine / "race_summary.csv")
    bf16 = table[table["method"] == "bf16"].sort_values("mbit_per_s")["of_uncompressed"]
    assert f"| ours, by the clock | bf16 | {' | '.join(f'{value:.4g}' for value in bf16)} |" in text
    assert f"MEASURED, seeds: {table['seeds'].min()}" in text


def test_the_page_of_the_methods_says_whether_the_policy_acted() -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    for study, variant in (("policies", "cqm"), ("methods", "edgc_cqm")):
        table = pd.read_csv(RESULTS / "workstation" / study / "table.csv")
        rows = table[(table["variant"] == variant) & (table["status"] == "ok")]
        assert f"| `{study}` | workstation | EDGC (CQM) | {acting.seeds_acted(rows)} of {len(rows)} |" in text


def test_hours_are_steps_times_the_papers_iterations() -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    steps = pd.read_csv(RESULTS / "workstation" / "gpt2_12p1b_h100" / "steps.csv")
    rows = steps[(steps["method"] == "none") & ~steps["overlap"]].sort_values("gbits_per_second")
    iterations = matrix.runs("gpt2_12p1b_h100", "paper")[0].train.iterations
    hours = [f"{seconds * iterations / 3600:.0f}" for seconds in rows["seconds_step"]]
    assert f"| ours, SIMULATED | no compression | {' | '.join(hours)} |" in text
