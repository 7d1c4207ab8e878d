"""A run folder is what its training has written, or is refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from edgc.errors import UserError
from experiments.analyse.runs import load_run
from experiments.common.cli import main_guard
from experiments.training import outputs
from experiments.training.outputs import read_events
from experiments.verdicts import archive
from tests.unit.conftest import REFERENCE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a manifest, weights and probes."""
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "none-s1"
    path.mkdir()
    for name, content in archive.read(REFERENCE / "workstation" / "entropy_trend", "gpt-s1").items():
        (path / name).write_bytes(content)
    (path / "status").unlink()
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "__0_0.distcp").write_bytes(bytes(range(256)))
    outputs.write_manifest(path)
    (path / "status").write_text("ok\n")
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "none-s1")
    return tmp_path / "none-s1"


def one_digit(content: bytes) -> bytes:
    """The same file with one digit changed: it parses as before."""
    at = next(index for index, byte in enumerate(content) if byte in b"123456")
    return content[:at] + bytes([content[at] + 1]) + content[at + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "cut": lambda content: content[: len(content) // 2],
    "digit": one_digit,
    "longer": lambda content: content + b"\n",
}


def test_every_change_of_a_recorded_file_is_found(run: Path) -> None:
    for name, changes in (
        ("run.yaml", ("missing", "digit", "cut")), ("metrics.jsonl", ("digit", "longer")), ("summary.json", ("digit",)),
        ("tensors.parquet", ("missing", "cut")), ("manifest.json", ("digit", "cut")),
    ):  # fmt: skip
        path = run / name
        content = path.read_bytes()
        for change in changes:
            path.unlink()
            if (do := CHANGES[change]) is not None:
                path.write_bytes(do(content))
            with pytest.raises(UserError, match="run folder is damaged") as caught:
                load_run(run)
            assert str(path) in str(caught.value) and f"delete the folder {run} and" in str(caught.value)
            path.write_bytes(content)


def test_weights_are_looked_at_where_they_are_asked_for(run: Path) -> None:
    weights = run / "checkpoint" / "__0_0.distcp"
    outputs.check(run, ("checkpoint/",))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert load_run(run).ok, "tables are not made of weights"
    with pytest.raises(UserError, match=r"__0_0.distcp has 255 bytes instead of 256 .*delete the folder") as caught:
        outputs.check(run, ("checkpoint/",))
    assert f"delete the folder {run} and" in str(caught.value)


def test_a_failed_run_stays_with_what_it_has_written(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    for name in ("summary.json", "tensors.parquet"):
        (run / name).unlink()
    (run / "status").unlink()
    outputs.write_manifest(run)
    (run / "status").write_text("failed\n")
    found = load_run(run)
    assert (found.status, found.ok, found.summary, len(found.steps), len(found.tensors)) == ("failed", False, {}, 0, 0)
    (run / "status").write_text("o")
    with pytest.raises(UserError, match="run folder is damaged: status holds 'o'"):
        load_run(run)


def test_a_torn_last_line_is_left_out_and_another_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b"".join(b'{"event": "step", "iteration": %d}\n' % number for number in range(3))
    path.write_bytes(content[:-4])
    assert [event["iteration"] for event in read_events(path)] == [0, 1]
    path.write_bytes(content[:10] + content[12:])
    with pytest.raises(UserError, match=r"metrics\.jsonl is cut short or altered"):
        read_events(path)


def test_a_full_disk_is_one_line_of_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    """``/dev/full`` answers as a full disk does; NumPy says so in its own words."""

    def text() -> None:
        Path("/dev/full").write_text("x")

    def array() -> None:
        with Path("/dev/full").open("wb") as file:
            numpy.zeros(10_000).tofile(file)

    for write in (text, array):
        with pytest.raises(SystemExit) as end:
            main_guard(write)()
        assert end.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: no space left on the disk") and "free space" in line
    with pytest.raises(FileNotFoundError):  # a fault of the program keeps its traceback
        main_guard(lambda: Path("/dev/none/x").read_text())()
