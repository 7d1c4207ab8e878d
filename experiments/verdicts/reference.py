"""Write the committed reference from finished results: ``python -m experiments.verdicts.reference --scale ci``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

import paper_figures
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.spec import matrix
from experiments.verdicts import archive, details
from experiments.verdicts.regression import TOLERANCES, Check, load_tolerances, read_table


def provenance(fresh: Path, studies: Sequence[str]) -> dict[str, Any]:
    """Versions, commit, data and kind of hardware of runs; no names of machines or users."""
    records = []
    for path in sorted(path for study in studies for path in fresh.glob(f"{study}/*/run.yaml")):
        record = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("provenance") or {}
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

    Longer ones that a figure is drawn from are kept as Parquet (:mod:`experiments.verdicts.details`). The provenance of
    an evaluation is that of the runs that are evaluated; a simulated one says that it has none.
    """
    _need_results(fresh)
    if not (fresh / study / "table.csv").is_file():
        raise UserError(f"study {study} has no table", where=fresh, fix=f"make it with: snakemake -c2 {study}")
    definition = matrix.load_study(study)
    sources = [fresh / study / name for name in definition.results]
    trained = list(definition.needs or [study])
    record = {"runs": 0, "kind": "simulated"} if _simulated(fresh / study) else provenance(fresh, trained)
    written = _copy(sources, fresh, reference, record, reference / study)
    for table in (fresh / study / f"{name}.csv" for name in details.details(study)):
        if table.is_file():
            written.append(reference / study / f"{table.stem}.parquet")
            atomic_write(written[-1], details.packed(table))
    tables = [*(reference / study).glob("*.csv"), *(reference / study).glob("*.parquet")]
    for old in set(tables) - set(written):
        old.unlink()  # a table that the study no longer makes would look like one of these runs
    return written


def _simulated(folder: Path) -> bool:
    """Whether every row of a study says so."""
    table = pd.read_csv(folder / "table.csv")
    return "kind" in table and bool((table["kind"] == "simulated").all())


def keep_runs(study: str, names: Sequence[str], fresh: Path, reference: Path) -> list[Path]:
    """Copy the runs ``names`` of a study, as one file, and its figures to ``reference``: those that need nothing but
    it and the studies whose models it evaluates.

    What had been saved of it while it was unfinished goes.
    """
    content = archive.pack(fresh / study, names) if names else None
    own = {study, *(matrix.load_study(study).needs or ())}
    alone = [name for name, needed in paper_figures.FIGURES.items() if needed[0] == study and own.issuperset(needed)]
    figures = [Path("figures") / f"{figure}.png" for figure in alone]
    figures += [path.relative_to(fresh) for name in alone for path in sorted(fresh.glob(f"figures/{name}-*.svg"))]
    written = [reference / path for path in figures if (fresh / path).is_file()]
    for target in written:
        atomic_write(target, (fresh / target.relative_to(reference)).read_bytes())
    if content is None:  # the study trains nothing
        return written
    atomic_write(reference / study / archive.NAME, content)
    (reference / study / archive.SO_FAR).unlink(missing_ok=True)
    return [*written, reference / study / archive.NAME]


def save_so_far(
    study: str, names: Sequence[str], fresh: Path, reference: Path, *, replace: bool = False
) -> tuple[int, list[Path]]:
    """Keep those of the runs ``names`` that have ended, and the tables and figures that follow from them alone; as the
    study's whole archive once all have.

    Where all runs of the study were kept once, the tables stay those of these, unless ``replace`` says that they go.

    Returns how many have ended, and what was written. Raises as :func:`experiments.verdicts.archive.save`.
    """
    from experiments.analyse.__main__ import analyse

    ended = archive.save(study, names, fresh, reference)
    whole = reference / study / archive.NAME
    if whole.is_file() and not replace:
        return ended, [reference / study / archive.SO_FAR]
    whole.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / fresh.name
        packed = reference / study / archive.SO_FAR
        if ended == len(names):
            packed = packed.replace(whole)
        analyse(study, scratch / study, archive.unpack(packed, scratch / study))
        written = [packed, *update_study(study, scratch, reference)]
        again = Path(folder) / "again" / fresh.name
        drawn = [*archive.replay(reference, [study], again, write=True)]
        for name, needed in paper_figures.FIGURES.items():
            if study in needed and set(needed) != {study}:  # those of several studies that are kept already
                drawn += archive.redraw(name, reference, again, write=True)
        written += [path for path, found in drawn if found != archive.SAME]
    return ended, written


def _need_results(fresh: Path) -> None:
    if not fresh.is_dir():
        raise UserError("there are no results", where=fresh, fix="run the studies first: make reproduce")


def _copy(sources: Sequence[Path], fresh: Path, reference: Path, record: dict[str, Any], beside: Path) -> list[Path]:
    written = []
    for source in sources:
        if source.is_file():
            target = reference / source.relative_to(fresh)
            atomic_write(target, source.read_bytes())
            written.append(target)
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
        bool, typer.Option(help="with --study: those of its runs that have ended, and what they show")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="with --so-far: the runs of an earlier time go, with their tables")
    ] = False,
) -> None:
    """Copy the tables that the regression check compares, or those of one study, with their provenance."""
    fresh, known = results / scale, reference or results / "reference" / scale
    if so_far:
        if study is None:
            raise UserError("--so-far needs a study", fix="give its name with --study")
        names = [run.name for run in matrix.runs(study, scale)]
        ended, written = save_so_far(study, names, fresh, known, replace=replace)
        print(f"{study}: {ended} of {len(names)} runs have ended", *written, sep="\n")
        if all((known / study / name).is_file() for name in (archive.NAME, archive.SO_FAR)):
            print(f"its tables stay those of {archive.NAME}; --replace makes them of these runs")
        return
    written = update_study(study, fresh, known) if study else update(load_tolerances(tolerances), fresh, known)
    if study and runs:
        written += keep_runs(study, [run.name for run in matrix.runs(study, scale)], fresh, known)
    for path in written:
        print(path)


if __name__ == "__main__":
    typer.run(main)
