"""`make gpu` where there is no GPU: what it finds, installs and runs, with stand-ins for the driver and for torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgc.errors import UserError
from experiments.bench import engine, gpu_environment, gpu_kit, step_profile
from experiments.bench.__main__ import app
from experiments.bench.gpu_environment import CUDA_12, NEEDED, PYPI, Gpu, Torch

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), (13, 0))
TORCH = """
__version__ = "2.13.0+cu130"
class version:
    cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: True)
"""


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, header: str) -> None:
    """An nvidia-smi on the PATH that says this."""
    script = folder / "nvidia-smi"
    script.write_text(f'#!/bin/sh\n[ $# -gt 0 ] && printf "{gpus}" || printf "{header}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_gpu_is_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_environment.find_gpu() is None
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    driver(tmp_path, monkeypatch, "NVIDIA H100 80GB HBM3, 9.0\\nNVIDIA T4, 7.5\\n", "| CUDA Version: 13.0 |")
    assert gpu_environment.find_gpu() == H100


def test_a_driver_without_a_gpu_is_one_line_and_no_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(tmp_path, monkeypatch, "No devices were found\\n", "CUDA Version: 13.0")
    assert gpu_kit.main(["--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err.startswith("error: nvidia-smi is there but names no GPU (in make gpu); ")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("capability", "cuda", "index"),
    [
        ((9, 0), (13, 0), PYPI),
        ((7, 5), (13, 1), PYPI),
        ((7, 0), (13, 0), CUDA_12),  # a V100 under a new driver: builds for CUDA 13 have no Volta
        ((9, 0), (12, 4), CUDA_12),
    ],
)
def test_which_build_runs_on_which_gpu(
    capability: tuple[int, int], cuda: tuple[int, int], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGC_GPU_INDEX", raising=False)
    assert gpu_environment.index_for(Gpu("some", capability, cuda)) == index
    with pytest.raises(UserError, match=r"the driver runs CUDA up to 11\.8"):
        gpu_environment.index_for(Gpu("some", capability, (11, 8)))
    monkeypatch.setenv("EDGC_GPU_INDEX", "https://mirror.example/simple")
    assert gpu_environment.index_for(Gpu("some", capability, (11, 8))) == "https://mirror.example/simple"


class Installer:
    """Makes environments for real, without pip, and puts stand-ins where packages would be installed."""

    def __init__(self, torch: str = TORCH) -> None:
        self.torch = torch
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.commands.append(command)
        self.environments.append(environment)
        if command[1:3] == ["-m", "venv"]:
            subprocess.run([*command, "--without-pip"], check=True)
        elif command[1:4] == ["-m", "pip", "install"] and "--index-url" in command:
            [folder] = (Path(command[0]).parents[1] / "lib").glob("python3*/site-packages")
            (folder / "torch.py").write_text(self.torch)


def below(folder: Path) -> Path:
    """A .venv with a torch for CPUs and another package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = (folder / "lib").glob("python3*/site-packages")
    (packages / "torch.py").write_text(TORCH.replace("cu130", "cpu").replace('"13.0"', "None").replace("True", "False"))
    (packages / "other.py").write_text("value = 7\n")
    return folder


def test_a_torch_for_cpus_gets_another_one_laid_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "find_gpu", lambda: H100)
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere")
    monkeypatch.setenv("PIP_CERT", "/a/certificate")
    venv, over, installer = below(tmp_path / ".venv"), tmp_path / ".venv-gpu", Installer()
    python = gpu_environment.prepare(venv, over, "make", None, installer)
    assert python == str(over / "bin" / "python")
    assert installer.commands[0] == ["make", "--no-print-directory", "venv", f"VENV={venv}"]
    pin = gpu_environment.pins()["torch"]
    assert installer.commands[-1][3:] == ["install", "--quiet", "--index-url", PYPI, f"torch=={pin}"]
    # What gave a torch for CPUs must not give it again; how the network is reached stays.
    alone = installer.environments[-1]
    assert alone["PIP_CONFIG_FILE"] == os.devnull and alone["PIP_FIND_LINKS"] == "" and "PIP_CERT" not in alone
    # The new torch hides the old one, the rest comes from below, and below nothing has changed.
    assert gpu_environment.torch_of(python) == Torch("2.13.0+cu130", "13.0", True)
    assert gpu_environment.torch_of(str(venv / "bin" / "python")) == Torch("2.13.0+cpu", None, False)
    said = subprocess.run([python, "-c", "import other; print(other.value)"], capture_output=True, text=True)
    assert said.stdout == "7\n"
    # A second call installs nothing.
    again = Installer()
    assert gpu_environment.prepare(venv, over, "make", None, again) == python
    assert [command[0] for command in again.commands] == ["make"]


def test_a_torch_that_sees_no_gpu_in_the_end_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "find_gpu", lambda: H100)
    blind = Installer(TORCH.replace("True", "False"))
    with pytest.raises(UserError, match=f"torch from {re.escape(PYPI)} sees no GPU"):
        gpu_environment.prepare(below(tmp_path / ".venv"), tmp_path / ".venv-gpu", "make", None, blind)


def test_without_a_gpu_the_environment_is_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "find_gpu", lambda: None)
    installer = Installer()
    python = gpu_environment.prepare(tmp_path / ".venv", tmp_path / ".venv-gpu", "make", None, installer)
    assert python == str(tmp_path / ".venv" / "bin" / "python")
    assert len(installer.commands) == 1


def test_to_a_python_of_the_users_only_what_is_missing_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    there = dict.fromkeys(map(gpu_environment._normal, NEEDED), "99.0") | {
        "torch": "2.13.0",
        "pytest": "8.4.1",
    }
    del there["rich"]
    monkeypatch.setattr(gpu_environment, "_installed", lambda python: there)
    installer, over = Installer(), tmp_path / ".venv-gpu"
    python = gpu_environment.prepare(tmp_path / ".venv", over, "make", sys.executable, installer)
    assert python == str(over / "bin" / "python")
    assert installer.commands[1][-2:] == ["rich", "pytest"]  # missing, and too old
    constraints = (over / "constraints.txt").read_text().splitlines()
    # What pip knows of it, without what the build calls itself.
    assert constraints[-1] == "torch==2.13.0"
    assert f"rich=={gpu_environment.pins()['rich']}" in constraints
    assert f"pytest=={gpu_environment.pins()['pytest']}" in constraints
    assert not any(line.startswith(("numpy==", "pandas==")) for line in constraints), "what is there is to stay"


def test_the_packages_of_a_virtual_environment_of_the_users_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's Python is often one: what is made from it sees the system's packages, not its own."""
    given = below(tmp_path / "theirs")
    [packages] = (given / "lib").glob("python3*/site-packages")
    (packages / "torch.py").write_text(TORCH)
    monkeypatch.setattr(gpu_environment, "_will_do", lambda *_: True)
    over = tmp_path / ".venv-gpu"
    python = gpu_environment.prepare(tmp_path / ".venv", over, "make", str(given / "bin" / "python"), Installer())
    assert Path(python).is_relative_to(over)
    assert gpu_environment.torch_of(python) == Torch("2.13.0+cu130", "13.0", True)
    said = subprocess.run([python, "-c", "import other; print(other.value)"], capture_output=True, text=True)
    assert said.stdout == "7\n"


def test_a_python_without_a_torch_for_the_gpu_is_refused(tmp_path: Path) -> None:
    for given, what in ((sys.executable, "sees no GPU"), (str(tmp_path / "none"), "has no torch")):
        with pytest.raises(UserError, match=what):
            gpu_environment.prepare(tmp_path / ".venv", tmp_path / ".venv-gpu", "make", given, Installer())
    assert not list(tmp_path.iterdir())


def test_what_the_parts_import_is_asked_for() -> None:
    pins = {gpu_environment._normal(name): version for name, version in gpu_environment.pins().items()}
    for name, least in NEEDED.items():
        assert gpu_environment._will_do(pins[gpu_environment._normal(name)], least), name


def test_a_part_that_fails_or_hangs_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hangs = (
        "import pathlib, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid))\n"
        "time.sleep(600)"
    )
    parts = [
        gpu_kit.Part("fails", ["-c", "print('words'); print('┃ last  words ┃'); raise SystemExit(3)"], 60),
        gpu_kit.Part("hangs", ["-c", hangs], 3),
        gpu_kit.Part("works", ["-c", "print('all well')"], 60),
    ]
    outcomes = gpu_kit.follow(lambda: sys.executable, parts, tmp_path / "logs", 120, lambda text: None)
    assert [outcome.status for outcome in outcomes] == ["ok", "failed with 3", "not done after 3 s", "ok"]
    assert outcomes[1].said == "last words" and outcomes[3].said == "all well"
    for _ in range(100):  # a process that was killed may still be waiting to be buried
        state = Path(f"/proc/{child.read_text()}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the part that hung is still there")
    text = gpu_kit.summary(outcomes, "what")
    assert text.splitlines()[0] == "what" and text.splitlines()[-1] == "failed: fails, hangs"


def test_without_an_environment_or_time_nothing_else_runs(tmp_path: Path) -> None:
    def fail() -> str:
        raise UserError("no luck")

    parts = [gpu_kit.Part("works", ["-c", ""], 60)]
    outcomes = gpu_kit.follow(fail, parts, tmp_path, 60, lambda text: None)
    assert [(o.status, o.said) for o in outcomes] == [("failed", "no luck"), ("not run: no environment", "")]
    outcomes = gpu_kit.follow(lambda: sys.executable, parts, tmp_path, 0, lambda text: None)
    assert outcomes[1].status == "not run: no time left"


def test_the_kit_ends_in_time() -> None:
    assert sum(gpu_kit.LIMITS.values()) < 1.2 * gpu_kit.TOTAL, "the last parts would hardly get any time"
    assert [part.name for part in gpu_kit.parts(True, False, Path("x"))] == list(gpu_kit.LIMITS)[1:]


@pytest.mark.parametrize("gpu", [True, False], ids=["on a GPU", "rehearsed"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "quick"])
def test_the_benchmarks_take_what_the_kit_gives_them(
    gpu: bool, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where the device would be used; the GPU's options with the CPU in its place."""
    plans: list[object] = []

    def stop(plan: object, *_: object) -> None:
        plans.append(plan)
        raise SystemExit(0)

    monkeypatch.setattr(engine, "measure", stop)
    monkeypatch.setattr(step_profile, "measure", stop)
    monkeypatch.setattr("experiments.bench.machine.free_memory", lambda: 1 << 40)
    for part in gpu_kit.parts(gpu, full, tmp_path)[1:]:
        arguments = [word.replace("cuda", "cpu") for word in part.arguments[2:]]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments, done.output)
    first, stage, step = plans
    assert isinstance(first, engine.Plan) and isinstance(stage, engine.Plan)
    assert isinstance(step, step_profile.Plan)
    assert stage.model == "gpt2-2.5b-stage" and stage.hidden == 1920
    if gpu:
        assert (first.model, first.layers, first.embeddings, stage.layers) == (
            "gpt2-124m",
            12,
            (50257, 1024),
            13,
        )
        assert step.size == step_profile.GPT2
        assert step.variants == (step_profile.VARIANTS if full else step_profile.QUICK)


def test_a_rehearsal_says_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_environment, "find_gpu", lambda: None)
    monkeypatch.setattr(gpu_environment, "prepare", lambda *_: sys.executable)
    monkeypatch.setattr(gpu_kit, "parts", lambda *_: [gpu_kit.Part("tests", ["-c", "raise SystemExit(1)"], 60)])
    assert gpu_kit.main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "no GPU here (no nvidia-smi): rehearsed on the CPU, nothing was measured" in said
    assert "failed: tests" in said
    told = json.loads((tmp_path / "gpu-rehearsal" / "summary.json").read_text())
    assert [part["status"] for part in told["parts"]] == ["ok", "failed with 1"]
    assert told["machine"]["versions"]["torch"] and "commit" in told["machine"]["git"]
    assert not (tmp_path / "bench").exists()


def test_it_ends_after_the_minutes_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def follow(ready: object, listed: object, folder: Path, total: float, tell: object) -> list[gpu_kit.Outcome]:
        seen.append(total)
        folder.mkdir(parents=True)
        return [gpu_kit.Outcome(gpu_kit.ENVIRONMENT, "failed", 0.0)]

    monkeypatch.setattr(gpu_kit, "follow", follow)
    monkeypatch.setattr(gpu_environment, "find_gpu", lambda: None)
    assert gpu_kit.main(["--minutes", "5", "--only", "tests,step", "--results", str(tmp_path / "results")]) == 1
    assert seen == [300]


def test_no_time_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_kit.main(["--minutes", "0", "--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err.startswith("error: --minutes 0 is no time; ")
    assert not (tmp_path / "results").exists()


def test_an_unknown_part_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_kit.main(["--only", "tests,engin", "--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "error: --only 'engin' is no part; use some of tests, engine, stage, step\n"


def test_make_starts_the_kit_with_any_python(tmp_path: Path) -> None:
    """The recipe itself: which Python, and what it is given."""
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    root = Path(__file__).resolve().parents[2]
    command = ["make", "-s", "gpu", f"PYTHON={python}", f"RESULTS={tmp_path}", "ARGS=--only step"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "experiments.bench.gpu_kit"]
    assert words[-6:] == ["--results", str(tmp_path), "--python", str(python), "--only", "step"]
