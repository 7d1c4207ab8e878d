"""Markdown that GitHub and mkdocs show alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def cell(text: str) -> str:
    """A text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; rows are as long as the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in ([cell(text) for text in row] for row in lines))


def bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(text.split())}" for text in texts)


def outline(texts: Sequence[tuple[str, str]]) -> str:
    """A heading a text, and under it the text's parts, which semicolons separate, a line each."""
    lines = []
    for heading, text in texts:
        lines += [f"- {heading}", *(f"    - {part}" for part in " ".join(text.split()).split("; "))]
    return "\n".join(lines)


def link(text: str, target: Path, page: Path) -> str:
    """A link from the file ``page`` to the file ``target``, relative as on GitHub."""
    return f"[{text}]({relative(target, page)})"


def relative(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target.resolve(), page.resolve().parent)).as_posix()


def plain(caption: str) -> str:
    """A caption in reStructuredText as Markdown; the two differ in how code is marked."""
    return " ".join(caption.replace("``", "`").split())


def alternative(caption: str, seen: str = "") -> str:
    """For those who do not see the figure: the bold title of its caption, without marks, and what is ``seen``."""
    text = plain(caption)
    title = text.split("**")[1] if text.startswith("**") else text
    words = f"{title}{'' if title.endswith(('.', '?')) else '.'} {seen}" if seen else title
    return words.replace("`", "").replace("[", "(").replace("]", ")").rstrip(".")
