"""The report in a real browser, headless: sorting, opening, switches, keyboard, widths, accessibility, and no request.

The browser is the system's own (Debian: ``apt install chromium``); nothing is downloaded for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.pages import report
from experiments.pages.kept import Kept
from tests.unit import synthetic_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no test in a browser")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on the PATH (looked for {', '.join(BROWSERS)}): install Debian's chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = synthetic_report.results(tmp_path_factory.mktemp("report"))
    path = root / "report.html"
    path.write_text(report.render(Kept(root, path)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page; at the end of a test nothing was requested but the file, and nothing went wrong."""
    options = {"viewport": {"width": 1280, "height": 900}} | getattr(request, "param", {})
    context = browser.new_context(**options)
    page = context.new_page()
    requests: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda sent: requests.append(sent.url))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.goto(address)
    page.wait_for_selector("#pareto .point")
    yield page
    outside = [url for url in requests if not url.startswith(("file:", "data:"))]
    context.close()
    assert not outside and not wrong
    assert [url for url in requests if url.startswith("file:")] == [address]


def column(page: Any, key: str) -> list[str]:
    """The visible cells of a column of the board."""
    place = page.locator("#board-table thead th").evaluate_all(
        "(heads, key) => heads.findIndex((head) => head.dataset.key === key)", key
    )
    rows = page.locator("#board-table tbody tr:visible")
    return list(rows.evaluate_all("(rows, place) => rows.map((row) => row.cells[place].textContent.trim())", place))


def choose(page: Any, name: str, value: str) -> None:
    """A switch, by its label, which covers it."""
    page.locator(f'label:has(input[name="{name}"][value="{value}"])').click()


def test_columns_sort_both_ways_with_one_seed_and_what_is_missing_last(opened: Any) -> None:
    labels = sorted(column(opened, "label"))
    assert len(labels) == len(synthetic_report.VARIANTS), "the study of the methods is shown first"
    head = opened.locator('#board-table th[data-key="gap"]')
    for sort in ("ascending", "descending"):
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == sort and sorted(column(opened, "label")) == labels
        *numbers, last = column(opened, "gap")
        assert last == "" and numbers == sorted(numbers, key=float, reverse=sort == "descending")
    opened.locator("#board-study").select_option("equal_bytes")
    assert column(opened, "label")[-1] == "bf16", "its one seed tells less than two"


def test_claims_open_by_mouse_and_keyboard_on_screen_and_on_paper(opened: Any) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.getAttribute('href')") == "#claims", "the skip link comes first"
    first = opened.locator('[data-claim="training_time_12p1b"]')
    summary, inside = first.locator("summary"), first.locator(".inside")
    assert not inside.is_visible()
    summary.click()
    assert inside.is_visible()
    assert inside.locator("img").evaluate("(image) => image.complete && image.naturalWidth > 0")
    summary.press("Enter")
    assert not inside.is_visible()
    opened.emulate_media(media="print")
    assert not opened.locator("#board-switches").is_visible()
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.locator("details:not([open])").count() == 0
    assert opened.locator(".inside:visible").count() == len(synthetic_report.CLAIMS)


def test_switches_change_plot_and_table(opened: Any) -> None:
    points, rows = opened.locator("#pareto .point"), opened.locator("#board-table tbody tr:visible")
    drawn = len(synthetic_report.VARIANTS) - 1  # without the one that diverged
    assert points.count() == drawn and rows.count() == drawn + 1
    hollow = opened.locator("#pareto .point:has(.hollow)")
    assert hollow.count() == 1 and "not tested" in hollow.get_attribute("aria-label")
    choose(opened, "board-bytes", "bytes_bf16")
    assert "of a bf16" in opened.locator("#pareto .title").first.text_content()
    assert "200 %" in opened.locator("#pareto .axis text").all_text_contents()
    opened.locator('input[name="board-family"][value="powersgd"]').uncheck()
    assert points.count() == drawn - 2 and rows.count() == drawn - 1
    assert f"{drawn - 1} of {drawn + 4} variants" in opened.locator("#board-count").inner_text()
    opened.locator("#board-study").select_option("equal_bytes")
    assert points.count() == rows.count() == 3 and set(column(opened, "study")) == {"equal_bytes"}
    opened.locator("#board-study").select_option("")
    for family in ("dense", "edgc", "sparsification", "quantization"):
        opened.locator(f'input[name="board-family"][value="{family}"]').uncheck()
    assert points.count() == rows.count() == 0
    assert "No variant passes" in opened.locator("#pareto").text_content()


def test_points_tell_what_they_are_under_the_mouse_and_the_focus(opened: Any) -> None:
    tip = opened.locator("#pareto .tip")
    assert not tip.is_visible()
    opened.locator("#pareto").scroll_into_view_if_needed()
    opened.locator('#pareto .point[aria-label^="EDGC (CQM)"]').hover(force=True)
    assert tip.is_visible() and "+0.0012 nats (+0.0003 to +0.0020)" in tip.inner_text()
    opened.mouse.move(0, 0)
    assert not tip.is_visible()
    opened.locator('input[name="board-family"]').last.focus()
    for _ in range(2):
        opened.keyboard.press("Tab")
        name = opened.evaluate("document.activeElement.getAttribute('aria-label')")
        assert tip.is_visible() and name.startswith(tip.locator("strong").inner_text())
    opened.keyboard.press("Escape")
    assert not tip.is_visible()


def test_curves_follow_their_switches(opened: Any) -> None:
    lines = opened.locator("#curves-plot .run")
    assert lines.count() == len(synthetic_report.VARIANTS) * len(synthetic_report.SEEDS)
    title, first = opened.locator("#curves-plot .title"), lines.first.get_attribute("d")
    assert title.all_text_contents() == ["iteration", "training loss (nats)"]
    choose(opened, "curves-x", "b")
    assert "bytes sent" in title.first.text_content() and lines.first.get_attribute("d") != first
    choose(opened, "curves-y", "above")
    assert title.last.text_content() == "training loss above uncompressed (nats)"
    chip = opened.locator("#curves-variants").get_by_role("button", name="top-k 1.5 %")
    pressed = chip.get_attribute("aria-pressed")
    chip.press("Space")
    assert {pressed, chip.get_attribute("aria-pressed")} == {"true", "false"}
    dashed = opened.locator('#curves-plot .run[stroke-dasharray="4 3"]')
    assert dashed.count() == len(synthetic_report.SEEDS), "diverged"


COVERED = """() => {
  const boxes = [...document.querySelectorAll("#pareto .label")].map((label) => label.getBBox());
  return boxes.filter((a, k) => boxes.some((b, other) => other !== k && a.x < b.x + b.width - 1
    && b.x < a.x + a.width - 1 && a.y < b.y + b.height - 1 && b.y < a.y + a.height - 1)).length;
}"""


# Ends once the plot is as wide as its box. `wait_for_function` would not do: where it has to wait, it evaluates a
# string inside the page, which the page's own Content Security Policy forbids.
DRAWN = """() => new Promise((drawn) => {
  const look = () => {
    const svg = document.querySelector("#pareto svg");
    return svg && svg.viewBox.baseVal.width === svg.parentElement.clientWidth ? drawn() : setTimeout(look, 20);
  };
  look();
})"""


def open_all(page: Any) -> None:
    page.get_by_role("button", name="Open all").click()
    assert page.locator(".inside:visible").count() == len(synthetic_report.CLAIMS)
    page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")


def test_nothing_is_wider_than_the_window_and_no_label_covers_another(opened: Any) -> None:
    open_all(opened)
    for width in (360, 1280):
        opened.set_viewport_size({"width": width, "height": 800})
        opened.evaluate(DRAWN)
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        assert opened.locator("#pareto .label").count() > 1 and opened.evaluate(COVERED) == 0


@pytest.mark.parametrize("opened", [{"color_scheme": scheme} for scheme in ("light", "dark")], indirect=True)
def test_axe_finds_nothing_serious(opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    open_all(opened)
    result = axe.Axe().run(opened).response
    assert len(result["passes"]) > 20
    grave = [broken for broken in result["violations"] if broken["impact"] in ("serious", "critical")]
    assert not [(broken["id"], node["target"]) for broken in grave for node in broken["nodes"]]


def test_without_scripts_everything_can_be_read(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    page.locator(".claim summary").first.click()
    assert page.locator(".inside:visible").count() == 1
    assert page.locator("#board-table tbody tr:visible").count() == len(synthetic_report.VARIANTS) + 3
    context.close()
