"""Every figure draws from tables alone: all panels filled and labelled, fonts legible, files repeat byte for byte."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from edgc.config import methods
from edgc.errors import UserError
from experiments.common.figures import BENCHMARKS, FIGURES, INPUTS, OPTIONAL, caption, missing
from experiments.pages import pictures
from experiments.spec import matrix
from paper_figures import (
    break_even,
    hero,
    inputs,
    learning_curves,
    policies_settings,
    rank_sweep,
    saving,
    style,
    texts,
)
from paper_figures.__main__ import draw, main, render

TRAINED = (
    "entropy_trend",
    "methods",
    "policies",
    *(f"policies_{name}" for name in ("bert", "four_replicas", "late", "long", "two_stages")),
    "moe",
    "rank_sweep",
    "rank_model",
    "window_ablation",
    "sampling_ablation",
)
OURS = tuple(name for name, studies in FIGURES.items() if set(studies) <= set(TRAINED))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables(kept_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a scale with kept tables."""
    return Path(shutil.copytree(kept_tables, tmp_path_factory.mktemp("tables") / "ci"))


def data_panels(fig: Figure) -> list[Axes]:
    return [ax for ax in fig.axes if ax.get_visible()]


def cut_off(fig: Figure) -> list[str]:
    """Texts beside and over the panels that do not lie whole on the figure."""
    width, height = fig.canvas.get_width_height()
    labels = [label for ax in data_panels(fig) for label in (ax.xaxis.label, ax.yaxis.label, ax._left_title)]
    boxes = [(text.get_text(), text.get_window_extent()) for text in (*fig.texts, *labels) if text.get_text()]
    return [text for text, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]


def has_data(ax: Axes) -> bool:
    return bool(ax.images or ax.collections or any(len(line.get_xdata()) > 2 for line in ax.lines) or ax.containers)


@dataclass
class Drawn:
    name: str
    figure: Figure
    read: list[str]


@pytest.fixture(scope="module", params=OURS)
def drawn(request: pytest.FixtureRequest, tables: Path) -> Iterator[Drawn]:
    """A figure, drawn once for all tests of it, and the tables that it has read."""
    read, found = inputs.read, []

    def noted(results: Path, study: str, table: str = "table.csv") -> pd.DataFrame:
        found.append(f"{study}/{table}")
        return read(results, study, table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "read", noted)
        figure = draw(request.param, tables)
    figure.canvas.draw()
    yield Drawn(request.param, figure, found)
    plt.close(figure)


def test_panels_are_filled_labelled_and_legible(drawn: Drawn) -> None:
    fig, panels = drawn.figure, data_panels(drawn.figure)
    assert panels
    assert fig.get_figwidth() == style.COLUMN
    assert fig.get_figheight() <= style.TALLEST + 0.01
    for ax in panels:
        assert has_data(ax), ax.get_title(loc="left")
        # Shared axes are labelled once, at the outside.
        assert any(other.get_xlabel() for other in ax.get_shared_x_axes().get_siblings(ax))
        assert any(other.get_ylabel() for other in ax.get_shared_y_axes().get_siblings(ax))
    for text in fig.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            assert text.get_fontsize() >= style.MIN_FONT, text.get_text()
    assert cut_off(fig) == []
    assert saving.seen(fig), "no title says what is seen"
    note = " ".join(word for text in fig.texts for word in text.get_text().split())
    assert "n = " in note and "scale ci" in note


def test_every_line_is_explained(drawn: Drawn) -> None:
    """In a panel with several coloured curves each colour has a legend entry somewhere in the figure."""
    named = {
        matplotlib.colors.to_hex(handle.get_color())
        for legend in drawn.figure.findobj(Legend)
        for handle in legend.legend_handles
        if hasattr(handle, "get_color")
    }
    for ax in data_panels(drawn.figure):
        coloured = {
            matplotlib.colors.to_hex(line.get_color())
            for line in ax.lines
            if len(line.get_xdata()) > 2 and line.get_linewidth() > 0.7
        }
        assert len(coloured) < 2 or coloured <= named, ax.get_title(loc="left")


def test_a_figure_reads_the_tables_that_it_says(drawn: Drawn) -> None:
    assert sorted(drawn.read) == sorted(INPUTS[drawn.name])


KEPT_BENCHMARKS = [
    (name, folder)
    for folder in sorted((ROOT / "results" / "reference" / "bench").iterdir())
    for name, tables in BENCHMARKS.items()
    if all((folder / table).is_file() for table in tables)
]


# Names of variants are longer there than in the tables made up above, and so is what the panels say.
WORKSTATION = ROOT / "results" / "reference" / "workstation"
KEPT_FIGURES = [(path.stem, WORKSTATION) for path in sorted((WORKSTATION / "figures").glob("*.png"))]


@pytest.mark.parametrize(
    ("name", "folder"), KEPT_BENCHMARKS + KEPT_FIGURES, ids=lambda value: getattr(value, "name", value)
)
def test_kept_tables_are_drawn_whole_under_a_title_that_says_what_is_seen(name: str, folder: Path) -> None:
    fig = draw(name, folder)
    try:
        fig.canvas.draw()
        assert fig.get_figheight() <= style.TALLEST + 0.01
        assert cut_off(fig) == []
        assert saving.seen(fig)
    finally:
        plt.close(fig)


def test_files_repeat_byte_for_byte_in_another_process(tables: Path, tmp_path: Path) -> None:
    first = render("methods", tables, tmp_path / "a")
    words = "-m", "paper_figures", "methods", "--results", str(tables), "--out", str(tmp_path / "b")
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, capture_output=True)
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert {path.suffix for path in first} == {".pdf", ".png", ".svg"}
    assert not list((tmp_path / "a").glob(".*"))  # no temporary file stays


def test_methods_figure_shows_the_planted_gap_and_names_lost_runs(tables: Path) -> None:
    fig = draw("methods", tables)
    try:
        drawn = {
            (round(float(x), 2), round(float(y), 4))
            for line in fig.axes[0].lines
            if line.get_marker() == style.FAMILIES["powersgd"].marker
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }
        assert (5.6, 0.126) in drawn
        note = " ".join(text.get_text() for text in fig.texts)
        assert "EDGC (released) seed 2 (diverged)" in note
        assert "powersgd_r2 seed 1 (failed)" in note
    finally:
        plt.close(fig)


def test_methods_that_are_far_off_do_not_press_the_others_onto_one_line(tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ci" / "methods"
    folder.mkdir(parents=True)
    for name in ("table.csv", "summary.csv"):
        table = pd.read_csv(tables / "methods" / name)
        mine = table["method"] == "edgc"
        assert mine.any()
        table.loc[mine, [column for column in table.columns if column.startswith("gap_nats")]] = 1.5
        table.to_csv(folder / name, index=False)
    summary = pd.read_csv(folder / "summary.csv")
    fig = draw("methods", tmp_path / "ci")
    try:
        (ax,) = fig.axes
        low, high = ax.get_ylim()
        inside = summary[summary["gap_nats_mean"] < 0.075]
        assert 2 <= len(inside) < summary["gap_nats_mean"].notna().sum()
        assert low < inside["gap_nats_min"].min() and high == 0.075
        # A name stands at the points that the text speaks of, a rank at others; what is off the scale is named below.
        written = [text.get_text() for text in ax.texts if text.get_text()]
        assert len(written) == len(set(written)) and set(written) & set(inside["label"])
        assert all(text.startswith("r=") for text in set(written) - set(inside["label"]))
        note = " ".join(text.get_text() for text in fig.texts)
        assert all(label in note for label in summary.loc[summary["gap_nats_mean"] > 0.3, "label"])
    finally:
        plt.close(fig)


def hero_rows(low: float, high: float, verdict: str = "on par") -> pd.DataFrame:
    same = {"factor_dtype": "fp32", "n": 10, "margin_nats": 0.005, "verdict": verdict, "difference_nats": low}
    same |= {"difference_low": low, "difference_high": high}
    rivals = ["falling", "fixed rank", "placebos", "no compression"]
    rows = [
        same | {"variant": "cqm", "rival": rival, "difference_low": low, "difference_high": high} for rival in rivals
    ]
    rows += [row | {"variant": "cqm_int8", "factor_dtype": "int8", "n": 4 + k % 2} for k, row in enumerate(rows[:2])]
    return pd.DataFrame([*rows, rows[0] | {"variant": "loss"}])


def test_the_first_figure_is_small_and_drawn_for_light_and_dark_pages(tables: Path, tmp_path: Path) -> None:
    light, dark = (path.read_bytes() for path in hero.pages(tables, tmp_path))
    assert max(len(light), len(dark)) <= 120_000
    assert b"#ffffff" in light and b"#ffffff" not in dark and b"#0d1117" in dark


def test_learning_curves_show_every_run_and_what_it_lies_above_uncompressed(tables: Path) -> None:
    curves = pd.read_csv(tables / "policies" / "curves.csv")
    fig = draw("learning_curves_policies", tables)
    try:
        by_bytes, above = fig.axes[1::2], fig.axes[2::2]
        thin = [line for ax in by_bytes for line in ax.lines if len(line.get_xdata()) > 20]
        drawn = [line for line in thin if line.get_linewidth() < 1]
        runs, variants = curves.groupby(["variant", "seed"]).ngroups, curves["variant"].nunique()
        assert len(drawn) == runs + 3 * (len(by_bytes) - 1), "uncompressed is drawn again in every row"
        means = [line for line in thin if line.get_linewidth() > 1]
        assert len(means) == variants + len(by_bytes) - 1
        one = curves[curves["variant"] == "fixed_8"].pivot(index="iteration", columns="seed", values="train_loss")
        assert any(
            np.allclose(line.get_ydata(), one.mean(axis=1)) for line in means if len(line.get_ydata()) == len(one)
        )
        assert max(line.get_xdata()[-1] for line in drawn) == pytest.approx(curves["bytes"].max() / 1e6)
        black = [line for ax in above for line in ax.lines if line.get_color() == "#000000"]
        assert black and all((line.get_ydata() == 0).all() for line in black)
    finally:
        plt.close(fig)
    rows = curves[["variant", "seed", "iteration", "train_loss"]]
    found = rows.assign(above=learning_curves.above(curves, "none")).pivot(
        index=["seed", "iteration"], columns="variant", values=["train_loss", "above"]
    )
    expected = found["train_loss"]["fixed_8"] - found["train_loss"]["none"]
    assert found["above"]["fixed_8"].to_numpy() == pytest.approx(expected.to_numpy(), nan_ok=True)


def test_an_undefined_correlation_is_explained_not_hidden(tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ci" / "window_ablation"
    folder.mkdir(parents=True)
    for path in (tables / "window_ablation").glob("*.csv"):
        table = pd.read_csv(path)
        if path.name == "table.csv":
            table.loc[table["window"] == 50, ["cc", "cc_after_warmup"]] = float("nan")
            table["cc_note"] = table["cc_note"].astype(object)
            table.loc[table["window"] == 50, "cc_note"] = "cc: 2 usable windows, 3 needed"
        table.to_csv(folder / path.name, index=False)
    fig = draw("window_ablation", tmp_path / "ci")
    try:
        words = " ".join(word for text in fig.texts for word in text.get_text().split())
        assert "2 usable windows" in words
    finally:
        plt.close(fig)


def test_extrapolated_correlation_is_drawn_dashed_from_what_was_measured(tables: Path) -> None:
    fig = draw("window_correlation", tables)
    try:
        for ax in fig.axes:
            (dashed,) = [line for line in ax.lines if line.get_label().startswith("extrapolated")]
            assert dashed.get_linestyle() == "--"
            assert dashed.get_xdata()[0] < 5 and 100 in dashed.get_xdata()
            marks = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in ax.lines}
            assert ((0, 1), (0.94, 0.94)) in marks and ((100, 100), (0, 1)) in marks
    finally:
        plt.close(fig)


def test_every_method_is_drawn_as_its_file_says() -> None:
    for kind in methods():
        if kind.method != "edgc":  # whose policies are told apart by more than the name
            assert style.family(kind.method) == (kind.method, *kind.look)


def test_families_are_fixed_and_distinct() -> None:
    looks = list(style.FAMILIES.values())
    assert len({look.colour for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)
    expected = {"none-s1": "none", "powersgd_r8": "powersgd", "EDGC (CQM)": "edgc", "edgc_released": "released"}
    expected |= {"top-k": "topk", "randomk_1": "randomk", "int8": "quantize", "optimus": "selective", "?": "other"}
    assert {name: style.family(name).key for name in expected} == expected
    assert style.family("edgc", "released").key == "released"


def test_the_title_of_the_settings_counts_those_in_which_edgc_is_better() -> None:
    better, worse, unknown = (hero_rows(*ends) for ends in ((-0.004, -0.001), (0.001, 0.002), (0.001, 0.002)))
    unknown[["difference_low", "difference_high"]] = float("nan")
    found = {
        "a": policies_settings.chosen(better),
        "b": policies_settings.chosen(worse),
        "c": policies_settings.chosen(unknown),
    }
    assert policies_settings.title(found).endswith("in 1 of 2 settings")
    assert "settings" not in policies_settings.title({"c": found["c"]})
    assert list(found["a"]["rival"][:4]) == list(policies_settings.RIVALS)


# Linear RGB as seen with deuteranopia (Machado, Oliveira and Fernandes 2009, severity 1), and linear RGB to XYZ.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
FAR_APART = 12.0  # of CIE76; 2.3 can just be told apart side by side, and marks lie apart


def seen_with_deuteranopia(colour: str) -> np.ndarray:
    """CIELAB of what is left of a colour."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = XYZ @ np.clip(DEUTERANOPIA @ linear, 0, 1) / WHITE
    x, y, z = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_looks_that_deuteranopia_takes_for_one_differ_in_marker_and_dash() -> None:
    assert np.linalg.norm(seen_with_deuteranopia("#D55E00") - seen_with_deuteranopia("#0072B2")) > 60
    assert np.linalg.norm(seen_with_deuteranopia("#ffffff") - [100, 0, 0]) < 0.5
    near = 0
    for one, other in itertools.combinations(style.FAMILIES.values(), 2):
        if np.linalg.norm(seen_with_deuteranopia(one.colour) - seen_with_deuteranopia(other.colour)) < FAR_APART:
            near += 1
            assert one.marker != other.marker and one.line != other.line, (one.key, other.key)
    assert near, "colours are few, methods are many"


def test_settings_without_tables_are_named_in_place_of_being_drawn(tables: Path, tmp_path: Path) -> None:
    found = tmp_path / "ci"
    found.mkdir()
    for study in ("policies", "policies_bert"):
        (found / study).symlink_to(tables / study)
    fig = draw("policies_settings", found)
    try:
        assert [ax.get_title(loc="left").partition(":")[0] for ax in fig.axes] == ["(a) GPT, one stage", "(b) BERT"]
        note = fig.texts[-1].get_text().replace("\n", " ")
        assert "No tables yet: warm-up 20 %, rate doubled, two stages, four replicas." in note
        assert any(text.get_text().startswith("n = ") for text in fig.axes[1].texts)
    finally:
        plt.close(fig)
    assert set(OPTIONAL["policies_settings"]) < set(INPUTS["policies_settings"])
    assert not missing("policies_settings", found)
    (found / "policies").unlink()
    assert missing("policies_settings", found)
    with pytest.raises(UserError, match="study policies is missing"):
        draw("policies_settings", found)


def test_bars_are_intervals_over_seeds_and_one_seed_has_none() -> None:
    seeds = pd.DataFrame({"status": "ok", "rank": [4, 4, 4, 8], "validation_perplexity": [10.0, 11.0, 12.0, 9.0]})
    fig, (ax,) = style.figure()
    try:
        rank_sweep.loss(ax, seeds)
        (mean,) = ax.containers
        (bars,) = mean.lines[2]  # type: ignore[attr-defined]
        several, one = bars.get_segments()
        assert several[:, 1] == pytest.approx([11 - 4.30265 / 3**0.5, 11 + 4.30265 / 3**0.5], rel=1e-5)
        assert not np.isfinite(one).any()
    finally:
        plt.close(fig)
    assert texts.spread([1, 3]) == "n = 1–3 seeds; bars: 95 % t interval of the mean, none where n = 1"


def test_titles_say_what_the_tables_say(tmp_path: Path) -> None:
    said = {(0.001, 0.009): "no better", (-0.009, -0.001): "do better", (-0.004, 0.001): "as well as"}
    for ends, words in (said | {(-0.004, 0.009): "Not decided", (-0.009, 0.001): "Not decided"}).items():
        assert words in hero.title(hero.chosen(hero_rows(*ends)))
    rows = hero.chosen(hero_rows(0.001, 0.002))
    assert list(rows["factor_dtype"]) == ["fp32"] * 3 + ["int8"], "int8 where there are five seeds"
    saved = {"int4": [9, 9, 9], "bf16": [1, 1, 1], "edgc": [2, 99, 2], "edgc_unaligned": [2, 2, 99]}
    each = [{"case": k, "method": name, "saved_percent": x} for name, of in saved.items() for k, x in enumerate(of)]
    assert "EDGC saves most in 2 of 3" in break_even.title(pd.DataFrame(each), ["case"])
    fig = plt.figure()
    texts.headline(fig, title := "Ranks that follow entropy do no better than one fixed rank of as many bytes")
    path = saving.save(fig, tmp_path, "x")[-1]
    assert pictures.seen(path) == title


def test_rows_of_learning_curves_hold_every_variant_once() -> None:
    methods_of = {f"p{k}": "powersgd" for k in range(11)} | {"q": "quantize", "s": "sign", "e1": "edgc", "e2": "edgc"}
    rows = learning_curves.groups(pd.DataFrame({"method": methods_of}))
    assert sorted(name for row in rows for name in row) == sorted(methods_of)
    assert all(0 < len(row) <= learning_curves.MOST for row in rows)
    assert ["q", "s", "e1", "e2"] in rows, "few of a method share a row"


def test_figures_say_tables_that_studies_have_and_a_caption() -> None:
    assert {"methods", "zero_shot", "gpt2_2p5b_v100", "break_even", "learning_curves_long"} < set(FIGURES)
    captions = [caption(name) for name in (*FIGURES, *BENCHMARKS)]
    assert all(len(text.split()) > 25 for text in captions) and len(set(captions)) == len(captions)
    for table in (table for tables in INPUTS.values() for table in tables):
        study, _, file = table.partition("/")
        assert file in matrix.load_study(study).tables, table
    code = "import sys, experiments.common.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_all_draws_what_has_its_tables_and_names_the_rest(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = tmp_path / "ci"
    (scale / "rank_sweep").mkdir(parents=True)
    for table in INPUTS["rank_sweep"]:
        (scale / table).write_bytes((tables / table).read_bytes())
    main(["all"], scale)
    said = capsys.readouterr()
    assert {path.stem for path in (scale / "figures").iterdir()} == {"rank_sweep"}
    assert "left out methods: no methods/table.csv, methods/summary.csv" in said.err
    assert said.err.count("left out") == len(FIGURES) - 1
    (scale / "rank_sweep" / "table.csv").write_text("", encoding="utf-8")  # damaged is not missing
    with pytest.raises(SystemExit) as stop:
        main(["all"], scale)
    assert stop.value.code == 2


def test_bad_input_is_one_line(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="did you mean methods"):
        render("method", tables, tmp_path)
    (tmp_path / "ci").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["methods"], tmp_path / "ci")
    assert stop.value.code == 2
    assert "snakemake -c2 methods" in capsys.readouterr().err
