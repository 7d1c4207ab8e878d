"""Continuation choice in the manner of HellaSwag: which of four passages follows the context?

Documents come in groups of four, from four texts of one kind (file ending) and with passages of nearly equal
length. The four passages are the choices of all four documents, and each is right once. So whatever prefers
some passages without reading the context, be it by length, by frequent tokens or by place among the choices,
is right exactly once in four.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import PurePosixPath

from experiments.evaluation.tasks.text import CONTEXT_CHARACTERS, Row, Text, context_before

DOCUMENTS, CHOICES = 160, 4
PER_TEXT = 32  # passages of one text, at most, so that no long text dominates
# About 15 tokens: enough to tell by names and indentation, and short enough that a model of 64 positions reads
# three lines before them.
PASSAGE_CHARACTERS = 48
PASSAGE_BYTES = 60  # with the white space before it; no token is shorter than a byte, so such a model reads it whole


def passages(path: str, text: str, seed: int) -> list[Row]:
    """Places where a line starts, with what precedes and follows.

    The white space before the line belongs to the passage, because a tokenizer may join it to what follows.
    """
    draw = random.Random(f"{seed}:continuation:{path}")
    ends = [at for at, character in enumerate(text) if character == "\n"]
    draw.shuffle(ends)
    rows: list[Row] = []
    for end in ends:
        before = context_before(text, end).rstrip()
        start = end - (len(context_before(text, end)) - len(before))
        body = len(text[start:]) - len(text[start:].lstrip())
        after = text[start : start + body + PASSAGE_CHARACTERS]
        if start + len(after) < len(text):  # cut back to whole words
            after = after[: max(after.rfind(" "), after.rfind("\n"))].rstrip()
        fits = len(after.strip()) >= PASSAGE_CHARACTERS // 2 and len(after.encode()) <= PASSAGE_BYTES
        if fits and len(before) >= CONTEXT_CHARACTERS // 4:
            rows.append({"id": f"{path}:{start}", "path": path, "context": before, "passage": after})
        if len(rows) == PER_TEXT:
            break
    return rows


def grouped(rows: list[Row]) -> list[list[Row]]:
    """Groups of ``CHOICES`` rows of different texts and passages, neighbours in length of the passage."""
    remaining = sorted(rows, key=lambda row: (len(row["passage"].encode()), str(row["id"])))
    groups = []
    while remaining:
        group = [remaining.pop(0)]
        for row in remaining:
            if all(row["path"] != other["path"] and row["passage"] != other["passage"] for other in group):
                group.append(row)
            if len(group) == CHOICES:
                groups.append(group)
                remaining = [row for row in remaining if row not in group[1:]]
                break
    return groups


def continuation_rows(texts: list[Text], seed: int, _tokenizer: object) -> list[Row]:
    """At most ``DOCUMENTS`` rows, in whole groups; none with texts of fewer than four files of a kind."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for path, text in texts:
        kinds[PurePosixPath(path).suffix] += passages(path, text, seed)
    groups = [group for _, rows in sorted(kinds.items()) for group in grouped(rows)]
    draw = random.Random(f"{seed}:continuation")
    draw.shuffle(groups)
    documents = []
    for group in groups[: DOCUMENTS // CHOICES]:
        draw.shuffle(group)
        common = {"choices": [row.pop("passage") for row in group], "sources": [row["id"] for row in group]}
        documents += [row | common | {"answer": answer} for answer, row in enumerate(group)]
    return sorted(documents, key=lambda row: str(row["id"]))
