"""What Snakemake does, told to the program that has started it: a line of JSON for each event, through a pipe.

The Snakefile calls :func:`attach` while it is read and :func:`plan` before the first job. In a Snakemake that was
started in another way nothing happens, and its output stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

PIPE = "EDGC_EVENTS"  # environment variable: the number of the file that events are written to
STARTED, FINISHED, FAILED, PLAN = "job_started", "job_finished", "job_error", "plan"
# Said by Snakemake below the level of a warning, and yet for the reader.
SHOWN = (
    "Nothing to be done",
    "Creating conda environment",
    "Downloading",
    "Pulling",
    "Trying to restart",
    "SLURM",
    "Job ",
)


class Events(logging.Handler):
    """Writes events of jobs to a file; once nobody reads it, no more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def send(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self.number, line.encode())

    def emit(self, record: logging.LogRecord) -> None:
        event = str(getattr(record, "event", None) or "")
        if event == STARTED:
            self.send(event, jobs=list(getattr(record, "jobs", ())))
        elif event == FINISHED:
            self.send(event, jobs=[getattr(record, "job_id", None)])
        elif event == FAILED:
            self.send(event, jobs=[getattr(record, "jobid", None)])


def is_shown(record: logging.LogRecord) -> bool:
    """Whether Snakemake still prints a record itself: warnings, errors, and commands where they are asked for."""
    event = getattr(record, "event", None)
    if record.levelno >= logging.WARNING or str(event) == "shellcmd":
        return True
    return event is None and str(record.msg).startswith(SHOWN)


def attach() -> None:
    """Send the events of this Snakemake to the program that waits for them, and leave the steps to its display."""
    number = os.environ.pop(PIPE, "")  # jobs do not inherit it
    if not number:
        return
    from snakemake.logging import logger

    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler" and logger.level > logging.DEBUG:
            handler.addFilter(is_shown)
    logger.addHandler(Events(int(number)))


def plan(dag: Any) -> None:
    """Send which jobs are to run."""
    from snakemake.logging import logger

    jobs = [
        {
            "id": job.jobid,
            "rule": job.rule.name,
            "wildcards": dict(job.wildcards_dict),
            "threads": int(job.threads),
            "command": job.rule.shellcmd is not None,
        }
        for job in dag.needrun_jobs()
    ]
    for handler in logger.handlers:
        if isinstance(handler, Events):
            handler.send(PLAN, jobs=jobs)
