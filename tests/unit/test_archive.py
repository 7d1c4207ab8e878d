"""Kept runs: written once, back as they were, refused where damaged, enough for the committed tables and figures."""

from __future__ import annotations

import hashlib
import json
import os
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
from experiments.verdicts import archive, reference, replay
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


def test_restored_runs_are_kept_as_the_same_content(tmp_path: Path) -> None:
    kept = ROOT / "results" / "reference" / "workstation" / "rank_sweep"
    [first, *others] = archive.unpack(kept, tmp_path)
    again = archive.pack(tmp_path / first, "rank_sweep")
    assert archive.files_of(again) == archive.read(kept, first)
    assert archive.pack(tmp_path / first, "rank_sweep") == again
    assert len(again) < 1.1 * (kept / "runs" / f"{first}.parquet").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first, *others])
    # Runs follow runs, and the workflow makes again what is older than what it follows.
    assert len({path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}) == 1


def test_only_what_no_analysis_of_the_study_reads_is_left_out(study: Path) -> None:
    run = study / NAMES[0]
    before = archive.pack(run, STUDY)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in (event for event in events if event["event"] == "step"):
        event["lr"] = event["grad_norm"] = 0.1 * event["iteration"]
        for stage in event["stages"]:
            stage |= {"seconds_compress": 1.5e-3, "seconds_entropy": 0.1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert archive.pack(run, STUDY) == before
    log = archive.files_of(archive.pack(run, "entropy_trend"))["metrics.jsonl"].decode().splitlines()
    step = next(json.loads(line) for line in log if '"step"' in line)
    assert step["grad_norm"] == 0.1 and "lr" not in step and step["stages"][0].keys() >= {"rank", "entropy"}
    text = (run / "metrics.jsonl").read_text()
    for seconds in ("0.00150001", "0.0015000123"):  # in four bytes, or in eight
        (run / "metrics.jsonl").write_text(text.replace("0.0015,", f"{seconds},"))
        timed = archive.files_of(archive.pack(run, "rank_sweep"))["metrics.jsonl"]
        assert timed.count(f'"seconds_compress": {seconds}}}'.encode()) == 2 * 160


def test_tables_of_probes_come_back_to_the_last_bit(study: Path) -> None:
    path = study / NAMES[0] / "sampling.parquet"
    draws = np.random.default_rng(0).normal(size=2_000) + 1e3
    table = pd.DataFrame({"rule": ["even", "random"] * 1_000, "step": range(2_000), "seconds": draws})
    table["ranks"] = [[1, 2]] * 2_000
    table.loc[3, ["rule", "seconds"]] = None
    table.to_parquet(path, index=False)
    assert "sampling.parquet" not in archive.files_of(archive.pack(path.parent, STUDY))
    packed = archive.pack(path.parent, "sampling_ablation")
    content = path.read_bytes()
    path.write_bytes(archive.files_of(packed)["sampling.parquet"])
    back = pd.read_parquet(path)
    assert [list(ranks) for ranks in back["ranks"]] == list(table["ranks"])
    pd.testing.assert_frame_equal(back.drop(columns="ranks"), table.drop(columns="ranks"), check_exact=True)
    assert archive.pack(path.parent, "sampling_ablation") == packed
    path.write_bytes(content[:-9])
    with pytest.raises(UserError, match=f"run folder is damaged: .*{path}"):
        archive.pack(path.parent, "sampling_ablation")


def test_any_flipped_bit_of_what_is_kept_is_one_line_and_nothing_is_restored(kept: Path, tmp_path: Path) -> None:
    draws = np.random.default_rng(1)

    def refused(path: Path, problem: str = "") -> None:
        text = f"^kept run is damaged: .*{problem}.*git checkout HEAD -- {path.parent}"
        with pytest.raises(UserError, match=text) as told:
            archive.unpack(kept, tmp_path / "again")
        assert "\n" not in str(told.value) and not (tmp_path / "again").exists()

    sums, path = kept / "runs" / archive.SUMS, kept / "runs" / f"{NAMES[1]}.parquet"
    for changed in (path, sums):
        good = changed.read_bytes()
        for place in [*draws.choice(len(good) - 1, 20, replace=False), len(good) - 1]:
            for bit in {7, int(draws.integers(8))}:
                changed.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
                refused(changed)
        changed.write_bytes(good)
    listed, good = sums.read_text(), path.read_bytes()
    # What is no kept run although its checksum fits.
    least = pyarrow.table({"run.yaml": ["x"], "status": ["ok\n"], "step": pyarrow.nulls(1), "event": ["{}"]})
    for other, problem in (
        (least, None),
        (least.drop_columns("run.yaml"), "run.yaml"),
        (least.drop_columns("step"), "step"),
        (least.set_column(0, "run.yaml", pyarrow.nulls(1)), ""),
        (least.append_column("../x", [["x"]]), "'../x' is none of a kept run"),
        (least.append_column("tensors.parquet", [["x"]]), "'tensors.parquet' is none of a kept run"),
        (least.set_column(2, "step", [[{"stages": 1}]]), ""),
        (pyarrow.table({"status": pyarrow.nulls(2**26 + 1)}), "larger than a run"),
        (pyarrow.table({"status": ["0" * 2**20] * 2**6}), "larger than a run"),
        (None, ""),
    ):
        path.write_bytes(b"no table")
        if other is not None:
            parquet.write_table(other, path, use_dictionary=False, store_schema=False)
        sums.write_text(listed.replace(*(hashlib.sha256(content).hexdigest() for content in (good, path.read_bytes()))))
        if problem is None:
            assert set(archive.read(kept, NAMES[1])) == {"metrics.jsonl", "run.yaml", "status"}
        else:
            refused(path, problem)
    os.truncate(path, 2**25 + 1)
    refused(path, "larger than a run")
    # Names that lead elsewhere, lines of something else, links, and a run that is missing.
    for name in ("../run", ".hidden", "a/b", "", "/root/run", NAMES[1]):
        sums.write_text(listed.replace(f"{NAMES[0]}.", f"{name}."))
        refused(sums, "a line of the list")
    sums.write_text("<<<<<<< ours\n" + listed)
    refused(sums, "a line of the list")
    sums.write_text(listed)
    path.unlink()
    refused(path, "missing")
    path.symlink_to(KEPT / STUDY / "runs" / path.name)
    refused(path, "a link")
    path.unlink()
    path.write_bytes(good)
    path.parent.rename(kept / "elsewhere")
    path.parent.symlink_to("elsewhere")
    refused(path, "a link")


def test_a_new_run_adds_a_file_and_rewrites_none(kept: Path, study: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        archive.unpack(kept, study)
    shutil.rmtree(kept / "runs")
    archive.add(study, kept, NAMES)
    whole = contents(kept / "runs")
    shutil.rmtree(kept / "runs")
    first, second = NAMES
    (study / first / "status").rename(study / "status")
    assert archive.add(study, kept, NAMES) == [second]
    shutil.rmtree(study / second)  # as in another clone, on another night
    (study / "status").rename(study / first / "status")
    (kept / "runs" / f"{second}.parquet").chmod(0o400)
    times = {path: path.stat().st_mtime_ns for path in kept.glob("runs/*.parquet")}
    assert archive.add(study, kept, NAMES) == NAMES
    assert contents(kept / "runs") == whole, "the list in the order of the study"
    assert times.items() <= {path: path.stat().st_mtime_ns for path in kept.glob("runs/*.parquet")}.items()
    assert archive.add(study, kept, [second]) == [second], "the study has no first run any more"
    assert not (kept / "runs" / f"{first}.parquet").exists()


def test_another_run_of_the_name_is_kept_only_if_asked(kept: Path, study: Path) -> None:
    before, settings = contents(kept / "runs"), study / NAMES[0] / "run.yaml"
    settings.write_text(settings.read_text().replace("started: '20", "started: '21"))
    (study / NAMES[1] / "status").unlink()
    with pytest.raises(UserError, match=f"another run {NAMES[0]} is kept.*--replace"):
        archive.add(study, kept, NAMES)
    assert contents(kept / "runs") == before
    assert archive.add(study, kept, NAMES, replace=True) == [NAMES[0]]
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
    assert [f"{row.variant}-s{row.seed}" for row in table.itertuples()] == [NAMES[0]]
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
    for path in (path for path in (KEPT / STUDY).glob("*.*") if path.name != "provenance.yaml"):
        assert (kept / STUDY / path.name).read_bytes() == path.read_bytes(), path
    assert (kept / "figures" / f"{STUDY}.png").read_bytes() == (KEPT / "figures" / f"{STUDY}.png").read_bytes()
    table = study / "table.csv"
    table.write_text(table.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match=f"does not follow from what is kept.*{table}"):
        reference.keep(STUDY, NAMES, study.parent, kept)


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
    figure, table, detail = kept.parent / "figures" / f"{STUDY}.png", kept / "table.csv", kept / "trajectories.parquet"
    measured, good = table.read_text(), detail.read_bytes()
    table.write_text(measured.replace("1", "2", 1))
    figure.write_bytes(b"other")
    pd.read_parquet(detail).assign(rank=1).to_parquet(detail)
    # What was measured is never replaced, only what is drawn or drawn from.
    code, output = run_replay(tmp_path, capsys, write=True)
    assert code == 1 and output.count("DIFFERENT") == 1 and f"DIFFERENT  {table}" in output
    assert output.count("written") == 3, "with a figure that was not kept before"
    assert detail.read_bytes() == good
    assert figure.read_bytes() == (KEPT / "figures" / f"{STUDY}.png").read_bytes()
    assert (kept.parent / "figures" / "window_correlation.png").is_file()
    table.write_text(measured)
    code, output = run_replay(tmp_path, capsys)
    assert code == 0, output
    assert output.count("same") == len(list(kept.glob("*.csv"))) + 4 and str(detail) in output
    assert run_replay(tmp_path, capsys, "methods")[0] == 2
    detail.unlink()
    drawn = dict(replay.redraw([STUDY], kept.parent, tmp_path / "drawn"))
    assert drawn == {figure: replay.DIFFERENT}, "a figure without its tables follows from none"


def test_replay_computes_a_simulated_study_again_from_its_settings(tmp_path: Path) -> None:
    name = "gpt2_2p5b_v100"
    shutil.copytree(KEPT / name, tmp_path / "kept" / name)
    table = tmp_path / "kept" / name / "traces.csv"
    table.write_text(table.read_text().replace("1", "2", 1))
    found = [
        dict(replay.tables(tmp_path / "kept", name, tmp_path / way, write=way == "write")) for way in ("look", "write")
    ]
    assert found[0][table] == replay.DIFFERENT and found[1][table] == "written"
    assert table.read_bytes() == (KEPT / name / "traces.csv").read_bytes()
    assert all(set(pd.read_csv(path)["kind"]) == {"simulated"} for path in (KEPT / name).glob("*.csv"))
    assert {outcome for path, outcome in (found[0] | found[1]).items() if path != table} == {replay.SAME}


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
