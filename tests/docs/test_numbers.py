"""Numbers of README and docs are those of the tables that their markers name; the others are accounted for."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from edgc.errors import UserError
from experiments.analyse.equivalence import compare
from experiments.common.equivalence import loss_margin
from experiments.pages import loose, numbers, references
from experiments.pages.references import BadReference, parse
from experiments.pages.verdict_table import verdict_table

ROOT = Path(__file__).resolve().parents[2]
TABLE = (
    "variant,seed,loss,low,high,verdict\na,1,0.5,0.25,0.75,on par\na,2,1.5,1,2,worse\nb,1,-0.04,-0.06,,not decided\n"
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one table and one file of settings."""
    folder = tmp_path / "results" / "reference" / "ci"
    folder.mkdir(parents=True)
    (folder / "t.csv").write_text(TABLE)
    (tmp_path / "results" / "claims.yaml").write_text("claims:\n  - {id: x, value: -16.13}\n  - {id: y, value: 2}\n")
    (tmp_path / "scale.yaml").write_text("defaults: {train: {lr: 8.0e-3}}\n")
    for module in (references, numbers):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", numbers.pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_marker_is_what_its_table_says(page: Path) -> None:
    _, stale = numbers.filled(page.read_text(encoding="utf-8"), page.relative_to(ROOT))
    assert not stale, "make numbers"


def test_every_other_number_is_accounted_for() -> None:
    assert not loose.problems()


ONE_STAGE = (
    "Seeds 4 to 10 of one stage alone do not decide against one fixed rank or against no compression, and find EDGC on "
    "par with its placebos"
)
FOUR_REPLICAS = "those of four replicas alone find it on par with all three"
LATE = "Nor do seeds 4 to 6 after the longer warm-up decide against one fixed rank"


@pytest.mark.parametrize(
    ("study", "rival", "seeds", "verdict", "said"),
    [
        ("policies", "fixed rank", range(4, 11), "not decided", ONE_STAGE),
        ("policies", "no compression", range(4, 11), "not decided", ONE_STAGE),
        ("policies", "placebos", range(4, 11), "on par", ONE_STAGE),
        ("policies_four_replicas", "fixed rank", range(4, 11), "on par", FOUR_REPLICAS),
        ("policies_four_replicas", "no compression", range(4, 11), "on par", FOUR_REPLICAS),
        ("policies_four_replicas", "placebos", range(4, 11), "on par", FOUR_REPLICAS),
        ("policies_late", "fixed rank", range(4, 7), "not decided", LATE),
    ],
)
def test_what_the_findings_say_of_the_seeds_that_were_added(
    study: str, rival: str, seeds: Sequence[int], verdict: str, said: str
) -> None:
    """Of seeds that were chosen before anything of them had been seen."""
    rows = pd.read_csv(ROOT / f"results/reference/workstation/{study}/pairs.csv")
    mine = rows[(rows["variant"] == "cqm") & (rows["rival"] == rival) & rows["seed"].isin(seeds)]
    assert len(mine) == len(seeds)
    assert compare(mine["difference_nats"].tolist(), loss_margin())["verdict"] == verdict
    assert said in " ".join((ROOT / "docs/findings.md").read_text().split())


def test_the_pages_have_markers() -> None:
    texts = [page.read_text(encoding="utf-8") for page in numbers.pages()]
    assert sum(len(numbers.INLINE.findall(text)) + len(numbers.BLOCK.findall(text)) for text in texts) > 80


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("ci/t.csv variant=b loss .2f", "-0.04"),
        ("ci/t.csv variant=a seed=2.0 loss", "1.5"),
        ("ci/t.csv variant=b loss abs *100 .0f", "4"),
        ("ci/t.csv variant=b loss *-100 +1 +.1f", "+5.0"),
        ("ci/t.csv variant=b loss .0f", "0"),
        ("ci/t.csv variant=a seed<2 low..high .2f", "0.25 to 0.75"),
        ("ci/t.csv variant=b high .2f", "-"),
        ("ci/t.csv variant=b low..high .2f", "-0.06 to -"),
        ("ci/t.csv variant=b high..high .2f", "-"),
        ("ci/t.csv variant=a range(loss) .1f", "0.5 to 1.5"),
        ("ci/t.csv mean(high) .3f", "1.375"),
        ("ci/t.csv max(loss) .1f", "1.5"),
        ("ci/t.csv variant=b max_abs(loss) .2f", "0.04"),
        ("ci/t.csv variant=a names(verdict)", "on par, worse"),
        ('ci/t.csv verdict="not decided" variant', "b"),
        ("ci/t.csv verdict!=worse count", "2"),
        ("ci/t.csv count words", "three"),
        ("claims.yaml id=x value abs .1f", "16.1"),
        ("scale.yaml defaults.train.lr", "0.008"),
        ("short seed=1 loss .1f", "0.5"),
    ],
)
def test_values(tiny: Path, reference: str, text: str) -> None:
    assert parse(reference, {"short": "ci/t.csv variant=a"}).text() == text


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("ci/t.csv variant=c loss", "no row fits"),
        ("ci/t.csv variant=a loss", "2 rows fit, one is needed"),
        ("ci/t.csv variant=c min(loss)", "no row is left"),
        ("ci/t.csv variant=b los", "there is no column los"),
        ("ci/t.csv variant=b verdict .1f", "verdict is 'not decided', not a number"),
        ("ci/t.csv variant=b loss twice", "'twice' is neither"),
        ("ci/t.csv variant=b loss d", "-0.04 is not a whole number"),
        ("ci/t.csv variant=b max(high) .1f", "column high has no number"),
        ("ci/u.csv loss", "there is no results/reference/ci/u.csv"),
        ("../../../etc/passwd x", "outside the project"),
        ("ci/t.csv", "no column is named"),
        ('ci/t.csv verdict="on par loss', "no closing quotation"),
        ("ci/t.csv verdict<2 loss", "compares text"),
    ],
)
def test_references_that_cannot_be_read(tiny: Path, reference: str, problem: str) -> None:
    with pytest.raises(BadReference, match=problem):
        parse(reference).text()


def test_a_stale_number_is_found_and_filled(tiny: Path) -> None:
    page = "<!-- let a = ci/t.csv variant=a -->\n\nIt cost <!--= a seed=1 loss .2f -->0.40<!--/--> nats.\n"
    new, stale = numbers.filled(page, "page.md")
    assert [(one.line, one.stands, one.should) for one in stale] == [(3, "0.40", "0.50")]
    assert new == page.replace("0.40", "0.50") and numbers.filled(new, "page.md") == (new, [])


BLOCK = """<!-- table: ci/t.csv variant=a sort=-loss
seed
loss "loss, nats" +.2f
low..high "interval" .2f -->
{}<!-- /table -->
"""
FILLED = """| seed | loss, nats | interval |
| --- | --- | --- |
| 2 | +1.50 | 1.00 to 2.00 |
| 1 | +0.50 | 0.25 to 0.75 |
"""


def test_a_table_is_filled_and_sorted(tiny: Path) -> None:
    one_line = BLOCK.replace("seed\nloss", "seed | loss")
    assert one_line != BLOCK and numbers.filled(one_line.format(""), "page.md")[0] == one_line.format(FILLED)
    new, stale = numbers.filled(BLOCK.format(""), "page.md")
    assert new == BLOCK.format(FILLED) and len(stale) == 1
    with pytest.raises(UserError, match=r"no column los .*page\.md:1"):
        numbers.filled(BLOCK.format("").replace("-loss", "los"), "page.md")


def test_a_pivot_makes_a_column_of_each_value(tiny: Path) -> None:
    block = '<!-- table: ci/t.csv pivot=seed order=2,1\nvariant\nloss "seed {}" .2f -->\n<!-- /table -->\n'
    table = "| variant | seed 2 | seed 1 |\n| --- | --- | --- |\n| a | 1.50 | 0.50 |\n| b | - | -0.04 |\n"
    assert numbers.filled(block, "page.md")[0] == block.replace("<!-- /table", f"{table}<!-- /table")
    with pytest.raises(UserError, match="no column sead to make columns of"):
        numbers.filled(block.replace("pivot=seed", "pivot=sead"), "page.md")


def test_a_table_that_is_not_kept_has_its_sentence(tiny: Path) -> None:
    block = '<!-- table: ci/later.csv missing="Not trained yet."\nseed -->\nold\n<!-- /table -->\n'
    assert numbers.filled(block, "page.md")[0] == block.replace("old\n", "Not trained yet.\n")
    (tiny / "results" / "reference" / "ci" / "later.csv").write_text("seed\n7\n")
    assert numbers.filled(block, "page.md")[0] == block.replace("old", "| seed |\n| --- |\n| 7 |")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("a <!--= ci/t.csv count -->3 rows", r"a marker is not whole: <!--= \(in page.md:1\)"),
        ("a\n\n<!-- table: ci/t.csv\nseed -->\n| seed |\n", r"not whole: <!-- table: \(in page.md:3\)"),
        ("It is\n<!--= ci/t.csv count -->3<!--/-->.", r"begins with a marker \(in page.md:2\)"),
        ("- <!--= ci/t.csv count -->3<!--/-->.", r"begins with a marker \(in page.md:1\)"),
    ],
)
def test_markers_of_the_wrong_shape(tiny: Path, page: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        numbers.filled(page, "page.md")


def test_what_stands_in_code_is_no_marker(tiny: Path) -> None:
    page = "`<!--= ci/t.csv count -->` and\n\n```\n<!--= ci/t.csv count -->9<!--/-->\n```\n"
    assert numbers.filled(page, "page.md") == (page, [])


def test_the_program_checks_and_fills(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("of <!--= paper_claims.yaml id=training_time_12p1b paper_value abs -->1<!--/--> %\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments.pages.numbers", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    checked = run("check", str(page))
    assert checked.returncode == 1 and "page.md:1: '1' should be '16.13'" in checked.stdout
    assert run("fill", str(page)).returncode == 0 and "-->16.13<!--/-->" in page.read_text()
    assert run("check", str(page)).returncode == 0
    page.write_text("of <!--= paper_claims.yaml id=nothing paper_value -->1<!--/--> %\n")
    wrong = run("fill", str(page))
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and f"{page}:1" in wrong.stderr


def test_the_table_of_verdicts_says_what_claims_csv_says() -> None:
    lines = verdict_table("workstation", "docs/findings.md").splitlines()[2:]
    with (ROOT / "results/reference/workstation/claims.csv").open(encoding="utf-8", newline="") as handle:
        claims = list(csv.DictReader(handle))
    assert len(lines) == len(claims)
    for line, claim in zip(lines, claims, strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert (cells[0], cells[1]) == (claim["claim"], f"**{claim['verdict']}**")
        assert cells[5] == claim["kind"].upper()
        ours, _, interval = cells[3].partition(" (")
        # Numbers to three digits, words as they are.
        number = re.compile(r"-?\d+(?:\.\d+)?")
        shown, written = (number.findall(text) for text in (ours, claim["our_value"]))
        assert [float(value) for value in shown] == pytest.approx([float(value) for value in written], rel=5e-3)
        assert (
            number.sub("", ours.removesuffix(" %").removesuffix(" times")) == number.sub("", claim["our_value"])
            or not claim["our_value"]
        )
        if plain := re.fullmatch(r"(-?[\d.]+) to (-?[\d.]+)\)", interval):
            assert float(plain[1]) < float(claim["our_value"]) < float(plain[2]), line
        else:
            assert re.fullmatch(r"((most: )?[+-]\d\.\d{4} nats, [+-]\d\.\d{4} to [+-]\d\.\d{4}\))?", interval), line
        if claim["evidence"]:
            targets = [(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", cells[6])]
            named = "; ".join(filter(None, (claim["evidence"], claim["beside"])))
            assert targets == [ROOT / path for path in named.split("; ")]


LISTED = loose.Allowed(reason="a version", match=(r"Python 3\.11", "gone 5"))


def test_numbers_from_nowhere_are_found() -> None:
    page = "Python 3.11 trains\n`x = 4`, int8 on H100 [7 runs](a/2.csv) for 1 024 steps, -0.3\n\n```\n8\n```\n"
    page += "<!--= a b -->9<!--/--> <https://x.y/3>\n"
    found, used = loose.loose(page, [LISTED])
    assert [(line, number) for line, number, _ in found] == [(2, "7"), (2, "1 024"), (2, "-0.3")]
    assert used == {r"Python 3\.11"}


def test_the_list_is_held_against_the_pages(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Python 3.11, 12 runs\n")
    (tmp_path / "docs" / "made.md").write_text("77\n")
    listed = "everywhere:\n  - {reason: a version, match: ['Python 3\\.11', 'C 99']}\n"
    listed += "pages:\n  README.md:\n    - {reason: a test, text: ['9 runs']}\n  docs/none.md: []\n"
    listed += "generated: {docs/made.md: tests/x.py, docs/a/*.md: tests/y.py}\n"
    (tmp_path / "docs" / "numbers.yaml").write_text(listed)
    found = loose.problems(tmp_path)
    assert [line.partition(" ")[0] for line in found] == ["README.md:1:", *["docs/numbers.yaml:"] * 4]
    for words in (
        "12 comes from nowhere",
        "runs' fits nothing",
        "'C 99' fits",
        "no page docs/none.md",
        "docs/a/*.md",
    ):
        assert any(words in line for line in found), words
