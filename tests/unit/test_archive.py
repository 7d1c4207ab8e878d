"""Kept runs: written once, back as they were, refused where damaged, enough for the committed tables and figures."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from edgc.errors import UserError
from experiments.analyse.__main__ import analyse
from experiments.common.figures import missing
from experiments.verdicts import archive, kept_run, reference, replay
from paper_figures.__main__ import render

ROOT = Path(__file__).resolve().parents[2]
STUDY = "window_ablation"
KEPT = ROOT / "results" / "reference" / "ci"
NAMES = list(archive.checksums(KEPT / STUDY))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a scale with the kept runs of one study restored, its tables and its figure."""
    scale = tmp_path_factory.mktemp("made") / "ci"
    analyse(STUDY, scale / STUDY, archive.unpack(KEPT / STUDY, scale / STUDY))
    render(STUDY, scale, scale / "figures")
    return scale


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    """The runs, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "ci")) / STUDY


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """What is committed of the study, which a test may change."""
    return Path(shutil.copytree(KEPT / STUDY, tmp_path / "reference" / "ci" / STUDY))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(error: pytest.ExceptionInfo[UserError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("name", ["window_ablation", "moe"])
def test_restored_runs_are_kept_as_the_same_bytes(name: str, tmp_path: Path) -> None:
    [first, *others] = archive.unpack(KEPT / name, tmp_path)
    again = kept_run.pack(tmp_path / first, name)
    assert hashlib.sha256(again).hexdigest() == archive.checksums(KEPT / name)[first]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first, *others])
    # Runs follow runs, and the workflow makes again what is older than what it follows.
    assert len({path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}) == 1


def test_only_what_no_analysis_of_the_study_reads_is_left_out(study: Path) -> None:
    run = study / NAMES[0]
    before = kept_run.pack(run, STUDY)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in (event for event in events if event["event"] == "step"):
        event["lr"] = event["grad_norm"] = 0.1 * event["iteration"]
        for stage in event["stages"]:
            stage |= {"seconds_compress": 1.5e-3, "seconds_entropy": 0.1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "tensorboard").write_bytes(b"1")
    assert kept_run.pack(run, STUDY) == before
    log = kept_run.unpack(kept_run.pack(run, "entropy_trend"), run)["metrics.jsonl"].decode().splitlines()
    step = next(json.loads(line) for line in log if '"step"' in line)
    assert step["grad_norm"] == 0.1 and "lr" not in step and step["stages"][0].keys() >= {"rank", "entropy"}
    text = (run / "metrics.jsonl").read_text()
    for seconds in ("0.00150001", "0.0015000123"):  # in four bytes, or in eight
        (run / "metrics.jsonl").write_text(text.replace("0.0015,", f"{seconds},"))
        timed = kept_run.unpack(kept_run.pack(run, "rank_sweep"), run)["metrics.jsonl"]
        assert timed.count(f'"seconds_compress": {seconds}}}'.encode()) == 2 * 160


def test_tables_of_probes_come_back_to_the_last_bit(study: Path) -> None:
    path = study / NAMES[0] / "sampling.parquet"
    draws = np.random.default_rng(0).normal(size=2_000) + 1e3
    table = pd.DataFrame({"rule": ["even", "random"] * 1_000, "step": range(2_000), "seconds": draws})
    table["ranks"] = [[1, 2]] * 2_000
    table.loc[3, ["rule", "seconds"]] = None
    table.to_parquet(path, index=False)
    assert "sampling.parquet" not in kept_run.unpack(kept_run.pack(path.parent, STUDY), path)
    packed = kept_run.pack(path.parent, "sampling_ablation")
    content = path.read_bytes()
    path.write_bytes(kept_run.unpack(packed, path)["sampling.parquet"])
    back = pd.read_parquet(path)
    assert [list(ranks) for ranks in back["ranks"]] == list(table["ranks"])
    pd.testing.assert_frame_equal(back.drop(columns="ranks"), table.drop(columns="ranks"), check_exact=True)
    assert kept_run.pack(path.parent, "sampling_ablation") == packed
    path.write_bytes(content[:-9])
    with pytest.raises(UserError, match="run folder is damaged") as told:
        kept_run.pack(path.parent, "sampling_ablation")
    one_line(told, str(path))


def test_any_flipped_bit_of_what_is_kept_is_one_line_and_nothing_is_restored(kept: Path, tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    for path in (kept / "runs" / f"{NAMES[1]}.parquet", kept / "runs" / archive.SUMS):
        good = path.read_bytes()
        for place in [*draws.choice(len(good) - 1, 40, replace=False), len(good) - 1]:
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << int(draws.integers(8))]) + good[place + 1 :])
            with pytest.raises(UserError) as told:
                archive.unpack(kept, tmp_path / "again")
            one_line(told, "kept run is damaged", f"git checkout HEAD -- {path.parent}")
            assert not (tmp_path / "again").exists()
        path.write_bytes(good)
    for path in (kept / "runs" / f"{NAMES[1]}.parquet", kept / "runs" / f"{NAMES[0]}.parquet"):
        path.unlink()
        if NAMES[0] in path.name:
            path.symlink_to(KEPT / STUDY / "runs" / path.name)
        with pytest.raises(UserError, match="missing, a link") as told:
            archive.unpack(kept, tmp_path / "again")
        one_line(told, path.name)
    assert not (tmp_path / "again").exists()


def parquet_of(path: Path, table: pyarrow.Table, **options: object) -> None:
    parquet.write_table(table, path, **({"use_dictionary": False, "store_schema": False} | options))


def run_of(**more: pyarrow.Array) -> pyarrow.Table:
    """The least that is a kept run, but for ``more``."""
    return pyarrow.table({"run.yaml": ["x"], "status": ["ok\n"], "step": pyarrow.nulls(1), "event": ["{}"], **more})


HOSTILE = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"run.yaml": "x"})),
    "another file": lambda path: parquet_of(path, run_of(**{"../../home": pyarrow.array(["x"])})),
    "no settings": lambda path: parquet_of(path, run_of().drop_columns("run.yaml")),
    "a table of another form": lambda path: parquet_of(path, run_of(**{"tensors.parquet": pyarrow.array(["x"])})),
    "a step of another form": lambda path: parquet_of(path, run_of(step=pyarrow.array([{"stages": 1}]))),
    "many rows": lambda path: parquet_of(path, pyarrow.table({"status": pyarrow.nulls(2**26 + 1)})),
    "one text many times": lambda path: parquet_of(
        path, pyarrow.table({"status": ["0" * 2**20] * 2**6}), compression="zstd", use_dictionary=True
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_no_kept_run_is_refused_although_its_checksum_fits(kind: str, kept: Path) -> None:
    parquet_of(kept / "least.parquet", run_of())
    assert set(kept_run.unpack((kept / "least.parquet").read_bytes(), kept)) == {"metrics.jsonl", "run.yaml", "status"}
    path = kept / "runs" / f"{NAMES[-1]}.parquet"
    before = archive.checksums(kept)[NAMES[-1]]
    HOSTILE[kind](path)
    sums = kept / "runs" / archive.SUMS
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))
    with pytest.raises(UserError, match="kept run is damaged") as told:
        archive.unpack(kept, kept / "again")
    one_line(told, str(path))
    assert not (kept / "again").exists()


@pytest.mark.parametrize("name", ["../run", ".hidden", "a/b", "", "/root/run"])
def test_a_run_whose_name_leads_elsewhere_is_refused(name: str, kept: Path) -> None:
    sums = kept / "runs" / archive.SUMS
    sums.write_text(sums.read_text().replace(f"{NAMES[0]}.", f"{name}."))
    with pytest.raises(UserError, match="a line of the list"):
        archive.unpack(kept, kept / "again")


def test_a_new_run_adds_a_file_and_rewrites_none(kept: Path, study: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        archive.unpack(kept, study)
    whole = contents(kept / "runs")
    shutil.rmtree(kept / "runs")
    first, second, third = NAMES
    (study / second / "status").rename(study / "status")
    assert archive.add(study, kept, NAMES) == [first, third]
    shutil.rmtree(study / third)  # as in another clone, on another night
    (study / "status").rename(study / second / "status")
    (kept / "runs" / f"{first}.parquet").chmod(0o400)
    times = {path: path.stat().st_mtime_ns for path in kept.glob("runs/*.parquet")}
    assert archive.add(study, kept, NAMES) == NAMES
    assert contents(kept / "runs") == whole, "the list in the order of the study"
    assert times.items() <= {path: path.stat().st_mtime_ns for path in kept.glob("runs/*.parquet")}.items()
    assert archive.add(study, kept, [first, third]) == [first, third], "the study has no second run any more"
    assert not (kept / "runs" / f"{second}.parquet").exists()


def test_another_run_of_the_name_is_kept_only_if_asked(kept: Path, study: Path) -> None:
    before, settings = contents(kept / "runs"), study / NAMES[0] / "run.yaml"
    settings.write_text(settings.read_text().replace("started: '20", "started: '21"))
    (study / NAMES[1] / "status").unlink()
    with pytest.raises(UserError, match=f"another run {NAMES[0]} is kept") as told:
        archive.add(study, kept, NAMES)
    one_line(told, "--replace")
    assert contents(kept / "runs") == before
    assert archive.add(study, kept, NAMES, replace=True) == [NAMES[0], NAMES[2]]
    assert b"started: '21" in archive.read(kept, NAMES[0])["run.yaml"]
    with pytest.raises(UserError, match="no run of window_ablation has ended"):
        archive.add(study / "elsewhere", kept.parent / "other" / STUDY, NAMES)


def test_what_has_ended_shows_its_tables_and_they_follow_from_it(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    (study / NAMES[1] / "status").unlink()
    with pytest.raises(UserError, match=f"run {NAMES[1]} has not ended"):
        reference.keep(STUDY, NAMES, study.parent, kept)
    written = reference.keep(STUDY, NAMES, study.parent, kept, so_far=True)
    table = pd.read_csv(kept / STUDY / "table.csv")
    assert [f"{row.variant}-s{row.seed}" for row in table.itertuples()] == [NAMES[0], NAMES[2]]
    assert {kept / STUDY / "table.csv", kept / STUDY / "provenance.yaml", kept / STUDY / "runs"} <= set(written)
    assert kept / "figures" / f"{STUDY}.png" in written
    found = dict(replay.tables(kept, STUDY, tmp_path / "again"))
    assert kept / STUDY / "table.csv" in found and set(found.values()) == {replay.SAME}


def test_a_study_is_kept_if_its_tables_follow_from_the_kept_runs(study: Path, tmp_path: Path) -> None:
    kept = tmp_path / "reference" / "ci"
    (kept / STUDY).mkdir(parents=True)
    (kept / STUDY / "older.csv").write_text("a table that the study no longer makes")
    reference.keep(STUDY, NAMES, study.parent, kept)
    names = {path.name for path in (KEPT / STUDY).iterdir()}
    assert {path.name for path in (kept / STUDY).iterdir()} == names
    for path in (path for path in (KEPT / STUDY).rglob("*") if path.is_file() and path.name != "provenance.yaml"):
        assert (kept / STUDY / path.relative_to(KEPT / STUDY)).read_bytes() == path.read_bytes(), path
    assert (kept / "figures" / f"{STUDY}.png").read_bytes() == (KEPT / "figures" / f"{STUDY}.png").read_bytes()
    table = study / "table.csv"
    table.write_text(table.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match="does not follow from what is kept") as told:
        reference.keep(STUDY, NAMES, study.parent, kept)
    one_line(told, str(table))


def run_replay(
    results: Path, capsys: pytest.CaptureFixture[str], study: str = STUDY, **options: bool
) -> tuple[int, str]:
    code: object = 0
    try:
        replay.main("ci", study, results, **options)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return int(str(code)), said.out + said.err


def test_replay_tells_a_file_that_does_not_follow_from_the_runs(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept.parent / "figures").mkdir()
    shutil.copy(KEPT / "figures" / f"{STUDY}.png", kept.parent / "figures")
    code, output = run_replay(tmp_path, capsys)
    assert code == 0, output
    detail = kept / "trajectories.parquet"
    assert output.count("same") == len(list(kept.glob("*.csv"))) + 3 and str(detail) in output
    figure, table, good = kept.parent / "figures" / f"{STUDY}.png", kept / "table.csv", detail.read_bytes()
    table.write_text(table.read_text().replace("1", "2", 1))
    figure.write_bytes(b"other")
    pd.read_parquet(detail).assign(rank=1).to_parquet(detail)
    code, output = run_replay(tmp_path, capsys)
    assert code == 1 and output.count("DIFFERENT") == 3
    assert run_replay(tmp_path, capsys, "methods")[0] == 2
    # What was measured is never replaced, only what is drawn or drawn from.
    code, output = run_replay(tmp_path, capsys, write=True)
    assert code == 1 and output.count("DIFFERENT") == 1 and f"DIFFERENT  {table}" in output
    assert output.count("written") == 3, "with a figure that was not kept before"
    assert detail.read_bytes() == good and figure.read_bytes().startswith(b"\x89PNG")
    assert (kept.parent / "figures" / "window_correlation.png").is_file()
    detail.unlink()
    assert f"DIFFERENT  {figure}" in run_replay(tmp_path, capsys)[1], "a figure without its tables follows from none"


def test_a_figure_drawn_from_parquet_has_the_bytes_of_one_drawn_from_csv(study: Path, tmp_path: Path) -> None:
    packed = archive.packed_table(study / "trajectories.csv")
    (study / "trajectories.csv").unlink()
    assert missing(STUDY, study.parent)
    (study / "trajectories.parquet").write_bytes(packed)
    for again in render(STUDY, study.parent, tmp_path / "again"):
        assert again.read_bytes() == (study.parent / "figures" / again.name).read_bytes()
    (study / "trajectories.parquet").write_bytes(packed[:-9])
    with pytest.raises(UserError, match="table is damaged"):
        render(STUDY, study.parent, tmp_path / "again")


def test_committed_results_leave_the_repository_small() -> None:
    sizes = {path: path.stat().st_size for path in (ROOT / "results" / "reference").rglob("*") if path.is_file()}
    largest = sorted(sizes, key=sizes.__getitem__)[-3:]
    assert sum(sizes.values()) < 40 * 2**20, f"move the largest to a release, see CONTRIBUTING.md: {largest}"
