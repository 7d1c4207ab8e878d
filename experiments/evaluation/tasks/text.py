"""Parts that several tasks share: held-out texts, and the text before a place in one of them."""

from __future__ import annotations

from typing import Any

CONTEXT_CHARACTERS = 320  # about 100 tokens; lm-eval cuts from the left what a model cannot read

Row = dict[str, Any]
Text = tuple[str, str]  # (path, text)


def context_before(text: str, end: int) -> str:
    """Up to ``CONTEXT_CHARACTERS`` before ``end``, from the start of a line on where there is one."""
    start = max(0, end - CONTEXT_CHARACTERS)
    if start > 0:
        start = text.find("\n", start, end) + 1 or start
    return text[start:end]
