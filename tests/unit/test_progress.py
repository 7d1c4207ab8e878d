"""What is shown of the steps of a workflow that have failed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from workflows.steps import Steps


def test_steps_that_fail_for_good_say_why_and_refused_input_comes_last(tmp_path: Path) -> None:
    steps, logs = Steps(), [tmp_path / name for name in ("refused", "broken", "mended", "silent")]
    for path, text in zip(logs, ("loading\nerror: a (in b); c\n\n", "x\nValueError: y", "z\n", ""), strict=True):
        path.write_text(text)

    def tell(event: str, number: int) -> None:
        record = logging.LogRecord("snakemake", logging.INFO, "", 0, event, None, None)
        said: dict[str, Any] = {"event": event, "jobid": number, "rule_name": "figure", "wildcards": {"figure": "f"}}
        vars(record).update(said, log=[str(logs[number])])
        steps.emit(record)

    for number in range(4):
        tell("job_info", number)
        tell("job_error", number)
    tell("job_info", 2)  # submitted again
    assert steps.faults(tmp_path) == [f"failed: figure f: ValueError: y (in {logs[1]})", "error: a (in b); c"]
    for number in (0, 1):
        tell("job_info", number)
    assert steps.faults(tmp_path) == [
        "not finished: a step was ended or could not be started; the same command continues"
    ]
