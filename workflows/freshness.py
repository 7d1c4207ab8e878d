"""Freshness of a result, made of the inputs that are there or not: judged by content, never by the time of a file.

Of an input that is younger than a result, as any is after ``cp -r`` or ``scp``, Snakemake compares the checksum with
the one on record. Of results that came without Snakemake's records, or whose records are of an earlier version,
nothing is known; Snakemake would make them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from snakemake.persistence import PersistenceBase

_recorded = PersistenceBase.input_checksums


def input_checksums(self: Any, job: Any, path: Any) -> set[str]:
    """Checksums of the input ``path`` in the records of a job's outputs.

    Without any, today's: the outputs are used as they are. But where Snakemake has made the input here after they came
    here, none: they are made again. The time that counts is the one that no copy can set.
    """
    known = {checksum for checksum in _recorded(self, job, path) if checksum is not None}
    if known:
        return known
    made = self.metadata(path)
    outputs = [Path(output) for output in job.output]
    arrived = min((output.stat().st_ctime for output in outputs if output.exists()), default=0.0)
    if made is not None and made.endtime is not None and made.endtime > arrived:
        return set()
    with Path(path).open("rb") as content:
        return {f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"}


def judge_by_content() -> None:
    """Have this Snakemake use :func:`input_checksums`."""
    PersistenceBase.input_checksums = input_checksums  # type: ignore[method-assign]
