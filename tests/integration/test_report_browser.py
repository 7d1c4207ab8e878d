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
    path.write_text(report.render(Kept(root, path)).html, encoding="utf-8")
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


def number(cell: str) -> float:
    return float(cell.partition(" ")[0]) if cell else float("inf")


def choose(page: Any, name: str, value: str) -> None:
    """A switch, by its label, which covers it."""
    page.locator(f'label:has(input[name="{name}"][value="{value}"])').click()


def test_columns_sort_both_ways_and_say_so(opened: Any) -> None:
    before = column(opened, "bytes")
    assert len(before) == len(synthetic_report.VARIANTS), "the study with the most variants is shown first"
    head = opened.locator('#board-table th[data-key="bytes"]')
    head.get_by_role("button").click()
    upwards = column(opened, "bytes")
    assert head.get_attribute("aria-sort") == "ascending" and upwards != before
    assert [number(cell) for cell in upwards] == sorted(map(number, before))
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and column(opened, "bytes") == upwards[::-1]
    gap = opened.locator('#board-table th[data-key="gap"]')
    for _ in range(2):
        gap.get_by_role("button").press("Space")
        assert column(opened, "gap")[-1] == "", "what is missing comes last, both ways"
    assert head.get_attribute("aria-sort") is None and gap.get_attribute("aria-sort") == "descending"
    heads = opened.locator("#board-table thead th")
    for place in range(heads.count()):
        heads.nth(place).get_by_role("button").click()
        sorts = heads.evaluate_all("(heads) => heads.map((head) => head.getAttribute('aria-sort'))")
        assert [place for place, sort in enumerate(sorts) if sort] == [place], "one column at a time"
    label = opened.locator('#board-table th[data-key="label"]')
    label.get_by_role("button").click()
    labels = column(opened, "label")
    assert labels != sorted(labels, reverse=True) and sorted(labels) == sorted(v[1] for v in synthetic_report.VARIANTS)


def test_a_claim_opens_by_mouse_and_by_keyboard(opened: Any) -> None:
    first = opened.locator('[data-claim="training_time_12p1b"]')
    button, more = first.get_by_role("button"), first.locator(".more")
    assert button.get_attribute("aria-expanded") == "false" and not more.is_visible()
    button.click()
    assert button.get_attribute("aria-expanded") == "true" and more.is_visible()
    image = more.locator("img")
    assert image.evaluate("(image) => image.complete && image.naturalWidth > 0") and image.get_attribute("alt")
    assert "holds for 6 of 42 values" in more.inner_text() and "SIMULATED" in first.inner_text()
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "false" and not more.is_visible()
    button.press("Space")
    assert more.is_visible()
    opened.keyboard.press("Tab")
    assert more.locator("a").first.evaluate("(link) => link === document.activeElement")
    opened.get_by_role("button", name="Open all").click()
    assert opened.locator(".more:visible").count() == len(synthetic_report.CLAIMS)


def test_switches_change_plot_and_table(opened: Any) -> None:
    points, rows = opened.locator("#pareto .point"), opened.locator("#board-table tbody tr:visible")
    drawn = len(synthetic_report.VARIANTS) - 1  # without the one that diverged
    assert points.count() == drawn and rows.count() == drawn + 1
    axis, front = opened.locator("#pareto .title").first, opened.locator("#pareto .front")
    assert "of an fp32" in axis.text_content() and front.count() == 1
    place = points.first.get_attribute("transform")
    choose(opened, "board-bytes", "bytes_bf16")
    assert "of a bf16" in axis.text_content()
    assert opened.locator("#board-table th.chosen").get_attribute("data-key") == "bytes_bf16"
    assert points.count() == drawn and points.first.get_attribute("transform") == place, "all are twice as much"
    ticks = opened.locator("#pareto .axis text").all_text_contents()
    assert "200 %" in ticks
    opened.locator('input[name="board-family"][value="powersgd"]').uncheck()
    assert points.count() == drawn - 2 and rows.count() == drawn - 1
    assert f"{drawn - 1} of {drawn + 4} variants" in opened.locator("#board-count").inner_text()
    opened.locator("#board-study").select_option("equal_bytes")
    assert points.count() == rows.count() == 3 and set(column(opened, "study")) == {"equal_bytes"}
    opened.locator("#board-study").select_option("")
    assert front.count() == 2, "a front joins the methods of one study"
    for family in ("dense", "edgc", "sparsification", "quantization"):
        opened.locator(f'input[name="board-family"][value="{family}"]').uncheck()
    assert points.count() == rows.count() == 0
    assert "No variant passes" in opened.locator("#pareto").text_content()


def test_points_tell_what_they_are_under_the_mouse_and_the_focus(opened: Any) -> None:
    tip = opened.locator("#pareto .tip")
    assert not tip.is_visible()
    point = opened.locator('#pareto .point[aria-label^="EDGC (CQM)"]')
    opened.locator("#pareto").scroll_into_view_if_needed()
    point.hover(force=True)
    assert (
        tip.is_visible()
        and "EDGC (CQM)" in tip.inner_text()
        and "+0.0012 nats (+0.0003 to +0.0020)" in tip.inner_text()
    )
    opened.mouse.move(0, 0)
    assert not tip.is_visible()
    opened.locator('input[name="board-family"]').last.focus()
    opened.keyboard.press("Tab")
    order = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        order.append(opened.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert tip.is_visible() and order[-1].startswith(tip.locator("strong").inner_text())
        opened.keyboard.press(key)
    assert order[0] == opened.evaluate("document.activeElement.getAttribute('aria-label')"), "Home is the first again"
    assert len(set(order)) == 5 and order[3].startswith("no compression") and order[4].startswith("bf16")
    opened.keyboard.press("Escape")
    assert not tip.is_visible()
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.closest('#pareto')") is None, "one stop of the tabulator"


def test_points_of_the_front_are_labelled_and_untested_ones_hollow(opened: Any) -> None:
    labels = opened.locator("#pareto .label").all_text_contents()
    front = {"top-k 1.5 %", synthetic_report.HOSTILE, "PowerSGD rank 16", "EDGC (CQM)", "bf16"}
    assert front >= set(labels) >= {"top-k 1.5 %", "bf16"}, "labels that fit nowhere are left out"
    assert "no compression" not in labels, "bf16 is below it, with fewer bytes"
    fills = {
        name: opened.locator(f'#pareto .point[aria-label^="{name}"] path').get_attribute("fill")
        for name in ("EDGC (CQM)", "bf16")
    }
    assert fills == {"EDGC (CQM)": "var(--surface)", "bf16": "var(--dense)"}


ON_THE_FRONT = """() => {
  const front = document.querySelector("#pareto .front");
  const along = Array.from({ length: 400 }, (_, k) => front.getPointAtLength((k * front.getTotalLength()) / 399));
  const covers = (box) => along.some(({ x, y }) =>
    x > box.x + 1 && x < box.x + box.width - 1 && y > box.y + 1 && y < box.y + box.height - 1);
  const labels = [...document.querySelectorAll("#pareto .label")];
  return labels.filter((label) => covers(label.getBBox())).map((label) => label.textContent);
}"""


@pytest.mark.parametrize(
    "opened", [{"viewport": {"width": width, "height": 900}} for width in (700, 1280)], indirect=True
)
def test_no_label_is_struck_through_by_the_front(opened: Any) -> None:
    assert opened.locator("#pareto .label").count() > 1
    assert opened.evaluate(ON_THE_FRONT) == []


def test_claims_come_before_what_their_words_mean(opened: Any) -> None:
    table, words = (opened.locator(f"#{name}").bounding_box()["y"] for name in ("claims-table", "claims-words"))
    assert table < 500 < words
    opened.get_by_role("link", name="What verdicts, n and nats mean").click()
    assert opened.evaluate("document.querySelector('#claims-words').getBoundingClientRect().top") < 900


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
    assert opened.locator('#curves-plot .run[stroke-dasharray="4 3"]').count() == len(synthetic_report.SEEDS), (
        "diverged"
    )


@pytest.mark.parametrize(
    "opened", [{"viewport": {"width": width, "height": 800}} for width in (360, 700, 1280)], indirect=True
)
def test_nothing_is_wider_than_the_window(opened: Any) -> None:
    opened.get_by_role("button", name="Open all").click()
    opened.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    width = opened.viewport_size["width"]
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    scrolled = opened.locator(".scroll:has(#board-table)")
    if width < 700:
        assert scrolled.evaluate("(box) => box.scrollWidth > box.clientWidth"), "the wide table scrolls by itself"
        assert opened.locator("#pareto svg").bounding_box()["width"] <= width


@pytest.mark.parametrize("opened", [{"color_scheme": scheme} for scheme in ("light", "dark")], indirect=True)
def test_axe_finds_nothing_serious(opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    opened.get_by_role("button", name="Open all").click()
    opened.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    found = axe.Axe().run(opened).response
    assert len(found["passes"]) > 20
    grave = [
        (broken["id"], node["target"], node.get("failureSummary"))
        for broken in found["violations"]
        if broken["impact"] in ("serious", "critical")
        for node in broken["nodes"]
    ]
    assert not grave


def test_the_skip_link_comes_first_and_print_shows_all(opened: Any) -> None:
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.getAttribute('href')") == "#claims"
    opened.emulate_media(media="print")
    assert opened.locator(".more:visible").count() == len(synthetic_report.CLAIMS)
    assert not opened.locator("#board-switches").is_visible()
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.locator("details:not([open])").count() == 0
    assert opened.locator(".more img").count() == 2


def test_without_scripts_everything_can_be_read(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator(".more:visible").count() == len(synthetic_report.CLAIMS)
    assert page.locator("#board-table tbody tr:visible").count() == len(synthetic_report.VARIANTS) + 3
    context.close()
