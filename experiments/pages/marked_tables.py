"""Whole Markdown tables between markers, from committed tables.

The first line of a marker has a reference without a column (:mod:`experiments.pages.references`) and options; the
others a column each, or several with `` | `` between them: its name, its title, and how its values are written::

    <!-- table: workstation/policies/comparisons.csv variant=cqm sort=-n missing="No run is kept yet."
    rival "EDGC against"
    difference_nats "difference, nats" +.4f -->

* ``sort=column`` or ``sort=-column`` orders the rows;
* ``missing="..."`` is what stands there as long as the file does not exist;
* ``pivot=column`` makes a column of each of its values, whose cells are the last line's; ``{}`` in that line's title
  stands for the value, and the other lines name the rows. ``order=a,b`` chooses and orders the values.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.pages.references import BadReference, Row, Written, number, parse, split, written

OPTIONS = ("sort", "missing", "pivot", "order")


def table_text(reference: str, names: dict[str, str] | None = None) -> str:
    """A Markdown table, or the sentence for a missing file, with its line end. Raises :class:`BadReference`."""
    first, *lines = reference.strip().splitlines()
    words = split(first)
    if words and words[0] == "verdicts":
        from experiments.pages.verdict_table import verdict_table  # reads tables by pandas: slow to import

        return verdict_table(*words[1:])
    given = [word for word in words[1:] if word.partition("=")[0] in OPTIONS]
    options = {word.partition("=")[0]: word.partition("=")[2] for word in given}
    chosen = parse(" ".join(_quoted(word) for word in words if word not in given), names)
    if not chosen.path.is_file() and "missing" in options:
        return options["missing"] + "\n"
    rows = chosen.rows()
    if not rows or not lines:
        raise BadReference("the table has no rows" if lines else "the table has no columns", "correct the reference")
    if "sort" in options:
        rows = _sorted(rows, options["sort"])
    columns = []
    for line in (part for whole in lines for part in whole.split(" | ")):
        what, *rest = split(line)
        columns.append((rest[0] if rest else what, written([what, *rest[1:]])))
    if "pivot" in options:
        return _pivoted(rows, columns, options["pivot"], options.get("order"))
    return markdown([title for title, _ in columns], [[column.text([row]) for _, column in columns] for row in rows])


def _pivoted(rows: list[Row], columns: Sequence[tuple[str, Written]], by: str, order: str | None) -> str:
    if by not in rows[0]:
        raise BadReference(f"there is no column {by} to make columns of", "name a column of the table")
    *labels, (title, cell) = columns
    values = order.split(",") if order else list(dict.fromkeys(str(row[by]) for row in rows))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(label.text([row]) for _, label in labels), []).append(row)
    lines = []
    for key, group in groups.items():
        chosen = [[row for row in group if str(row[by]) == value] for value in values]
        lines.append([*key, *(cell.text(found) if found else "-" for found in chosen)])
    return markdown([*(name for name, _ in labels), *(title.replace("{}", value) for value in values)], lines)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with its line end."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _sorted(rows: list[Row], by: str) -> list[Row]:
    name = by.removeprefix("-")
    if name not in rows[0]:
        raise BadReference(f"there is no column {name} to sort by", "name a column of the table")
    try:
        return sorted(rows, key=lambda row: number(row[name], name), reverse=by.startswith("-"))
    except BadReference:
        return sorted(rows, key=lambda row: str(row[name]), reverse=by.startswith("-"))


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
