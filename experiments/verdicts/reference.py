"""Write the committed reference from finished results: ``python -m experiments.verdicts.reference --scale ci``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.figures import FIGURES
from experiments.common.files import atomic_write
from experiments.common.yaml_settings import load_yaml
from experiments.spec import matrix
from experiments.training.outputs import STATUS
from experiments.verdicts import archive, long_tables, replay
from experiments.verdicts.regression import TOLERANCES, Check, load_tolerances, read_table


def provenance(fresh: Path, studies: Sequence[str]) -> dict[str, Any]:
    """Versions, commit, data and kind of hardware of runs; no names of machines or users."""
    records = []
    for path in sorted(path for study in studies for path in fresh.glob(f"{study}/*/run.yaml")):
        record = load_yaml(path).get("provenance") or {}
        records.append({key: record.get(key) for key in ("started", "versions", "git", "hardware", "data_fingerprint")})
    if not records:
        raise UserError("no run to take the provenance from", where=fresh, fix="run the studies first: make reproduce")
    result: dict[str, Any] = {"runs": len(records)}
    dates = sorted(str(record["started"])[:10] for record in records if record["started"])
    if dates:
        result["dates"] = [dates[0], dates[-1]]
    for key in ("versions", "git", "hardware", "data_fingerprint"):
        different: list[Any] = []
        for record in records:
            if record[key] is not None and record[key] not in different:
                different.append(record[key])
        result[key] = different if len(different) > 1 else next(iter(different), None)
    return result


def update(checks: Sequence[Check], fresh: Path, reference: Path) -> list[Path]:
    """Copy the tables of every checked study, the claims and the provenance to ``reference``."""
    _need_results(fresh)
    for check in checks:
        read_table(fresh, check, f"make it with: snakemake -c2 {check.study}")
    studies = list(dict.fromkeys(check.study for check in checks))
    record = provenance(fresh, studies)
    sources = [fresh / study / name for study in studies for name in matrix.load_study(study).results]
    return _copy([*sources, fresh / "claims.csv"], fresh, reference, record, reference)


def update_study(study: str, fresh: Path, reference: Path) -> list[Path]:
    """Copy the tables of one study, whether it is checked or not, with a provenance of its own; older tables go.

    Longer ones are kept as Parquet (:mod:`experiments.verdicts.long_tables`). The provenance of an evaluation is that
    of the runs that are evaluated; a simulated one says that it has none.
    """
    _need_results(fresh)
    if not (fresh / study / "table.csv").is_file():
        raise UserError(f"study {study} has no table", where=fresh, fix=f"make it with: snakemake -c2 {study}")
    definition, table = matrix.load_study(study), pd.read_csv(fresh / study / "table.csv")
    sources = [fresh / study / name for name in definition.results]
    simulated = "kind" in table and bool((table["kind"] == "simulated").all())
    record = {"runs": 0, "kind": "simulated"} if simulated else provenance(fresh, list(definition.needs or [study]))
    written = _copy(sources, fresh, reference, record, reference / study)
    for path in (fresh / study / f"{name}.csv" for name in long_tables.long_tables(study)):
        if path.is_file():
            written.append(reference / study / f"{path.stem}.parquet")
            atomic_write(written[-1], long_tables.packed(path))
    for old in {*(reference / study).glob("*.csv"), *(reference / study).glob("*.parquet")} - set(written):
        old.unlink()  # a table that the study no longer makes would look like one of these runs
    return written


def keep_runs(study: str, names: Sequence[str], fresh: Path, reference: Path) -> list[Path]:
    """Keep the runs ``names`` of a study, and its figures: those that need nothing but it and the studies whose models
    it evaluates.

    Raises:
        UserError: a run has not ended, or a committed table does not follow from what is kept of the runs.
    """
    own = {study, *(matrix.load_study(study).needs or ())}
    alone = [name for name, needed in FIGURES.items() if needed[0] == study and own.issuperset(needed)]
    kinds = [f"figures/{kind.format(name)}" for name in alone for kind in replay.KINDS]
    written = [reference / path.relative_to(fresh) for kind in kinds for path in sorted(fresh.glob(kind))]
    for target in written:
        atomic_write(target, (fresh / target.relative_to(reference)).read_bytes())
    if not names:  # the study trains nothing
        return written
    for name in names:
        if not (fresh / study / name / STATUS).is_file():
            fix = f"train it first: snakemake -c2 {study}"
            raise UserError(f"run {name} has not ended", where=fresh / study, fix=fix)
    archive.add(fresh / study, reference / study, names, replace=True)
    with tempfile.TemporaryDirectory() as scratch:
        for path, found in replay.tables(reference, study, Path(scratch)):
            if found != replay.SAME:
                fix = f"name what {matrix.load_study(study).analysis} reads in READERS in kept_run.py, and keep again"
                raise UserError("the table does not follow from what is kept of the runs", where=path, fix=fix)
    return [*written, reference / study / archive.FOLDER]


def save_so_far(
    study: str, names: Sequence[str], fresh: Path, reference: Path, *, replace: bool = False
) -> tuple[int, list[Path]]:
    """Keep those of the runs ``names`` that have ended, and the tables and figures that follow from all kept ones.

    Returns how many are kept, and what was written. Raises as :func:`experiments.verdicts.archive.add`.
    """
    from experiments.analyse.__main__ import analyse

    kept = archive.add(fresh / study, reference / study, names, replace=replace)
    with tempfile.TemporaryDirectory() as folder:
        scratch, again = Path(folder) / fresh.name, Path(folder) / "again"
        analyse(study, scratch / study, archive.unpack(reference / study, scratch / study))
        written = [reference / study / archive.FOLDER, *update_study(study, scratch, reference)]
        drawn = list(replay.figures(reference, [study], again, write=True))
        joint = [name for name, needed in FIGURES.items() if study in needed and set(needed) != {study}]
        drawn += replay.redraw(joint, reference, again, write=True)  # those of several studies that are kept already
        written += [path for path, found in drawn if found != replay.SAME]
    return len(kept), written


def _need_results(fresh: Path) -> None:
    if not fresh.is_dir():
        raise UserError("there are no results", where=fresh, fix="run the studies first: make reproduce")


def _copy(sources: Sequence[Path], fresh: Path, reference: Path, record: dict[str, Any], beside: Path) -> list[Path]:
    found = [source for source in sources if source.is_file()]
    written = [reference / source.relative_to(fresh) for source in found]
    for source, target in zip(found, written, strict=True):
        atomic_write(target, source.read_bytes())
    atomic_write(beside / "provenance.yaml", yaml.safe_dump(record, sort_keys=False))
    return [*written, beside / "provenance.yaml"]


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    reference: Annotated[Path | None, typer.Option(help="default: RESULTS/reference/SCALE")] = None,
    tolerances: Annotated[Path, typer.Option(help="the checks, which say what belongs to it")] = TOLERANCES,
    study: Annotated[str | None, typer.Option(help="this study alone, checked or not")] = None,
    runs: Annotated[bool, typer.Option(help="with --study: its runs and figures too")] = False,
    so_far: Annotated[
        bool, typer.Option(help="with --study: those of its runs that have ended, and their tables")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="with --so-far: runs that are kept already go")] = False,
) -> None:
    """Copy the tables that the regression check compares, or those of one study, with their provenance."""
    fresh, known = results / scale, reference or results / "reference" / scale
    names = [run.name for run in matrix.runs(study, scale)] if study and (runs or so_far) else []
    if so_far and not study:
        raise UserError("--so-far needs a study", fix="give its name with --study")
    if study and so_far:
        kept, written = save_so_far(study, names, fresh, known, replace=replace)
        print(f"{study}: {kept} of {len(names)} runs are kept")
    else:
        written = update_study(study, fresh, known) if study else update(load_tolerances(tolerances), fresh, known)
        written += keep_runs(study, names, fresh, known) if study and runs else []
    print(*written, sep="\n")


if __name__ == "__main__":
    typer.run(main)
