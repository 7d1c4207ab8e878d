"""Files of a run folder: its stream of events, and whether all is still as training has written it. No torch here.

A run that has ended leaves ``manifest.json`` beside its files, with the size and checksum of each. Folders without one,
such as runs restored from an archive, are judged by their contents: the log of a run that has ended closes with an
``end`` event, and log, summary and ``status`` agree on how it ended.

A damaged file is never a result: it is refused in one line. A run that *failed* is one; it keeps its place in every
table, with whatever it has written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.yaml_settings import load_yaml
from experiments.training.run_folder import STATUSES

CHECKSUM_BYTES = 64 * 2**20  # larger files, such as weights, are recorded by their size alone
SETTINGS, LOG, SUMMARY, STATUS = "run.yaml", "metrics.jsonl", "summary.json", "status"
NAMES = (SETTINGS, LOG, SUMMARY, STATUS)
# Of `run.yaml`, in the order written: a file that was cut short lacks the last ones.
KEYS = ("scale", "study", "variant", "label", "seed", "model", "train", "compression", "probe")
COMPLETE = ("ok", "diverged")  # went on until they were told to stop, so their log has an end
UNFINISHED = "unfinished"


def write_manifest(folder: Path) -> None:
    """Record every file of a run that has ended; called before ``status`` is there."""
    entries = {}
    for name in manifest.files_below(folder):
        if not name.startswith("tensorboard/"):
            size = (folder / name).stat().st_size
            entries[name] = manifest.Entry(size, "") if size > CHECKSUM_BYTES else manifest.entry(folder / name)
    manifest.write(folder, manifest.Manifest({}, entries))


def damaged(path: Path, problem: str) -> UserError:
    """The error about one file of a run folder, with the folder to delete."""
    folder = path.parent.parent if path.parent.name == "checkpoint" else path.parent
    fix = f"delete the folder {folder} and start again: the run is made again"
    return UserError(f"run folder is damaged: {path.name} {problem}", where=path, fix=fix)


def check(folder: Path, prefixes: Sequence[str] = ("",)) -> bool:
    """Compare the files whose names begin with one of ``prefixes`` with the manifest; False where there is none.

    Raises:
        UserError: naming the first file that is missing, cut short or altered.
    """
    if not (folder / manifest.NAME).exists():
        return False
    try:
        recorded = manifest.read(folder).files
    except manifest.DamagedCheckpoint as error:
        raise damaged(folder / manifest.NAME, error.problem) from None
    for name, expected in recorded.items():
        if name.startswith(tuple(prefixes)) and (problem := manifest.problem(folder / name, expected)):
            raise damaged(folder / name, problem)
    return True


def read_status(folder: Path) -> str:
    """Status of the run, ``unfinished`` where it has not ended; ``UserError`` where the file holds something else."""
    path = folder / STATUS
    if not path.is_file():
        return UNFINISHED
    status = path.read_text(encoding="utf-8", errors="replace").strip()
    if status not in STATUSES:
        raise damaged(path, f"holds {status!r}, not one of {', '.join(STATUSES)}")
    return status


def read_settings(folder: Path) -> dict[str, Any]:
    """Content of ``run.yaml``; ``UserError`` where it is missing or cut short."""
    path = folder / SETTINGS
    try:
        values = load_yaml(path)
    except UserError as error:
        raise damaged(path, f"cannot be used: {error.message}") from None
    for key in KEYS:
        if key not in values:
            raise damaged(path, f"lacks {key}")
    return values


def _is_there(path: Path, status: str) -> bool:
    """Say if a file is there; ``UserError`` where a run that went to its end lacks it."""
    if not path.is_file() and status in COMPLETE:
        raise damaged(path, "is missing")
    return path.is_file()


def read_summary(folder: Path, status: str) -> dict[str, Any]:
    """Content of ``summary.json``; empty where an unfinished or failed run has none.

    Raises:
        UserError: it is damaged, or of another end than ``status``.
    """
    path = folder / SUMMARY
    if not _is_there(path, status):
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged(path, "is not valid JSON") from None
    if not isinstance(summary, dict):
        raise damaged(path, "is not a mapping")
    if status != UNFINISHED and (end := summary.get("status", status)) != status:
        raise damaged(path, f"says {end!r}, the file status {status!r}")
    return summary


def read_log(folder: Path, status: str) -> list[dict[str, Any]]:
    """Events of ``metrics.jsonl``.

    A run that failed or has not ended may stop in the middle of a line, which is left out; it may also have no log.

    Raises:
        UserError: a line in it is damaged, or a run that went to its end has no ``end`` event.
    """
    path = folder / LOG
    if not _is_there(path, status):
        return []
    try:
        events = read_events(path, torn=status not in COMPLETE)
    except UserError as error:
        raise damaged(path, f"is cut short or altered: {error.message}") from None
    if status in COMPLETE and (not events or events[-1]["event"] != "end"):
        raise damaged(path, "is cut short: it has no end event")
    return events


def window_decisions(
    decisions: Iterable[Mapping[str, Any]], window: int, before: float = math.inf
) -> list[Mapping[str, Any]]:
    """Decisions of phase active at window ends, in iterations below ``before``.

    The cost gate also decides inside windows, but never a rank; what is decided when a run is over is never in use.
    """
    active = [event for event in decisions if event.get("phase") == "active"]
    return [event for event in active if int(event["iteration"]) % window == 0 and int(event["iteration"]) < before]


def read_events(path: Path, event: str | None = None, *, torn: bool = False) -> list[dict[str, Any]]:
    """Events of a stream, all or those of one kind, in the order written.

    Args:
        torn: leave out a last line without its end, as a killed process leaves it.

    Raises:
        UserError: a line is no event, so the stream was cut short or altered.
    """
    *lines, last = path.read_bytes().split(b"\n")
    if last and not torn:
        lines.append(last)
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line) if line.strip() else {"event": ""}
        except ValueError:
            item = None
        if not isinstance(item, dict) or not isinstance(item.get("event"), str):
            fix = "use a copy that is whole, or make the run again"
            raise UserError(f"line {number} is no whole event", where=path, fix=fix)
        if item["event"] and event in (None, item["event"]):
            events.append(item)
    return events
