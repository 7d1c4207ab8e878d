"""README and docs are what templates make of the committed tables; what a template asks for in vain is one line."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from edgc.errors import UserError
from experiments.pages import paper, render
from experiments.verdicts.claims import load_claims

FRAME = pd.DataFrame(
    {
        "variant": ["a", "a", "b"],
        "seed": [1, 2, 1],
        "loss": [0.5, 1.5, -0.0004],
        "low": [0.25, 1.0, math.nan],
        "high": [0.75, 2.0, math.nan],
    }
)


@pytest.mark.parametrize("template", render.templates(), ids=lambda path: path.relative_to(render.TEMPLATES).as_posix())
def test_every_page_is_as_rendered(template: Path) -> None:
    page = render.target(template)
    assert page.read_text(encoding="utf-8") == render.rendered(template), "make pages"


def test_every_claim_of_the_paper_is_judged_on_one_of_its_pages() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (render.TEMPLATES / "paper").glob("*.md")]
    for claim in load_claims():
        assert sum(f'"{claim.id}"' in text.split("## Verdict")[-1] for text in texts) >= 1, claim.id


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.4159, "*100 .0f", "42"),
        (-0.0004, "+.3f", "0.000"),
        (math.nan, ".2f", "-"),
        (math.inf, ".2f", "always"),
        (10, "words", "ten"),
        (13.0, "words", "13"),
        (3.0, "", "3"),
        (230000, ",d", "230,000"),
    ],
)
def test_a_value_as_a_page_shows_it(value: object, form: str, text: str) -> None:
    assert render.formatted(value, form) == text


def test_a_row_as_text() -> None:
    assert render.say(FRAME, "{loss:.2f} ({low:.2f} to {high:.2f})", variant="a", seed=1) == "0.50 (0.25 to 0.75)"
    assert render.say(FRAME, "{loss:.2f} ({low:.2f} to {high:.2f})", variant="b") == "0.00"
    assert render.say(FRAME, "{low:.2f} to {high:.2f}", variant="b") == "-"


@pytest.mark.parametrize(
    ("conditions", "form", "problem"),
    [
        ({"variant": "a"}, "{loss}", "2 rows fit"),
        ({"variant": "c"}, "{loss}", "0 rows fit"),
    ],
)
def test_what_no_row_answers_is_refused(conditions: dict[str, str], form: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        render.say(FRAME, form, **conditions)


def test_a_table_and_one_whose_values_are_columns() -> None:
    plain = render.table(FRAME, {"run": "{variant}|{seed}", "loss": "{loss:+.1f}"}, above=[["paper", "?"]])
    assert plain.splitlines()[2:4] == ["| paper | ? |", "| a\\|1 | +0.5 |"]
    wide = render.table({"ours": FRAME}, {"run": "{variant}"}, across=("seed", "seed {}", "{loss:.1f}", [2, 1]))
    expected = ["| whose | run | seed 2 | seed 1 |", "| ours | a | 1.5 | 0.5 |", "| ours | b | - | 0.0 |"]
    assert [wide.splitlines()[i] for i in (0, 2, 3)] == expected
    with pytest.raises(UserError, match="has no rows"):
        render.table(FRAME[:0], {"run": "{variant}"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("one\n{{ read('ci/nothing.csv') }}\n", r"ci/nothing.csv.*templates/page.md:2"),
        ("{{ say(read('ci/claims.csv'), '{claim}') }}\n", r"rows fit .*templates/page.md:1"),
        ("\n{{ read('ci/claims.csv', clam=1) }}\n", r"clam.*templates/page.md:2"),
        ("a\n\n{{ undefined_name.column }}\n", r"undefined_name.*templates/page.md:3"),
        ("{{ read('ci/claims.csv'\n", r"templates/page.md:"),
    ],
)
def test_a_template_at_fault_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(UserError, match=problem) as caught:
        render.rendered(tmp_path / "page.md")
    assert "\n" not in str(caught.value)


def test_stale_pages_are_listed_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TEMPLATES", "ROOT"):
        monkeypatch.setattr(render, name, tmp_path / name)
        (tmp_path / name).mkdir()
    (tmp_path / "TEMPLATES" / "README.md").write_text("{{ 1 + 1 }}\n")
    page = tmp_path / "ROOT" / "README.md"
    for check, code, text, there in (
        (True, 1, "README.md: stale; make pages\n", False),
        (False, 0, "README.md: written\n", True),
        (True, 0, "", True),
    ):
        with pytest.raises(SystemExit) as stop:
            render.main(check=check)
        assert (stop.value.code, capsys.readouterr().out, page.is_file()) == (code, text, there)
    assert page.read_text() == "2\n"


def test_settings_and_verdicts_that_are_not_there_are_refused() -> None:
    parts = paper.PageParts(render.ROOT / "docs" / "paper" / "x.md")
    with pytest.raises(UserError, match="no run 'cqn-s1'"):
        parts.settings({"ours": ("policies", "workstation", "cqn-s1")})
    with pytest.raises(UserError, match="no verdicts are kept"):
        parts.outcome([], ["paper"])
