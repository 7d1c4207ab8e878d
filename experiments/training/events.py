"""One JSONL stream of events per run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgc.checks import plain
from edgc.errors import UserError


class EventLog:
    """Appends events, one JSON object a line, each written whole before :meth:`write` returns.

    ``EventLog(None)`` swallows everything: ranks that do not log need no second code path.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1) if path is not None else None

    def write(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **plain(fields)}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_events(path: Path, event: str | None = None, *, torn: bool = False) -> list[dict[str, Any]]:
    """All events of a stream, or those of one kind, in the order written.

    Args:
        torn: leave out a last line without its end, as a killed process leaves it.

    Raises:
        UserError: a line is no event, so the stream was cut short or altered.
    """
    lines = path.read_bytes().split(b"\n")
    last = lines.pop()
    if last and not torn:
        lines.append(last)
    events = [_event(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    return [item for item in events if event is None or item["event"] == event]


def _event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        fix = "use a copy that is whole, or make the run again"
        raise UserError(f"line {number} is no whole event", where=path, fix=fix)
    return found
