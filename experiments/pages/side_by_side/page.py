"""One Markdown page for a figure or table of the paper, and the index of all pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import paper_figures
from edgc.errors import UserError, nearest
from experiments.common import acting
from experiments.pages import claim_rows, pictures
from experiments.pages.claim_rows import ClaimRow
from experiments.pages.kept import Kept
from experiments.pages.side_by_side import comparison, framework, markdown, settings
from experiments.pages.side_by_side.spec import Page, Pages, Policy
from experiments.spec import matrix

GENERATED = "<!-- generated: python -m experiments.pages.side_by_side write -->"
INDEX, DRAWING = "index.md", "framework.svg"
NO_CLAIM = "no claim is judged here"


@dataclass(frozen=True)
class Place:
    """Where the pages are written, what they are made of, and the file that says so."""

    docs: Path
    results: Path
    spec: Path


def pages(spec: Pages, place: Place) -> dict[str, str]:
    """The content of every file of the folder by its name; ``UserError`` names what a page asks for in vain."""
    verdicts = {scale: _verdicts(place, scale) for scale in spec.scales}
    found = {f"{page.id}.md": _page(page, spec, place, verdicts) for page in spec.pages}
    return {INDEX: _index(spec, place, verdicts), **found, DRAWING: framework.svg()}


def _verdicts(place: Place, scale: str) -> dict[str, ClaimRow]:
    root = place.results / scale
    rows = claim_rows.rows(Kept(root, place.docs / INDEX), [])
    if rows is None:
        raise UserError("no verdicts are kept", where=root, fix=f"make keep-claims SCALE={scale}")
    return {row.id: row for row in rows}


def _page(page: Page, spec: Pages, place: Place, verdicts: dict[str, dict[str, ClaimRow]]) -> str:
    path, where = place.docs / f"{page.id}.md", f"{place.spec}, page {page.id}"
    parts = [GENERATED, f"# {page.title}", f"In the paper: {page.item}. [All pages, and the words used]({INDEX})"]
    if page.claims:
        parts.append(_headline(page, verdicts))
    parts += ["## What the paper shows", _flat(page.shows)]
    if page.unknown:
        parts.append(f"**Not known here:** {_flat(page.unknown)}")
    if page.drawing:
        parts.append(f"![{_flat(page.drawing)}]({DRAWING})")
    if page.settings.theirs or page.settings.ours:
        parts += ["## Its setting and ours", settings.table(page.settings, place.results)]
    if page.comparisons:
        parts.append("## Theirs and ours")
        parts += [comparison.render(table, place.results, path, where) for table in page.comparisons]
    if page.figures:
        parts.append("## Our figures" if len(page.figures) > 1 else "## Our figure")
        parts += [_figure(place, figure.name, figure.scale, path, where) for figure in page.figures]
    parts += ["## Verdict", _verdict(page, verdicts)]
    if page.policies:
        parts += [_acted(page.policies, place.results, where)]
    if page.differs:
        parts += ["## What differs", markdown.bullets(page.differs)]
    if page.decides:
        parts += ["## What would decide it", markdown.bullets(page.decides)]
    return "\n\n".join(parts) + "\n"


def _said(page: Page, known: Mapping[str, ClaimRow]) -> str:
    """The verdicts of a page's claims at one scale, each once."""
    return ", ".join(dict.fromkeys(known[claim].verdict for claim in page.claims if claim in known))


def _kinds(page: Page, verdicts: Mapping[str, Mapping[str, ClaimRow]]) -> str:
    rows = [known[claim] for known in verdicts.values() for claim in page.claims if claim in known]
    return ", ".join(dict.fromkeys(row.kind.upper() for row in rows))


def _headline(page: Page, verdicts: Mapping[str, Mapping[str, ClaimRow]]) -> str:
    """The page's answer in one line."""
    said = "; ".join(f"{scale}: **{_said(page, known)}**" for scale, known in verdicts.items())
    return f"Verdict, {_kinds(page, verdicts)}: {said}."


def _flat(text: str) -> str:
    return " ".join(text.split())


def _figure(place: Place, name: str, scale: str, page: Path, where: object) -> str:
    path = place.results / scale / "figures" / f"{name}.png"
    if not path.is_file():
        known = sorted(found.stem for found in path.parent.glob("*.png"))
        raise UserError(f"figure {name!r} is not kept at scale {scale}", where=where, fix=nearest(name, known))
    caption = paper_figures.caption(name)
    image = f"![{markdown.alternative(caption, pictures.seen(path))}]({markdown.relative(path, page)})"
    return f"{image}\n\n{markdown.plain(caption)} Scale: {scale}."


def _verdict(page: Page, verdicts: dict[str, dict[str, ClaimRow]]) -> str:
    if not page.claims:
        return f"{NO_CLAIM.capitalize()}: the paper states no value for it that is known here."
    rows, notes = [], []
    for claim in page.claims:
        for scale, known in verdicts.items():
            row = known.get(claim)
            if row is None:
                continue
            ours = f"{row.ours} ({row.interval})" if row.interval else row.ours
            n = "; ".join(part for part in (row.n, row.counts) if part)
            links = [f"[{'/'.join(link.name.split('/')[-2:])}]({link.href})" for link in row.evidence]
            evidence = ", ".join(links) or settings.NONE
            kind = row.kind.upper()
            rows.append([f"{row.claim} (`{claim}`)", row.paper, scale, ours, n, kind, f"**{row.verdict}**", evidence])
            if row.note:
                notes.append((f"`{claim}`, {scale}", row.note))
    header = ["claim", "paper", "scale", "ours (95 % interval, or range)", "n (seeds)", "kind", "verdict", "evidence"]
    table = markdown.table(header, rows)
    return f"{table}\n\nWhat each verdict rests on:\n\n{markdown.outline(notes)}" if notes else table


def _acted(policies: Iterable[Policy], results: Path, where: object) -> str:
    """In how many seeds EDGC's policy acted, of the runs that a page is about."""
    lines, silent = [], []
    for policy in policies:
        frame = comparison.read(results / policy.scale, f"{policy.study}/table.csv", where)
        if not acting.recorded(frame):
            silent.append(f"study `{policy.study}`, {policy.scale}: its tables do not say")
            continue
        wanted = policy.variants or tuple(frame["variant"].unique())
        for name in wanted:
            rows = frame[(frame["variant"] == name) & (frame["status"] == "ok")]
            if rows.empty:
                fix = nearest(name, frame["variant"].unique())
                raise UserError(f"unknown variant {name!r} of {policy.study}", where=where, fix=fix)
            seeds = acting.seeds_acted(rows)
            if seeds is not None:
                inside = ", ".join(f"{value:.0%}" for value in rows["windows_inside"])
                ranks = ", ".join(f"{value:g}" for value in rows["ranks_used"])
                said = [f"`{policy.study}`", policy.scale, str(rows["label"].iloc[0]), f"{seeds} of {len(rows)}"]
                lines.append([*said, ranks, inside])
    about = (
        "**Did EDGC's policy act?** It does where its rank moves: at least three ranks in use, and the rank strictly "
        "inside its limits in at least 30 % of the windows. Where it does not in two thirds of the seeds, the runs are "
        "those of a fixed rank and say nothing of the policy."
    )
    header = ["study", "scale", "run", "acted in seeds", "ranks used, by seed", "windows inside the limits, by seed"]
    return "\n\n".join([about, *([markdown.table(header, lines)] if lines else []), *silent])


def _index(spec: Pages, place: Place, verdicts: dict[str, dict[str, ClaimRow]]) -> str:
    rows = []
    for page in spec.pages:
        said = [_said(page, known) or settings.NONE for known in verdicts.values()]
        link = f"[{page.title}]({page.id}.md)"
        rows.append([link, page.item, *said, _kinds(page, verdicts) or settings.NONE])
    header = ["page", "part of the paper", *(f"verdict, {scale}" for scale in verdicts), "kind"]
    scales = {scale: matrix.load_scale(scale).title for scale in spec.scales}
    parts = [GENERATED, "# The paper side by side", _flat(spec.about), markdown.table(header, rows)]
    parts += ["## Versions of the paper", _named(spec.versions), "## Scales of ours", _named(scales)]
    return "\n\n".join([*parts, "## Words", _named(spec.words)] if spec.words else parts) + "\n"


def _named(texts: Mapping[str, str]) -> str:
    return markdown.bullets([f"**{name}**: {text}" for name, text in texts.items()])
