"""Numbers in words, as programs say them to people."""

from __future__ import annotations


def in_words(seconds: float) -> str:
    """``45 s``, ``12 min``, ``2 h 05 min``; minutes are rounded up, and no time is less than a second."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes = int(-(-seconds // 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
