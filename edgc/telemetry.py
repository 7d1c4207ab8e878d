"""One JSONL stream of events per run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def plain(value: Any) -> Any:
    """``value`` with non-finite floats as None (JSON has no NaN) and tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """All events of a stream, or those of one kind, in the order written."""
    with path.open(encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines if line.strip()]
    return [item for item in events if event is None or item["event"] == event]
