"""Committed runs: packed alike every time, unpacked whole, and enough for the committed tables and figures."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from edgc.errors import UserError
from experiments.analyse.__main__ import analyse
from experiments.common.files import atomic_write
from experiments.verdicts import archive, details, reference
from paper_figures.__main__ import render
from tests.unit import synthetic_runs as synthetic

ROOT = Path(__file__).resolve().parents[2]
STUDY = "window_ablation"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a scale with the runs of one study, its tables and its figure."""
    scale = tmp_path_factory.mktemp("made") / "ci"
    synthetic.write_window_ablation(scale)
    analyse(STUDY, scale / STUDY, names(scale / STUDY))
    render(STUDY, scale, scale / "figures")
    return scale


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    """Runs of one study with its tables and figure, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "ci")) / STUDY


def names(folder: Path) -> list[str]:
    return sorted((path.parent.name for path in folder.glob("*/status")), reverse=True)


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for name in names(folder) for path in (folder / name).iterdir() if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_same_runs_are_the_same_bytes_and_come_back(study: Path, tmp_path: Path) -> None:
    packed = archive.pack(study, names(study))
    for path in study.rglob("*"):
        os.utime(path, (1, 1))
    (study / names(study)[0] / "status").chmod(0o600)
    assert archive.pack(study, names(study)) == packed
    (tmp_path / archive.NAME).write_bytes(packed)
    assert archive.unpack(tmp_path / archive.NAME, tmp_path / "again") == names(study)
    # Runs follow runs, and the workflow makes again what is older than what it follows.
    assert len({path.stat().st_mtime_ns for path in (tmp_path / "again").glob("*/*")}) == 1
    assert files(tmp_path / "again") == files(study)
    assert min(path.stat().st_mtime for path in (tmp_path / "again").rglob("*")) > 10


def test_tables_of_runs_are_kept_smaller_with_the_same_rows(study: Path, tmp_path: Path) -> None:
    path = study / names(study)[0] / "sampling.parquet"
    draws = np.random.default_rng(0).normal(size=20_000) + 1e3
    table = pd.DataFrame({"rule": ["even", "random"] * 10_000, "step": range(20_000), "seconds": draws})
    table.loc[3, ["rule", "seconds"]] = None
    table.to_parquet(path, index=False)
    packed = archive.pack(study, names(study))
    (tmp_path / archive.NAME).write_bytes(packed)
    archive.unpack(tmp_path / archive.NAME, tmp_path / "again")
    back = tmp_path / "again" / path.relative_to(study)
    assert parquet.read_table(back).equals(parquet.read_table(path), check_metadata=True)
    pd.testing.assert_frame_equal(pd.read_parquet(back), table, check_exact=True)
    assert back.stat().st_size < 0.9 * path.stat().st_size
    assert archive.pack(tmp_path / "again", names(study)) == packed
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged table") as told:
        archive.pack(study, names(study))
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_what_training_leaves_beside_the_analysed_files_stays_out(study: Path, tmp_path: Path) -> None:
    before = archive.pack(study, names(study))
    (study / names(study)[0] / "checkpoint").mkdir()
    (study / names(study)[0] / "checkpoint" / "model.safetensors").write_bytes(b"1")
    (study / names(study)[0] / "events.out").write_bytes(b"1")
    assert archive.pack(study, names(study)) == before


def test_bad_input_is_one_line_and_changes_nothing(study: Path, tmp_path: Path) -> None:
    (tmp_path / archive.NAME).write_bytes(archive.pack(study, names(study)))
    before = files(study)
    with pytest.raises(UserError, match="is there already"):
        archive.unpack(tmp_path / archive.NAME, study)
    assert files(study) == before
    (tmp_path / "torn.tar.xz").write_bytes((tmp_path / archive.NAME).read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot unpack"):
        archive.unpack(tmp_path / "torn.tar.xz", tmp_path / "torn")
    assert not (tmp_path / "torn").exists()
    (study / names(study)[0] / "status").unlink()
    with pytest.raises(UserError, match="has not ended"):
        archive.pack(study, sorted(before_name.partition("/")[0] for before_name in before))


def test_runs_of_an_unfinished_study_are_kept_and_never_fewer(study: Path, tmp_path: Path) -> None:
    kept, (first, second, *others) = tmp_path / "reference" / "ci", names(study)
    (study / second / "status").unlink()
    everything = [first, second, *others]
    assert archive.save(STUDY, everything, study.parent, kept) == len(everything) - 1
    assert archive.unpack(kept / STUDY / archive.SO_FAR, tmp_path / "again") == [first, *others]
    with pytest.raises(UserError, match="no runs are kept"):
        archive.archived(kept)
    # In another clone, without what is kept: it is not replaced by less.
    before = (kept / STUDY / archive.SO_FAR).read_bytes()
    for name in others:
        (study / name / "status").unlink()
    with pytest.raises(UserError, match="is kept and not in the results"):
        archive.save(STUDY, everything, study.parent, kept)
    with pytest.raises(UserError, match="no run of window_ablation has ended"):
        archive.save(STUDY, [second], study.parent, tmp_path / "other")
    assert (kept / STUDY / archive.SO_FAR).read_bytes() == before


def test_what_has_ended_shows_its_tables_and_they_follow_from_it(study: Path, tmp_path: Path) -> None:
    kept, (first, second, *others) = tmp_path / "reference" / "ci", names(study)
    (study / second / "status").unlink()
    ended, written = reference.save_so_far(STUDY, [first, second, *others], study.parent, kept)
    assert ended == len(others) + 1
    table = pd.read_csv(kept / STUDY / "table.csv")
    assert sorted(f"{row.variant}-s{row.seed}" for row in table.itertuples()) == sorted([first, *others])
    assert {kept / STUDY / "table.csv", kept / STUDY / "provenance.yaml"} <= set(written)
    found = dict(archive.replay(kept, [STUDY], tmp_path / "again" / "ci"))
    assert kept / STUDY / "table.csv" in found and set(found.values()) == {archive.SAME}


def test_tables_of_an_earlier_time_go_only_if_asked(study: Path, tmp_path: Path) -> None:
    kept, everything = tmp_path / "reference" / "ci", names(study)
    whole = kept / STUDY / archive.NAME
    whole.parent.mkdir(parents=True)
    whole.write_bytes(archive.pack(study, everything))
    (study / everything[1] / "status").unlink()
    assert reference.save_so_far(STUDY, everything, study.parent, kept)[1] == [kept / STUDY / archive.SO_FAR]
    assert whole.is_file() and not (kept / STUDY / "table.csv").exists()
    reference.save_so_far(STUDY, everything, study.parent, kept, replace=True)
    assert not whole.exists() and len(pd.read_csv(kept / STUDY / "table.csv")) == len(everything) - 1


def test_of_runs_made_anew_those_of_this_time_come_back(study: Path, tmp_path: Path) -> None:
    kept, everything = tmp_path / "reference" / "ci", names(study)
    atomic_write(kept / STUDY / archive.NAME, archive.pack(study, everything))
    (study / everything[1] / "status").unlink()
    (study / everything[0] / "run.yaml").write_text("seed: of this time", encoding="utf-8")
    reference.save_so_far(STUDY, everything, study.parent, kept)
    done = CliRunner().invoke(archive.app, ["restore", "--scale", "ci", "--results", str(tmp_path), "--study", "other"])
    assert done.exit_code == 2 and "no runs are kept of other" in done.output
    study.parent.rename(tmp_path / "before")
    done = CliRunner().invoke(archive.app, ["restore", "--scale", "ci", "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (study / everything[0] / "run.yaml").read_text("utf-8") == "seed: of this time"
    assert names(study) == sorted(set(everything) - {everything[1]}, reverse=True)


def test_the_last_run_that_is_saved_makes_the_archive_whole(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    ended, written = reference.save_so_far(STUDY, names(study), study.parent, kept)
    assert ended == len(names(study)) and kept / STUDY / archive.NAME in written
    assert [path.name for path in archive.archived(kept, STUDY, (archive.NAME, archive.SO_FAR))] == [archive.NAME]
    assert set(dict(archive.replay(kept, [STUDY], tmp_path / "again" / "ci")).values()) == {archive.SAME}


def test_what_was_saved_goes_when_the_study_is_finished(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    archive.save(STUDY, names(study), study.parent, kept)
    reference.keep_runs(STUDY, names(study), study.parent, kept)
    assert [path.name for path in archive.archived(kept, STUDY, (archive.NAME, archive.SO_FAR))] == [archive.NAME]


def run_replay(results: Path, study: str = STUDY, *options: str) -> tuple[int, str]:
    command = ["replay", "--scale", "ci", "--study", study, "--results", str(results), *options]
    done = CliRunner().invoke(archive.app, command)
    return done.exit_code, done.output


def test_replay_tells_a_file_that_does_not_follow_from_the_runs(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    atomic_write(kept / STUDY / "verdicts.csv", "of a table that the study once had\n")
    reference.update_study(STUDY, study.parent, kept)
    assert not (kept / STUDY / "verdicts.csv").exists()
    reference.keep_runs(STUDY, names(study), study.parent, kept)
    code, output = run_replay(tmp_path)
    assert code == 0, output
    detail = kept / STUDY / "trajectories.parquet"
    assert output.count("same") == len(list(kept.rglob("*.csv"))) + 3 and str(detail) in output
    figure, table, good = kept / "figures" / f"{STUDY}.png", kept / STUDY / "table.csv", detail.read_bytes()
    table.write_text(table.read_text().replace("1", "2", 1))
    figure.write_bytes(b"other")
    pd.read_parquet(detail).assign(rank=1).to_parquet(detail)
    code, output = run_replay(tmp_path)
    assert code == 1
    assert output.count("DIFFERENT") == 3
    assert run_replay(tmp_path, "methods")[0] == 2
    # What was measured is never replaced, only what is drawn or drawn from.
    code, output = run_replay(tmp_path, STUDY, "--write")
    assert code == 1 and output.count("DIFFERENT") == 1 and f"DIFFERENT  {table}" in output
    assert output.count("written") == 3, "with a figure that was not kept before"
    assert detail.read_bytes() == good and figure.read_bytes().startswith(b"\x89PNG")
    assert (kept / "figures" / "window_correlation.png").is_file()


def test_a_figure_without_its_tables_is_not_taken_for_one_that_follows(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    reference.update_study(STUDY, study.parent, kept)
    reference.keep_runs(STUDY, names(study), study.parent, kept)
    (kept / STUDY / "trajectories.parquet").unlink()
    assert f"DIFFERENT  {kept / 'figures' / STUDY}.png" in run_replay(tmp_path)[1]


def test_a_figure_drawn_from_parquet_has_the_bytes_of_one_drawn_from_csv(study: Path, tmp_path: Path) -> None:
    packed = details.packed(study / "trajectories.csv")
    assert details.details(STUDY) == ["trajectories", "curves"] and packed == details.packed(study / "trajectories.csv")
    (study / "trajectories.csv").unlink()
    assert details.missing(STUDY, study.parent)
    (study / "trajectories.parquet").write_bytes(packed)
    assert not details.missing(STUDY, study.parent)
    for again in render(STUDY, study.parent, tmp_path / "again"):
        assert again.read_bytes() == (study.parent / "figures" / again.name).read_bytes()
    (study / "trajectories.parquet").write_bytes(packed[:-9])
    with pytest.raises(UserError, match="table is damaged"):
        render(STUDY, study.parent, tmp_path / "again")


def test_committed_tables_and_figures_follow_from_the_committed_runs(tmp_path: Path) -> None:
    kept = ROOT / "results" / "reference" / "ci"
    found = dict(archive.replay(kept, [STUDY], tmp_path / "ci"))
    assert {path.suffix for path in found} == {".csv", ".png", ".parquet"}
    assert {str(path) for path, how in found.items() if how != archive.SAME} == set()


def test_committed_results_leave_the_repository_small() -> None:
    sizes = {path: path.stat().st_size for path in (ROOT / "results" / "reference").rglob("*") if path.is_file()}
    largest = sorted(sizes, key=sizes.__getitem__)[-3:]
    assert sum(sizes.values()) < 60e6, f"move the largest to a release, see CONTRIBUTING.md: {largest}"
