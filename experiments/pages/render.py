"""Render README.md and the pages of docs that hold numbers: Jinja templates over committed tables.

``python -m experiments.pages.render`` writes every page of ``docs/templates``; ``--check`` lists those that are stale.
In a template, ``{{ }}`` holds any expression over pandas' frames, and these functions:

* ``read("workstation/policies/comparisons.csv", variant="cqm")``: the rows with these values (a list: any of them) of a
  table below ``results/reference``;
* ``say(frame, "{difference_nats:+.4f}", rival="fixed rank")``: columns of the only row that fits, as text;
* ``table(frame, {"EDGC against": "{rival}", ...})``: a table in Markdown, titles with the format of their cells;
* ``interval(values, confidence=0.95)``: ``low`` and ``high`` of the t interval of their mean;
* ``smallest_seen(sd, n)``: the difference that n seeds see four times of five (:mod:`experiments.common.equivalence`);
* ``price_of_moving(costs)``: of ranks as text, by what fixed ranks cost (:mod:`experiments.analyse.ranges`);
* ``compare``: such a table of the paper's rows and ours, with the sources of ours;
* ``settings``, ``yaml``, ``verdicts``, ``standing``, ``acted``, ``figure``: runs' settings, files, claims, policies,
  figures (:mod:`experiments.pages.paper`).

A format is Python's, after ``*100`` where the value is scaled first; ``words`` writes whole numbers up to twelve as
words, and a missing number is a dash.
"""

import functools
import math
import re
import string
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jinja2
import pandas as pd
import typer

from edgc.errors import UserError
from experiments.analyse.ranges import price_of_moving
from experiments.common import written_tables
from experiments.common.cli import main_guard
from experiments.common.equivalence import interval, smallest_seen
from experiments.common.files import KEPT, ROOT, atomic_write
from experiments.common.yaml_settings import load_yaml
from experiments.pages import paper
from experiments.spec import matrix

TEMPLATES = ROOT / "docs" / "templates"
NOTHING = "-"
KINDS = {"measured", "simulated", "extrapolated", "computed", "modelled network"}  # of a row, where a table says it
POINT = re.compile(r" \((\S+) to \1\)")
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def formatted(value: Any, form: str = "") -> str:
    """A value as a page shows it.

    Args:
        value: a number or a text; nan and None are a dash.
        form: of Python, such as ``+.4f``; ``*100 .0f`` scales first; ``words``.
    """
    factor = 1.0
    if form.startswith("*"):
        scale, _, form = form[1:].partition(" ")
        factor = float(scale)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, str) or (not form and factor == 1):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else f"{value:.10g}" if isinstance(value, float) else str(value)
    if math.isinf(value):
        return "always"  # a limit that is never met
    if form == "words":
        return WORDS[int(value)] if value in range(len(WORDS)) else f"{value:g}"
    text = format(int(value) if form.endswith("d") else value * factor, form or ".4g")
    return text.lstrip("-+") if not float(text.replace(",", "").removesuffix("%")) else text  # no -0.0


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return formatted(value, format_spec)


def cells(form: str, row: Mapping[str, Any]) -> str:
    """``form`` with the row's values in place of ``{column:format}``; a dash where all that it names is missing."""
    names = [name for _, name, _, _ in string.Formatter().parse(form) if name]
    if names and all(formatted(row[name]) == NOTHING for name in names):
        return NOTHING
    # An interval that is missing, or is a point, is left out.
    return POINT.sub("", _Formatter().vformat(form, (), row))


@functools.lru_cache(maxsize=256)
def _read(name: str) -> pd.DataFrame:
    return written_tables.read(KEPT / name, keep_default_na=False, na_values=["", "nan"])


def read(name: str, **equal: Any) -> pd.DataFrame:
    """Rows of a table of ``results/reference`` whose columns have these values."""
    return chosen(_read(name), **equal)


def chosen(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """The rows whose columns have these values, or one of a list."""
    for column, value in equal.items():
        frame = frame[frame[column].isin(value if isinstance(value, (list, tuple)) else [value])]
    return frame


def say(frame: pd.DataFrame, form: str, **equal: Any) -> str:
    """The only row that fits as text. Raises ``UserError`` where none or several fit."""
    rows = chosen(frame, **equal)
    if len(rows) != 1:
        raise UserError(f"{len(rows)} rows fit {equal}, one is needed for {form!r}", fix="correct the conditions")
    return cells(form, rows.iloc[0].to_dict())


def table(
    frames: pd.DataFrame | Mapping[str, pd.DataFrame],
    columns: Mapping[str, str],
    above: Sequence[Sequence[str]] = (),
    across: tuple[str, str, str, Sequence[Any]] | None = None,
) -> str:
    """A table in Markdown.

    Args:
        frames: the rows; with names of frames, these stand in a first column, `whose`.
        columns: format of the cells by title.
        above: further rows, which stand first.
        across: a column whose values become columns: its name, the format of titles (``{}``), that of cells, and the
            values in order (by default all).

    Raises ``UserError`` where there are no rows.
    """
    named = dict(frames) if isinstance(frames, Mapping) else {"": frames}
    column, title, cell, order = across or ("", "", "", [])
    if across and not order:
        order = sorted({value for frame in named.values() for value in frame[column]})
    titles = [*([] if "" in named else ["whose"]), *columns, *(title.format(formatted(value)) for value in order)]
    lines = [list(row) for row in above]
    for name, frame in named.items():
        if frame.empty:
            raise UserError(f"the table of {', '.join(columns)} has no rows", fix="correct the conditions")
        groups: dict[Any, dict[Any, dict[str, Any]]] = {}  # rows by what stands first in their line
        for place, row in enumerate(frame.to_dict("records")):
            first = (*([name] if name else []), *(cells(form, row) for form in columns.values()))
            groups.setdefault((first, not across and place), {})[row.get(column)] = row
        for (first, _), rows in groups.items():
            lines.append([*first, *(cells(cell, rows[value]) if value in rows else NOTHING for value in order)])
    return paper.markdown_table(titles, lines)


def compare(
    page: Path,
    frames: Mapping[str, pd.DataFrame] | Sequence[str],
    columns: Mapping[str, str],
    where: Mapping[str, Any] | None = None,
    **layout: Any,
) -> str:
    """A :func:`table` of the paper's rows above ours, then the tables that ours come from, of which kind and seeds.

    Args:
        page: the page, from which links lead.
        frames: tables such as ``workstation/policies/summary.csv``; or our rows by the table that they are of.
        where: values of columns that choose the rows of ``frames``.
        columns, layout: as of :func:`table`.
    """
    named, sources = {}, []
    for name in frames:
        frame = chosen(frames[name] if isinstance(frames, Mapping) else _read(name), **(where or {}))
        scale, study, *file = name.split("/")
        clock = scale == "bench"
        simulated = not clock and matrix.load_study(study).simulated
        named[f"ours, {'by the clock' if clock else 'SIMULATED' if simulated else scale}"] = frame
        source = f"[{file[-1] if clock else '/'.join([study, *file])}]({paper.link(KEPT / name, page)})"
        if simulated:
            source += ", SIMULATED"
        else:
            kinds = set(frame["kind"]) if "kind" in frame else set()
            kinds = kinds if kinds and kinds <= KINDS else {"measured"}
            source += f" ({study if clock else scale}), {', '.join(sorted(kinds)).upper()}{_seeds(frame)}"
        sources.append(source)
    return f"{table(named, columns, **layout)}\n\nOurs: {'; '.join(sources)}."


def _seeds(frame: pd.DataFrame) -> str:
    """The number of seeds that rows are of: ``, seeds: 3``, or ``, seeds: 3 to 10``."""
    name = next((name for name in ("n_seeds", "n", "seeds") if name in frame), None)
    if name is None:
        return f", seeds: {frame['seed'].nunique()}" if "seed" in frame else ""
    least, most = int(frame[name].min()), int(frame[name].max())
    return f", seeds: {least}" if least == most else f", seeds: {least} to {most}"


def environment(page: Path) -> jinja2.Environment:
    """Environment with the functions that a template of the page can use; links lead from the page."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        comment_start_string="{##",  # {#anchor} is Markdown's
        comment_end_string="##}",
    )
    parts = paper.PageParts(page)
    made.filters["f"] = formatted
    made.globals |= {
        "read": read,
        "chosen": chosen,
        "say": say,
        "table": table,
        "interval": lambda values, confidence=0.95: interval(list(values), confidence),
        "smallest_seen": smallest_seen,
        "price_of_moving": price_of_moving,
        "compare": functools.partial(compare, page),
        "yaml": lambda name: load_yaml(ROOT / name),
        **{name: getattr(parts, name) for name in ("settings", "outcome", "standing", "verdicts", "acted", "figure")},
    }
    return made


def target(template: Path) -> Path:
    """The page that is made of a template."""
    name = template.relative_to(TEMPLATES)
    return ROOT / name if name.as_posix() == "README.md" else ROOT / "docs" / name


def rendered(template: Path) -> str:
    """The page's text. Raises ``UserError``, which names the template and the line."""
    name = template.relative_to(TEMPLATES).as_posix()
    try:
        return environment(target(template)).get_template(name).render()
    except jinja2.TemplateSyntaxError as error:
        message, line, fix = str(error), error.lineno, "correct the template"
    except (UserError, jinja2.UndefinedError, LookupError, ValueError, AttributeError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(template)), 0) or 0
        message, fix = f"{type(error).__name__}: {error}", "correct the template"
        if isinstance(error, UserError):
            message, fix = error.message, error.fix or fix
    raise UserError(message, where=f"docs/templates/{name}:{line}", fix=fix)


def templates() -> list[Path]:
    """Templates in the order of their names."""
    return sorted(TEMPLATES.rglob("*.md"))


@main_guard
def main(
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit code 1 if a page is stale")] = False,
) -> None:
    """Write the pages that are made of templates, and name those that changed."""
    stale = False
    for template in templates():
        page, text = target(template), rendered(template)
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale = True
            if not check:
                atomic_write(page, text)
            print(f"{page.relative_to(ROOT).as_posix()}: {'stale; make pages' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    typer.run(main)
