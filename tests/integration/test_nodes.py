"""A run over two nodes: two launchers, here on one machine, that meet at an address and share the results folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.integration.launching import Launcher, changed, children_of, launcher, prepared, repeatable, wait_for_steps

__all__ = ["launcher", "prepared"]  # fixtures

# Over 20 s: seven launches, in each of which every rank imports Megatron anew.
pytestmark = pytest.mark.slow


def over_two_nodes(
    launcher: Launcher, values: dict[str, Any], other: Launcher | None = None
) -> list[subprocess.Popen[str]]:
    """The launchers of nodes 0 and 1, the latter (``other``'s) first: it waits for the other."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    second = (other or launcher).start(values, *meeting, "--node", "1", new_session=True)
    return [launcher.start(values, *meeting, "--node", "0", new_session=True), second]


def end_of(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    found = []
    try:
        for process in launchers:
            _, stderr = process.communicate(timeout=300)
            found.append((process.returncode, stderr))
    finally:
        for process in launchers:
            process.kill()
    return found


def ranks_of(launcher: int) -> list[int]:
    """Over several nodes ranks are spawned."""
    ranks: list[int] = []
    for pid in children_of(launcher):
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                ranks.append(pid)
    return ranks


@pytest.mark.costly
def test_two_nodes_give_the_numbers_of_one_and_go_on_after_a_kill(launcher: Launcher) -> None:
    train = {"iterations": 30, "checkpoint_interval": 6, "global_batch": 4}
    one, two = (
        changed(variant=variant, parallel={"pipeline": 1, "data": 2}, train=train) for variant in ("one", "two")
    )
    launcher.finish(one)

    # A rank of the second node is killed: both launchers end, nothing is published.
    launchers = over_two_nodes(launcher, two)
    wait_for_steps(launcher.path(two), 8)
    os.kill(ranks_of(launchers[1].pid)[0], signal.SIGKILL)
    ends = end_of(launchers)
    assert [code for code, _ in ends] == [1, 0], ends
    assert "goes on from iter_" in ends[0][1]
    assert not (launcher.path(two) / "status").exists()

    # The first node dies as a whole.
    launchers = over_two_nodes(launcher, two)
    wait_for_steps(launcher.path(two), 16)
    os.kill(launchers[0].pid, signal.SIGKILL)
    (first, _), (second, stderr) = end_of(launchers)
    assert (first, second) == (-signal.SIGKILL, 1), stderr
    assert "interrupted: node 1" in stderr

    ends = end_of(over_two_nodes(launcher, two))
    assert [code for code, _ in ends] == [0, 0], ends
    record = yaml.safe_load((launcher.path(two) / "run.yaml").read_text())
    assert len(record["provenance"]["resumed_at"]) == 2
    assert repeatable(launcher.path(two)) == repeatable(launcher.path(one))


#: On the path of a node, its ranks cannot read the tokens that its launcher has found whole. Sample orders that an
#: earlier run has left can be read: the launcher reads them as its ranks do.
BROKEN_DISK = """
import numpy

whole = numpy.memmap

def memmap(file, *arguments, **options):
    if not str(file).endswith(".npy"):
        raise OSError(5, "Input/output error")
    return whole(file, *arguments, **options)

numpy.memmap = memmap
"""


def test_error_on_another_node_is_the_runs_result(launcher: Launcher, tmp_path: Path) -> None:
    values = changed(variant="broken", parallel={"pipeline": 1, "data": 2}, train={"global_batch": 4})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(BROKEN_DISK)
    other = Launcher(launcher.results, tmp_path / "other")
    (first, stderr), (second, _) = end_of(over_two_nodes(launcher, values, other))
    assert (first, second) == (0, 0), stderr
    assert (launcher.path(values) / "status").read_text() == "failed\n"
    error = json.loads((launcher.path(values) / "summary.json").read_text())["error"]
    assert "Input/output error" in error, "the cause, not that the connection was lost"
    assert not list(launcher.path(values).parent.glob(".*error*"))


def test_damaged_data_of_another_node_are_refused_by_both(launcher: Launcher, tmp_path: Path) -> None:
    """The second node sees the same results folder, but on its disk the tokens are cut off."""
    values = changed(variant="damaged", parallel={"pipeline": 1, "data": 2}, train={"global_batch": 4})
    other = Launcher(tmp_path / "results", tmp_path)
    shutil.copytree(launcher.results / "test" / "data", other.results / "test" / "data")
    (launcher.results / "test" / "launch").mkdir(exist_ok=True)
    (other.results / "test" / "launch").symlink_to(launcher.results / "test" / "launch")
    tokens = other.results / "test" / "data" / "stdlib" / "train.bin"
    tokens.write_bytes(tokens.read_bytes()[:10])
    ends = end_of(over_two_nodes(launcher, values, other))
    assert [code for code, _ in ends] == [2, 2], ends
    for (_, stderr), by in zip(ends, ("node 1: ", ""), strict=True):
        line = stderr.splitlines()[-1]
        assert line.startswith(f"error: {by}prepared data is damaged: train.bin has 10 bytes"), stderr
        assert f"(in {tokens})" in line
    assert not any(launcher.path(values).iterdir()), "nothing is published"
    assert not list(launcher.path(values).parent.glob(".*error*"))
