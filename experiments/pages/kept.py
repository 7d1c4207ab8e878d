"""Contents of a folder of results: its studies, their tables, runs and provenance, and where links to them lead.

The folder is that of a scale, ``results/ci`` with run folders, or what is committed of it, ``results/reference/ci``,
where tables stand for the runs and some runs are kept as a file each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.errors import UserError
from experiments.common import written_tables
from experiments.common.yaml_settings import load_yaml
from experiments.spec import matrix
from experiments.spec.study import Study
from experiments.verdicts import archive, reference

COMMIT = 10  # digits of a commit that are shown


@dataclass(frozen=True)
class Link:
    """A file or folder beside the page; ``href`` is relative to the page."""

    name: str
    href: str


def as_list(value: object) -> list[Any]:
    """A provenance entry: one record, several that differ, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Kept:
    """Results of one scale as seen from a page.

    Args:
        root: folder of the scale.
        out: path of the page, from which links lead.
    """

    root: Path
    out: Path

    @property
    def scale(self) -> str:
        return self.root.name

    @property
    def reference(self) -> bool:
        """True of committed results, which hold tables, and a file a run, in place of run folders."""
        return self.root.parent.name == "reference"

    def link(self, path: Path, name: str | None = None) -> Link:
        """Link to a file or folder that exists."""
        return Link(name or path.name, Path(os.path.relpath(path.resolve(), self.out.resolve().parent)).as_posix())

    def table(self, relative: str) -> pd.DataFrame | None:
        """A table below the folder, CSV or Parquet, None where there is none; ``UserError`` where it is damaged."""
        path = written_tables.kept(self.root / relative)
        # "none" is the name of a method, not a missing value.
        return written_tables.read(path, keep_default_na=False, na_values=["", "nan"]) if path else None

    @property
    def beside(self) -> list[Kept]:
        """Results of other scales, in folders beside this one."""
        names = [name for name in matrix.scales() if name != self.scale and (self.root.parent / name).is_dir()]
        return [Kept(self.root.parent / name, self.out) for name in names]

    @cached_property
    def studies(self) -> dict[str, Study]:
        """Studies with at least one table here."""
        known = sorted([*matrix.studies(), *matrix.frozen()])
        names = [name for name in known if any((self.root / name).glob("*.csv"))]
        return {name: matrix.load_study(name) for name in names}

    @property
    def benchmarks(self) -> Path | None:
        """The folder with a folder for each machine, where there is one."""
        folder = self.root.parent / "bench" if self.reference else self.root / "benchmarks"
        return folder if folder.is_dir() else None

    @cached_property
    def made(self) -> dict[str, dict[str, Any]]:
        """Origin of every study's results, as far as what is kept says it:

        ``study``, ``title``, ``question`` and ``simulated``; links to its ``tables``; ``runs``, each with its name,
        seed, status and, where its folder is here, ``href``; ``kept``, what is there of the runs, and ``archive``, a
        link to where; ``provenance``, its ``commits`` and the fingerprints of training's ``codes``, of several studies
        together where ``of_all``.
        """
        return {name: self._made(name, study) for name, study in self.studies.items()}

    def _made(self, name: str, study: Study) -> dict[str, Any]:
        folder, simulated = self.root / name, study.simulated
        runs = [] if simulated or study.needs else self._runs(name)
        kept = list(archive.checksums(folder)) if self.reference else []
        record, of_all = ({}, False) if simulated else self._provenance(name, study)
        return {
            "study": name,
            "title": study.title,
            "question": " ".join(study.question.split()),
            "simulated": simulated,
            "tables": [self.link(path) for path in sorted(folder.glob("*.csv"))],
            "runs": runs,
            "kept": _what_is_kept(simulated, study, runs, kept),
            "archive": self.link(folder / archive.FOLDER / archive.SUMS) if kept else None,
            "provenance": record,
            "of_all": of_all,
            "codes": as_list(record.get("code")),
            "commits": [
                str(commit["commit"])[:COMMIT] + (" + changes" if commit.get("dirty") else "")
                for commit in as_list(record.get("git"))
                if commit.get("commit")
            ],
        }

    def _runs(self, study: str) -> list[dict[str, Any]]:
        """Runs that the study's table tells of."""
        table = self.table(f"{study}/table.csv")
        if table is None or not {"variant", "seed"} <= set(table):
            return []
        runs = []
        for row in table.drop_duplicates(["variant", "seed"]).to_dict("records"):
            folder = self.root / study / f"{row['variant']}-s{row['seed']}"
            href = self.link(folder).href if folder.is_dir() else None
            run = {"name": folder.name, "seed": int(row["seed"]), "status": str(row.get("status", "")), "href": href}
            runs.append(run)
        return runs

    def _provenance(self, name: str, study: Study) -> tuple[dict[str, Any], bool]:
        """Provenance of run folders, else what was kept with the study, else with all studies together."""
        try:
            return reference.provenance(self.root, list(study.needs or [name])), False
        except UserError:  # no run folder
            pass
        for folder, of_all in ((self.root / name, False), (self.root, True)):
            if (folder / "provenance.yaml").is_file():
                return load_yaml(folder / "provenance.yaml"), of_all
        return {}, False


def _what_is_kept(simulated: bool, study: Study, runs: list[dict[str, Any]], kept: list[str]) -> str:
    if simulated:
        return "Computed by the cluster model: there are no runs."
    if study.needs:
        return f"Evaluates the models of {', '.join(study.needs)}; its runs are theirs."
    if folders := sum(run["href"] is not None for run in runs):
        return f"{'All' if folders == len(runs) else f'{folders} of {len(runs)}'} run folders are here."
    if kept:
        return f"{len(kept)} runs are kept, a file each."
    return f"Tables alone are kept; commit {study.frozen} computed them." if study.frozen else "Tables alone are kept."
