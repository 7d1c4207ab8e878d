"""Write the committed reference from finished results: ``python -m experiments.verdicts.reference --scale ci``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

from edgc.errors import UserError
from experiments.analyse.__main__ import analyse
from experiments.common.cli import main_guard
from experiments.common.figures import FIGURES, missing
from experiments.common.files import atomic_write
from experiments.common.yaml_settings import load_yaml
from experiments.spec import matrix
from experiments.training.outputs import STATUS
from experiments.verdicts import archive, replay
from experiments.verdicts.regression import Check, load_tolerances, read_table

PROVENANCE = ("versions", "git", "code", "hardware", "data_fingerprint")


def provenance(fresh: Path, studies: Sequence[str]) -> dict[str, Any]:
    """Versions, commit, data and kind of hardware of runs; no names of machines or users."""
    paths = sorted(path for study in studies for path in fresh.glob(f"{study}/*/run.yaml"))
    records = [load_yaml(path).get("provenance") or {} for path in paths]
    if not records:
        raise UserError("no run to take the provenance from", where=fresh, fix="run the studies first: make reproduce")
    result: dict[str, Any] = {"runs": len(records)}
    if dates := sorted(str(record["started"])[:10] for record in records if record.get("started")):
        result["dates"] = [dates[0], dates[-1]]
    for key in PROVENANCE:
        different: list[Any] = []
        for value in (record.get(key) for record in records):
            if value is not None and value not in different:
                different.append(value)
        result[key] = different if len(different) > 1 else next(iter(different), None)
    return result


def update(checks: Sequence[Check], fresh: Path, reference: Path) -> list[Path]:
    """Copy the tables of every checked study, the claims and the provenance to ``reference``."""
    _need_results(fresh)
    for check in checks:
        read_table(fresh, check, f"make it with: snakemake -c2 {check.study}")
    studies = list(dict.fromkeys(check.study for check in checks))
    tables = [f"{study}/{name}" for study in studies for name in matrix.load_study(study).results]
    contents = {name: (fresh / name).read_bytes() for name in (*tables, "claims.csv") if (fresh / name).is_file()}
    return _write(reference, contents, provenance(fresh, studies))


def keep(
    study: str, names: Sequence[str], fresh: Path, reference: Path, *, so_far: bool = False, replace: bool = False
) -> list[Path]:
    """Keep the runs ``names`` of a study, and the tables and figures that follow from all kept ones; returns what was
    written. Of a study that trains nothing the tables are kept as they are in ``fresh``.

    The provenance of an evaluation is that of the runs that are evaluated; a simulated study says that it has none.

    Args:
        fresh: results of a scale.
        reference: committed results of the scale.
        so_far: whether those that have ended are enough; else all have to have, and take the place of older ones.
        replace: with ``so_far``: whether other runs of their names give way.

    Raises:
        UserError: a run has not ended, another one is kept, or a table in ``fresh`` does not follow from kept runs.
    """
    _need_results(fresh)
    definition, kept = matrix.load_study(study), reference / study
    with tempfile.TemporaryDirectory() as folder:
        source = fresh
        if names:
            waiting = [name for name in names if not (fresh / study / name / STATUS).is_file()]
            if waiting and not so_far:
                fix = f"train it first: snakemake -c2 {study}"
                raise UserError(f"run {waiting[0]} has not ended", where=fresh / study, fix=fix)
            archive.add(fresh / study, kept, names, replace=replace or not so_far)
            source = Path(folder) / fresh.name
            analyse(study, source / study, archive.unpack(kept, source / study))
            for name in () if so_far else definition.results:
                _check_same(fresh / study / name, source / study / name, definition.analysis)
        if not (source / study / "table.csv").is_file():
            raise UserError(f"study {study} has no table", where=source, fix=f"make it with: snakemake -c2 {study}")
        table = pd.read_csv(source / study / "table.csv")
        simulated = "kind" in table and bool((table["kind"] == "simulated").all())
        runs = {"runs": 0, "kind": "simulated"} if simulated else provenance(source, list(definition.needs or [study]))
        paths = [path for name in definition.results if (path := source / study / name).is_file()]
        contents = {path.name: path.read_bytes() for path in paths}
        for path in (source / study / f"{name}.csv" for name in archive.long_tables(study)):
            if path.is_file():
                contents[f"{path.stem}.parquet"] = archive.packed_table(path)
        written = _write(kept, contents, runs)
        for old in {*kept.glob("*.csv"), *kept.glob("*.parquet")} - set(written):
            old.unlink()  # a table that the study no longer makes would look like one of these runs
        shown = [name for name, needed in FIGURES.items() if study in needed]
        alone = [name for name in shown if {study, *(definition.needs or ())}.issuperset(FIGURES[name])]
        # Figures of several studies are drawn again where they are kept already.
        drawn = replay.redraw(shown, reference, Path(folder) / "drawn", write=True, new=alone)
        written += [path for path, outcome in drawn if outcome == "written"]
        if lost := [name for name in alone if missing(name, reference)]:
            print(f"not drawn, for tables are missing: {', '.join(lost)}", file=sys.stderr)
    return [*written, kept / archive.FOLDER] if names else written


def _check_same(fresh: Path, computed: Path, analysis: str | None) -> None:
    if not fresh.is_file() or fresh.read_bytes() != computed.read_bytes():
        fix = f"name what {analysis} reads in READERS in archive.py, or make the table again, and keep again"
        raise UserError("the table does not follow from what is kept of the runs", where=fresh, fix=fix)


def _need_results(fresh: Path) -> None:
    if not fresh.is_dir():
        raise UserError("there are no results", where=fresh, fix="run the studies first: make reproduce")


def _write(folder: Path, contents: dict[str, bytes], record: dict[str, Any]) -> list[Path]:
    contents = contents | {"provenance.yaml": yaml.safe_dump(record, sort_keys=False).encode()}
    for name, content in contents.items():
        atomic_write(folder / name, content)
    return [folder / name for name in contents]


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    reference: Annotated[Path | None, typer.Option(help="default: RESULTS/reference/SCALE")] = None,
    study: Annotated[str | None, typer.Option(help="this study alone, checked or not: runs, tables, figures")] = None,
    so_far: Annotated[bool, typer.Option(help="with --study: those of its runs that have ended")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="with --so-far: runs that are kept already go")] = False,
) -> None:
    """Copy the tables that the regression check compares, or keep one study, with their provenance."""
    fresh, known = results / scale, reference or results / "reference" / scale
    if study is None:
        if so_far:
            raise UserError("--so-far needs a study", fix="give its name with --study")
        written = update(load_tolerances(), fresh, known)
    else:
        names = [run.name for run in matrix.runs(study, scale)]
        written = keep(study, names, fresh, known, so_far=so_far, replace=replace)
        print(f"{study}: {len(archive.checksums(known / study))} of {len(names)} runs are kept")
    print(*written, sep="\n")


if __name__ == "__main__":
    typer.run(main)
