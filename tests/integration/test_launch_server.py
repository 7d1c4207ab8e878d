"""Launches that a workflow's server forks: the same runs, the same ends, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.training import launch_client, launch_server
from experiments.training.launch_client import SOCKET
from tests.integration.launching import (
    ROOT,
    Launcher,
    changed,
    children_of,
    prepared,
    ranks_of,
    repeatable,
    runs,
    wait_for_steps,
)

__all__ = ["prepared"]
LONG = {"iterations": 100_000, "eval_interval": 100_000}


class Served(Launcher):
    """Launches through the server, with a temporary folder that is looked into."""

    def __init__(self, results: Path, folder: Path, socket: Path, server: int) -> None:
        super().__init__(results, folder)
        self.socket, self.server = socket, server

    def start(self, values: dict[str, Any], *options: str, new_session: bool = False) -> subprocess.Popen[str]:
        os.environ[SOCKET] = str(self.socket)
        try:
            return super().start(values, *options, new_session=new_session)
        finally:
            del os.environ[SOCKET]

    def launches(self) -> list[int]:
        return children_of(self.server)

    def start_long(self, variant: str) -> tuple[dict[str, Any], subprocess.Popen[str], int, list[int]]:
        """A run that is training and would for long: its settings, the job, and the launch and ranks that it has."""
        values = changed(variant=variant, train=LONG)
        process = self.start(values)
        wait_for_steps(self.path(values), 2)
        (launch,) = self.launches()
        return values, process, launch, ranks_of(launch)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    socket = tmp_path_factory.mktemp("server") / "socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.training.launch_server"], cwd=ROOT, env=os.environ | {SOCKET: str(socket)}
    )
    until(socket.exists)
    yield socket, process.pid
    process.terminate()
    assert process.wait(20) == 0


@pytest.fixture
def served(prepared: Path, tmp_path: Path, server: tuple[Path, int]) -> Served:
    return Served(prepared, tmp_path, *server)


def until(done: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_the_same_with_the_server_and_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # a short path: sockets lie in it
    monkeypatch.setenv("TMPDIR", str(temporary))
    settings: dict[str, Any] = {"parallel": {"data": 2}, "compression": {"method": "powersgd", "rank": 2}}
    values, other = changed(variant="served", **settings), changed(variant="alone", **settings)
    process = served.start(values)
    until(lambda: served.launches() or process.poll() is not None)
    assert served.launches()  # it was taken, not launched by itself
    assert process.wait(600) == 0
    alone = Launcher(served.results, served.folder)
    assert alone.run(other)[0] == 0
    assert repeatable(served.path(values)) == repeatable(alone.path(other))
    assert not list(temporary.iterdir())
    temporary.rmdir()


def test_bad_input_is_the_same_line_and_code(served: Served) -> None:
    values = changed(variant="bad", model={"hidden": 33})
    assert served.run(values) == Launcher(served.results, served.folder).run(values)
    assert served.run(values)[0] == 2


def test_an_interrupt_ends_the_launch_and_the_server_goes_on(served: Served) -> None:
    values, process, launch, ranks = served.start_long("interrupted")
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        said.strip().splitlines()[-1] == "interrupted: launch/interrupted-s1; the next launch starts from the beginning"
    )
    assert not served.path(values).exists() or not any(served.path(values).iterdir())
    until(lambda: not any(map(runs, [launch, *ranks])))
    assert runs(served.server)


def test_a_killed_job_takes_its_launch_with_it(served: Served) -> None:
    _, process, launch, ranks = served.start_long("killed")
    process.kill()
    process.wait()
    until(lambda: not any(map(runs, [launch, *ranks])))
    assert served.run(changed(variant="killed"))[0] == 0  # the folder is free again


def test_a_stopped_job_stops_its_launch(served: Served) -> None:
    _, process, launch, _ = served.start_long("stopped")
    process.send_signal(signal.SIGTSTP)

    def state() -> str:
        return Path(f"/proc/{launch}/stat").read_text().rpartition(")")[2].split()[0]

    until(lambda: state() == "T")
    process.send_signal(signal.SIGCONT)
    until(lambda: state() != "T")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1  # interrupted
    until(lambda: not runs(launch))


def test_who_finds_no_server_or_another_installation_launches_alone(
    server: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET, str(tmp_path / "none"))
    launch_client.hand_over()  # comes back
    monkeypatch.setenv(SOCKET, str(server[0]))
    monkeypatch.setattr(launch_client, "installation", lambda: ["another"])
    launch_client.hand_over()
    assert not children_of(server[1])


def test_changed_code_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = launch_server._times_of_code()
    assert str(ROOT / "experiments" / "training" / "launch_server.py") in before
    assert before == launch_server._times_of_code()
    changed_file = tmp_path / "module.py"
    changed_file.write_text("")
    monkeypatch.setattr(launch_server, "ROOT", tmp_path)
    monkeypatch.setattr(launch_server, "__file__", str(changed_file))
    first = launch_server._times_of_code()
    os.utime(changed_file, (1, 1))
    assert list(first) == [str(changed_file)]
    assert first != launch_server._times_of_code()
