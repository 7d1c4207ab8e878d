"""Every figure draws from tables alone: all panels filled and labelled, fonts legible, files repeat byte for byte."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from PIL import Image, ImageCms

from edgc.errors import UserError
from experiments.common.figures import BENCHMARKS, FIGURES, INPUTS, missing
from experiments.common.files import KEPT
from experiments.pages import pictures
from experiments.spec import matrix
from paper_figures import following, inputs, learning_curves, rank_sweep, saving, scenarios, style, texts
from paper_figures.__main__ import draw, main, render

CI, WORKSTATION = KEPT / "ci", KEPT / "workstation"
FILES = [path for path in sorted(KEPT.glob("**/figures/*.png")) if path.stem in {*FIGURES, *BENCHMARKS}]
# Every figure, by the tables of the last place that keeps it: workstation, where there are several.
PLACES = {path.stem: path.parents[1] for path in FILES}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


class Drawn(NamedTuple):
    name: str
    figure: Figure
    tables: list[str]  # that it has read


@pytest.fixture(scope="module", params=PLACES.items(), ids=lambda place: place[0])
def drawn(request: pytest.FixtureRequest) -> Drawn:
    """A figure, drawn once for all tests of it."""
    read, tables = inputs.read, []

    def noted(results: Path, study: str, table: str = "table.csv") -> pd.DataFrame:
        tables.append(f"{study}/{table}")
        return read(results, study, table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "read", noted)
        figure = draw(*request.param)
    figure.canvas.draw()
    return Drawn(request.param[0], figure, tables)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copy tables of a kept study and change each by a function; returns the folder of the scale."""

    def copy(scale: Path, study: str, *changes: Callable[[str, pd.DataFrame], None]) -> Path:
        shutil.copytree(scale / study, tmp_path / scale.name / study, ignore=shutil.ignore_patterns("runs"))
        for path in sorted((tmp_path / scale.name / study).glob("*.csv")):
            table = inputs.read(tmp_path / scale.name, study, path.name)
            for change in changes:
                change(path.name, table)
            table.to_csv(path, index=False)
        return tmp_path / scale.name

    return copy


def words_of(fig: Figure) -> str:
    return " ".join(word for text in fig.texts for word in text.get_text().split())


def has_data(ax: Axes) -> bool:
    return bool(ax.images or ax.collections or ax.containers or sum(len(line.get_xdata()) for line in ax.lines) > 4)


def test_panels_are_filled_labelled_legible_and_whole(drawn: Drawn) -> None:
    fig = drawn.figure
    panels = [ax for ax in fig.axes if ax.get_visible()]
    assert panels
    assert fig.get_figwidth() == (style.COLUMN * following.WIDE if drawn.name == "hero" else style.COLUMN)
    assert fig.get_figheight() <= style.TALLEST + 0.01
    for ax in panels:
        assert has_data(ax), ax.get_title(loc="left")
        # Shared axes are labelled once, at the outside; one of names needs no label.
        assert any(other.get_xlabel() for other in ax.get_shared_x_axes().get_siblings(ax))
        beside = ax.get_shared_y_axes().get_siblings(ax)
        names = [label.get_text() for other in beside for label in other.get_yticklabels()]
        assert any(other.get_ylabel() for other in beside) or all(name[:1].isalpha() for name in names)
    for text in fig.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            assert text.get_fontsize() >= style.MIN_FONT, text.get_text()
    width, height = fig.canvas.get_width_height()
    labels = [label for ax in panels for label in (ax.xaxis.label, ax.yaxis.label, ax._left_title)]
    boxes = [(text.get_text(), text.get_window_extent()) for text in (*fig.texts, *labels) if text.get_text()]
    cut = [text for text, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    assert cut == []
    assert saving.heading(fig), "no title says what is seen"
    note = words_of(fig)
    simulated = "Model, not measured" in note
    assert simulated or ("n = " in note and ("scale " in note) == (drawn.name in FIGURES))


def test_every_line_is_explained(drawn: Drawn) -> None:
    """In a panel with several coloured curves each colour has a legend entry somewhere in the figure."""
    named = {
        matplotlib.colors.to_hex(handle.get_color())
        for legend in drawn.figure.findobj(Legend)
        for handle in legend.legend_handles
        if hasattr(handle, "get_color")
    }
    for ax in drawn.figure.axes:
        joined = [line for line in ax.lines if len(line.get_xdata()) > 2 and line.get_linestyle() != "None"]
        lines = [line for line in joined if line.get_linewidth() > 0.7]
        coloured = {matplotlib.colors.to_hex(line.get_color()) for line in lines}
        assert len(coloured) < 2 or coloured <= named, ax.get_title(loc="left")


def test_a_figure_reads_the_tables_that_it_says(drawn: Drawn) -> None:
    assert sorted(drawn.tables) == sorted(table for table in INPUTS.get(drawn.name, ()) if table.endswith(".csv"))


def test_files_repeat_byte_for_byte_and_are_those_that_are_kept(tmp_path: Path) -> None:
    files = render("hero", WORKSTATION, tmp_path / "a")
    assert {path.suffix for path in files} == {".pdf", ".png", ".svg"}
    for path, again in zip(files, render("hero", WORKSTATION, tmp_path / "b"), strict=True):
        kept = WORKSTATION / "figures" / path.name
        assert path.read_bytes() == again.read_bytes() == (kept if kept.exists() else path).read_bytes()
    light, dark = (path.read_bytes() for path in files[-2:])
    assert max(len(light), len(dark)) <= 120_000, "the first page shows one of them"
    assert b"#ffffff" in light and b"#ffffff" not in dark and b"#0d1117" in dark
    assert not list((tmp_path / "a").glob(".*")), "no temporary file stays"


def test_runs_without_a_result_are_named_and_methods_far_off_do_not_press_the_others(
    edited: Callable[..., Path],
) -> None:
    def change(name: str, table: pd.DataFrame) -> None:
        if name == "table.csv":
            table.loc[[3, 8], "status"] = ["diverged", "failed"]
        if name in ("table.csv", "summary.csv"):
            gaps = [column for column in table.columns if column.startswith("gap_nats")]
            table.loc[table["method"] == "edgc", gaps] = 1.5

    scale = edited(WORKSTATION, "methods", change)
    summary, runs = pd.read_csv(scale / "methods" / "summary.csv"), pd.read_csv(scale / "methods" / "table.csv")
    fig = draw("methods", scale)
    (ax,) = fig.axes
    low, high = ax.get_ylim()
    inside = summary[summary["gap_nats_mean"] < 0.075]
    assert 2 <= len(inside) < summary["gap_nats_mean"].notna().sum()
    assert low < inside["gap_nats_mean"].min() and high == 0.075
    note = words_of(fig)
    assert all(label in note for label in summary.loc[summary["gap_nats_mean"] > 0.3, "label"])
    for place, status in ((3, "diverged"), (8, "failed")):
        assert f"{runs['label'][place]} seed {runs['seed'][place]} ({status})" in note


def hero_rows(low: float, high: float, verdict: str = "on par") -> pd.DataFrame:
    same = {"factor_dtype": "fp32", "n": 10, "margin_nats": 0.005, "verdict": verdict, "difference_nats": low}
    same |= {"difference_low": low, "difference_high": high, "variant": "cqm"}
    rows = [same | {"rival": rival} for rival in ("falling", "fixed rank", "line", "reversed", "no compression")]
    rows += [row | {"variant": "cqm_int8", "factor_dtype": "int8", "n": 4 + k % 2} for k, row in enumerate(rows[:2])]
    return pd.DataFrame([*rows, rows[0] | {"variant": "loss"}])


def test_learning_curves_lie_above_the_uncompressed_run_of_their_seed() -> None:
    curves = inputs.first_setting(inputs.read(WORKSTATION, "policies", "curves.csv"))
    rows = curves.assign(above=learning_curves.above_uncompressed(curves, "none"))
    table = rows.pivot(index=["seed", "iteration"], columns="variant", values=["train_loss", "above"])
    expected = table["train_loss"]["even"] - table["train_loss"]["none"]
    assert table["above"]["even"].to_numpy() == pytest.approx(expected.to_numpy(), nan_ok=True)


def test_an_undefined_correlation_is_explained_not_hidden(edited: Callable[..., Path]) -> None:
    def change(name: str, table: pd.DataFrame) -> None:
        if name == "table.csv":
            shortest = table["window"] == table["window"].min()
            table.loc[shortest, ["cc", "cc_after_warmup"]] = float("nan")
            table["cc_note"] = table["cc_note"].astype(object).where(~shortest, "cc: 2 usable windows, 3 needed")

    assert "2 usable windows" in words_of(draw("window_ablation", edited(CI, "window_ablation", change)))


def test_names_have_a_look() -> None:
    names = {"none": "none", "powersgd_r8": "powersgd", "powersgd_r32_int4": "factors_int4", "int8": "quantize_int8"}
    names |= {"factors_int8_r64": "factors_int8", "edgc_cqm": "edgc", "edgc_released": "released", "?": "other"}
    assert {name: style.by_name(name).key for name in names} == names


def test_the_title_of_the_settings_counts_those_in_which_edgc_is_better() -> None:
    better, worse, unknown = (hero_rows(*ends) for ends in ((-0.004, -0.001), (0.001, 0.002), (0.001, 0.002)))
    unknown[["difference_low", "difference_high"]] = float("nan")
    rows = following.select(pd.concat([better, worse, unknown]), list(following.MAIN_RIVALS), "8")
    assert following.times_won(rows).endswith("in 1 of 2 settings")
    assert "settings" not in following.times_won(following.select(unknown, list(following.MAIN_RIVALS)))
    assert list(dict.fromkeys(rows["rival"])) == list(following.MAIN_RIVALS)


# Linear RGB as seen with deuteranopia (Machado, Oliveira and Fernandes 2009, severity 1).
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
LAB = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
FAR_APART = 12.0  # of CIE76; 2.3 can just be told apart side by side, and marks lie apart


def seen_with_deuteranopia(colour: str) -> np.ndarray:
    """CIELAB of what is left of a colour."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    left = np.clip(DEUTERANOPIA @ linear, 0, 1)
    pixel = np.where(left <= 0.0031308, 12.92 * left, 1.055 * left ** (1 / 2.4) - 0.055) * 255
    image = Image.new("RGB", (1, 1), tuple(int(value) for value in pixel.round()))
    light, a, b = ImageCms.applyTransform(image, LAB).getpixel((0, 0))
    return np.array([light / 2.55, a - 128, b - 128])


def test_looks_are_distinct_and_those_that_deuteranopia_takes_for_one_differ_in_marker_and_dash() -> None:
    assert np.linalg.norm(seen_with_deuteranopia("#D55E00") - seen_with_deuteranopia("#0072B2")) > 60
    looks = list(style.FAMILIES.values())
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(looks)
    for look, other in itertools.combinations(looks, 2):
        distance = np.linalg.norm(seen_with_deuteranopia(look.colour) - seen_with_deuteranopia(other.colour))
        assert distance >= FAR_APART or look.line != other.line, (look.key, other.key)


def test_every_setting_is_a_row_and_the_first_one_stands_for_the_study(tmp_path: Path) -> None:
    """Where a study has settings, and where it has none."""
    for prefixes in (("one_", "one_wide_", "bert_"), ("",)):
        folder = tmp_path / str(len(prefixes)) / "policies"
        folder.mkdir(parents=True)
        for name in ("comparisons.csv", "pairs.csv", "curves.csv"):
            table = inputs.first_setting(inputs.read(WORKSTATION, "policies", name))
            table = table[table["variant"].isin(["none", "cqm", "even"])]
            several = pd.concat(table.assign(variant=prefix + table["variant"]) for prefix in prefixes)
            several.to_csv(folder / name, index=False)
    rows = [
        [text.get_text() for text in draw("policies_settings", tmp_path / place).axes[1].get_yticklabels()]
        for place in ("3", "1")
    ]
    assert rows == [["one stage, 8 to 44", "one stage, 16 to 64", "BERT"], ["GPT"]]
    rivals = [
        [text.get_text() for text in draw("policies", tmp_path / place).axes[1].get_yticklabels()]
        for place in ("3", "1")
    ]
    assert rivals[0] == rivals[1] != []
    (folder / "pairs.csv").unlink()
    assert missing("policies_settings", folder.parent)
    with pytest.raises(UserError, match="study policies is missing"):
        draw("policies_settings", folder.parent)


def test_bars_are_intervals_over_seeds_and_one_seed_has_none() -> None:
    seeds = pd.DataFrame({"status": "ok", "rank": [4, 4, 4, 8], "validation_perplexity": [10.0, 11.0, 12.0, 9.0]})
    _, (ax,) = style.figure()
    rank_sweep.loss(ax, seeds)
    (mean,) = ax.containers
    (bars,) = mean.lines[2]  # type: ignore[attr-defined]
    several, one = bars.get_segments()
    assert several[:, 1] == pytest.approx([11 - 4.30265 / 3**0.5, 11 + 4.30265 / 3**0.5], rel=1e-5)
    assert not np.isfinite(one).any()
    assert texts.count_note([1, 3]) == "n = 1–3 seeds; bars: 95 % t interval of the mean, none where n = 1"


def test_titles_say_what_the_tables_say(tmp_path: Path) -> None:
    titles = {(0.001, 0.009): "do worse", (-0.009, -0.001): "do better", (-0.004, 0.001): "as well as"}
    for ends, words in (titles | {(-0.004, 0.009): "Not decided", (-0.009, 0.001): "Not decided"}).items():
        assert words in following.answer(following.select(hero_rows(*ends), list(following.RIVALS)))
    rows = following.select(hero_rows(0.001, 0.002), list(following.RIVALS))
    assert list(rows["factor_dtype"]) == ["fp32"] * 2 + ["int8"], "int8 where there are five seeds"
    saved = {"int4": [9, 9, 9], "bf16": [1, 1, 1], "edgc": [2, 99, 2], "edgc_unaligned": [2, 2, 99]}
    each = [{"case": k, "method": name, "saved_percent": x} for name, row in saved.items() for k, x in enumerate(row)]
    assert "EDGC saves most in 2 of 3" in scenarios.title(pd.DataFrame(each), ["case"])
    title = "Ranks that follow entropy do no better than one fixed rank of as many bytes"
    png = saving.save(texts.finish(plt.figure(), [], title, "n = 1"), tmp_path, "x")[-1]
    assert pictures.alternative("Is it?", png) == f"Is it? {title}"


def test_figures_say_tables_that_studies_have_and_are_all_drawn_here() -> None:
    # A figure may be there before the runs of its study.
    tabled = {name for name in FIGURES if any(not missing(name, scale) for scale in KEPT.iterdir())}
    assert PLACES.keys() == {*tabled, *BENCHMARKS}
    for table in (table for tables in INPUTS.values() for table in tables):
        study, _, file = table.partition("/")
        assert file in matrix.load_study(study).tables, table


def test_all_draws_what_has_its_tables_and_names_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale = tmp_path / "ci"
    shutil.copytree(CI / "rank_sweep", scale / "rank_sweep", ignore=shutil.ignore_patterns("runs"))
    main(["all"], scale)
    errors = capsys.readouterr().err
    assert {path.stem for path in (scale / "figures").iterdir()} == {"rank_sweep"}
    assert "left out methods: no methods/table.csv, methods/summary.csv" in errors
    assert errors.count("left out") == len(FIGURES) - 1
    (scale / "rank_sweep" / "table.csv").write_text("", encoding="utf-8")  # damaged is not missing
    with pytest.raises(SystemExit) as stop:
        main(["all"], scale)
    assert stop.value.code == 2


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="did you mean methods"):
        render("method", tmp_path, tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["methods"], tmp_path)
    assert stop.value.code == 2
    assert "snakemake -c2 methods" in capsys.readouterr().err
