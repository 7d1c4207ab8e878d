"""Our report: ``python -m experiments.pages.report --scale ci --results results`` writes ``results/ci/report.html``.

One file that needs no network: tables, figures and curves are part of it. It is made of tables and figures that are
there, so it works on a finished workflow (``--results results``) and on what is committed (``--results
results/reference``); what is missing is named where it would stand. The same tables give the same bytes.
"""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.equivalence import BETTER_WITHIN, CANNOT_TELL, WORSE_WITHIN, loss_margin
from experiments.common.files import atomic_write, place_of_output
from experiments.pages import board, claim_rows, curves, pictures
from experiments.pages.kept import Kept, as_list

TEMPLATES = Path(__file__).with_name("templates")
TRIMMED: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
BADGES = {  # verdict -> class of its look; the word is always beside it
    "supported": "good",
    "on par": "good",
    "better": "good",
    "partly": "part",
    "not decided": "part",
    "not supported": "bad",
    "worse": "bad",
    BETTER_WITHIN: "good",
    WORSE_WITHIN: "part",
    CANNOT_TELL: "none",
    "depends": "none",
    "not tested": "open",
    "not testable here": "none",
}


def as_json(value: object) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def environment() -> Environment:
    """Jinja2 with everything escaped that does not say otherwise; a name that a template misspells is an error."""
    made = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, **TRIMMED)
    made.filters |= {
        "json": as_json,
        "badge": lambda verdict: BADGES.get(verdict, "none"),
        "percent": board.percent,
        "nats": board.nats,
        "counted": claim_rows.counted,
    }
    # A style sheet or script of ours, as it stands.
    made.globals["inlined"] = lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
    return made


def machines(kept: Kept) -> list[dict[str, Any]]:
    """Each kind of machine with its versions of software, and the studies that ran there."""
    known: dict[str, dict[str, Any]] = {}
    for study in kept.made.values():
        for hardware in as_list(study["provenance"].get("hardware")):
            new = {"hardware": hardware, "studies": [], "versions": []}
            entry = known.setdefault(json.dumps(hardware, sort_keys=True), new)
            entry["studies"].append(study["study"])
            entry["versions"] += [v for v in as_list(study["provenance"].get("versions")) if v not in entry["versions"]]
    return list(known.values())


def contents(kept: Kept) -> dict[str, Any]:
    """Contents of the page, as the templates show them."""
    shown = pictures.pictures(kept)
    figures = {picture.name: picture for picture in shown if not picture.group}
    claims = claim_rows.rows(kept, figures)
    rows = [row for results in (kept, *kept.beside) for row in board.rows(results)]
    rows.sort(key=lambda row: row.n < 2)  # one seed tells least
    return {
        "scale": kept.scale,
        "reference": kept.reference,
        "claims": claims,
        "counts": Counter(row["verdict"] for row in claims or ()),
        "verdicts": claim_rows.VERDICTS,
        "figures": figures,
        "pictures": shown,
        "board": [asdict(row) for row in rows],
        "families": board.FAMILIES,
        "margin": loss_margin(),
        "curves": curves.curves(kept),
        "points": curves.POINTS,
        "digits": curves.DIGITS,
        "made": kept.made,
        "machines": machines(kept),
        "others": [kept.link(path) for path in [kept.root / "claims.csv"] if path.is_file()],
    }


def render(kept: Kept) -> str:
    """The page of ``kept``."""
    return environment().get_template("report.html.j2").render(**contents(kept))


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="name of a file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder, or results/reference")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(help="the page; default: RESULTS/SCALE/report.html, of kept results in build")
    ] = None,
) -> None:
    """Write the report of a scale."""
    root = (results / scale).resolve()
    if not root.is_dir():
        fix = f"run the studies first: snakemake -c2 all --config scale={scale}"
        raise UserError(f"no results at scale {scale}", where=results / scale, fix=fix)
    target = out or place_of_output(results / scale) / "report.html"
    page = render(Kept(root, target))
    atomic_write(target, page)
    print(f"{target} ({len(page.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    typer.run(main)
