"""Lines that Snakemake shows of a workflow: one for each step that starts, and at the end why a step has failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakemake.logging import DefaultFormatter, logger
from snakemake_interface_logger_plugins.common import LogEvent

from experiments.common.files import no_space

REFUSED = "error: "  # begins the last line of a program that was refused its input
SELF_EXPLAINING = (REFUSED, "interrupted: ")
HIDDEN = ("Select jobs", "Execute ", "Finished jobid")  # beginnings of messages that are of no use to who waits


def name(step: Mapping[str, Any]) -> str:
    """A step's rule and what it makes."""
    return " ".join([step["rule_name"], *step["wildcards"].values()])


class Short(DefaultFormatter):
    """Snakemake's lines, without the files and resources of each step: there are thousands."""

    def format_job_info(self, msg: Mapping[str, Any]) -> str:
        return name(msg)

    def format(self, record: logging.LogRecord) -> str:
        return "" if str(record.msg).startswith(HIDDEN) else super().format(record)


class Steps(logging.Handler):
    """Handler of Snakemake's messages that remembers the steps that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.failed: dict[int, list[str]] = {}  # the logs of each

    def emit(self, record: logging.LogRecord) -> None:
        fields = record.__dict__
        if fields.get("event") == LogEvent.JOB_INFO:
            self.names[fields["jobid"]] = name(fields)
            self.failed.pop(fields["jobid"], None)  # submitted again
        elif fields.get("event") == LogEvent.JOB_ERROR:
            self.failed[fields["jobid"]] = fields["log"]

    def faults(self, folder: Path) -> list[str]:
        """Reasons why a workflow with results in ``folder`` has not finished: the last line of each failed step's log,
        those of steps that were refused their input last."""
        lines = list[str]()
        for number, logs in self.failed.items():
            for path in filter(Path.is_file, map(Path, logs)):
                text = path.read_text(encoding="utf-8", errors="replace").strip()
                if line := text.rpartition("\n")[2]:
                    explained = line.startswith(SELF_EXPLAINING)
                    lines.append(line if explained else f"failed: {self.names[number]}: {line} (in {path})")
        if not lines:
            why = f"no space left in {folder}" if no_space("", folder) else "a step was ended or could not be started"
            return [f"not finished: {why}; the same command continues"]
        return sorted(dict.fromkeys(lines), key=lambda line: line.startswith(REFUSED))


def attach() -> Steps:
    """Show the steps of this Snakemake by :class:`Short`; returns what remembers those that fail."""
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler" and isinstance(handler.formatter, DefaultFormatter):
            handler.setFormatter(Short(handler.formatter.quiet, handler.formatter.show_failed_logs))
    logger.addHandler(steps := Steps())
    return steps
