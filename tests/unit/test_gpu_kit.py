"""`make gpu` where there is no GPU: what it runs and installs, with stand-ins for the driver, Python and torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.bench import engine, rehearsal, step_profile
from experiments.bench.__main__ import app
from experiments.common.files import ROOT

QUIET = ["install", "--quiet", "--disable-pip-version-check"]
TORCH = """
__version__ = "2.13.0+cu130"
class cuda:
    is_available = staticmethod(lambda: {sees})
"""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def make_gpu(folder: Path, *words: str, driver: str = "echo 'CUDA Version: 13.0'") -> subprocess.CompletedProcess[str]:
    """The recipe, with an nvidia-smi on the PATH that does ``driver``."""
    program(folder / "nvidia-smi", driver)
    command = ["make", "-s", "gpu", f"RESULTS={folder / 'results'}", f"VENV={folder / 'venv'}", *words]
    # Nor is it a part of the `make test` that may have started the tests: its messages would begin with make[1].
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "MAKE", "MFLAGS", "ARGS"))
    }
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def environment(folder: Path, sees: bool) -> Path:
    """A virtual environment with a stand-in for torch and for pip, which notes what it was asked for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = (folder / "lib").glob("python3*/site-packages")
    (packages / "torch.py").write_text(TORCH.format(sees=sees))
    # What it lays over itself has no pip either, and takes this one.
    python = folder / "bin" / "python"
    (folder / "bin" / "real").symlink_to(python.resolve())
    python.unlink()
    program(python, '[ "$2" != venv ] || set -- -m venv --without-pip "$3"\nexec "$(dirname "$0")/real" "$@"')
    (packages / "pip.py").write_text(
        "import pathlib, sys, sysconfig\n"
        f"pathlib.Path({str(folder / 'asked')!r}).write_text('\\n'.join(sys.argv[1:]))\n"
        f"pathlib.Path(sysconfig.get_path('purelib'), 'torch.py').write_text({TORCH.format(sees=True)!r})\n"
    )
    (folder / ".complete").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "driver", "said"),
    [
        ((), "exit 9", "nvidia-smi finds no GPU"),
        (("PARTS=tests engin",), "true", "unknown part engin"),
        (("ARGS=--only tests",), "true", "takes no ARGS"),
        (("PYTHON=/no/such/python",), "true", "no torch in /no/such/python that sees this GPU"),
    ],
)
def test_what_it_cannot_do_is_one_line(tmp_path: Path, words: tuple[str, ...], driver: str, said: str) -> None:
    done = make_gpu(tmp_path, *words, driver=driver)
    assert done.returncode == 2
    line, *more = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line and all(rest.startswith("make: ") for rest in more)
    assert not (tmp_path / "results").exists()


def test_a_torch_for_cpus_gets_another_one_laid_over_it(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", sees=False)
    parts = ["GPU_tests=9 -c 'import torch; print(torch.__file__)'", "PARTS=tests"]
    for attempt in range(2):
        done = make_gpu(tmp_path, *parts)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "venv-gpu") in (tmp_path / "results" / "gpu" / "tests.log").read_text()
        if attempt == 0:
            asked = (venv / "asked").read_text().splitlines()
            assert asked[:-1] == [*QUIET, "--index-url", "https://pypi.org/simple"]
            assert f"{asked[-1]}\n" in (ROOT / "requirements.lock").read_text() and asked[-1].startswith("torch==")
            (venv / "asked").unlink()
    assert not (venv / "asked").exists(), "installed once more"


def test_to_a_python_of_the_users_what_is_missing_is_added(tmp_path: Path) -> None:
    given = environment(tmp_path / "their own", sees=True)
    words = [f"PYTHON={given / 'bin' / 'python'}", "GPU_tests=9 -c pass", "PARTS=tests"]
    assert make_gpu(tmp_path, *words).returncode == 0
    asked = (given / "asked").read_text().splitlines()
    # Its torch stays: as pip knows the version, without what the build calls itself.
    assert asked[:4] == [*QUIET, "torch==2.13.0"] and "megatron-core>=0.16.1" in asked


def test_a_part_that_fails_or_hangs_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    environment(tmp_path / "venv", sees=True)
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    parts = ["GPU_tests=60 -c 'raise SystemExit(3)'", f'GPU_engine=2 -c "{child}"']
    parts += [f"GPU_{name}=60 -c 'print(\"{name} is well\")'" for name in ("step", "rehearsal", "stage")]
    done = make_gpu(tmp_path, *parts)
    assert done.returncode == 2  # make's own
    assert "failed: tests (exit code 3) engine (out of time)" in done.stderr
    assert "step is well" in done.stdout and "stage is well" in done.stdout
    pid = int((tmp_path / "results" / "gpu" / "engine.log").read_text().split()[0])
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_ends_with_the_time_of_all_and_is_left_out_when_too_little_is_left(tmp_path: Path) -> None:
    environment(tmp_path / "venv", sees=True)
    sleep = "-c 'import time; time.sleep(600)'"
    parts = ["GPU_SECONDS=4", f"GPU_step=9 {sleep}", "GPU_tests=60 -c 'print(\"tests began\")'", "PARTS=step tests"]
    done = make_gpu(tmp_path, *parts)
    assert "step, at most 4 s" in done.stdout and "step (out of time)" in done.stderr
    assert "tests is left out" in done.stdout and "tests began" not in done.stdout


@pytest.mark.parametrize("full", [True, False])
def test_the_benchmarks_take_what_they_are_given(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where the device would be used, the CPU in the GPU's place."""
    program(tmp_path / "python", f'[ "$1" = -c ] || printf "%s\\n" "$*" >> "{tmp_path}/started"')
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(tmp_path)
    (tmp_path / "venv" / ".complete").touch()
    done = make_gpu(tmp_path, *(["FULL=1"] if full else []))
    assert done.returncode == 0, done.stderr
    limits = [int(seconds) for seconds in re.findall(r"at most (\d+) s", done.stdout)]
    # What the last part has is what the others leave; here they take no time.
    assert len(limits) == 5 and (full or sum(limits[:-1]) <= 720)
    benchmarks = (tmp_path / "started").read_text().splitlines()
    tests = benchmarks.pop(1)
    assert tests.startswith("-m pytest tests/gpu -m gpu")
    plans: list[object] = []

    def stop(plan: object, *_: object) -> None:
        plans.append(plan)
        raise SystemExit(0)

    for benchmark in (engine, step_profile, rehearsal):
        monkeypatch.setattr(benchmark, "measure", stop)
    monkeypatch.setattr("experiments.bench.machine.free_memory", lambda: 1 << 40)
    for line in benchmarks:
        words = line.replace("cuda", "cpu").split()
        assert words[:2] == ["-m", "experiments.bench"]
        done_here = CliRunner().invoke(app, words[2:])
        assert done_here.exit_code == 0, done_here.output
    step, first, trained, stage = plans
    assert isinstance(first, engine.Plan) and isinstance(stage, engine.Plan)
    assert isinstance(step, step_profile.Plan) and isinstance(trained, rehearsal.Plan)
    assert trained.seconds < limits[3]
    assert (first.model, first.layers, first.embeddings) == ("gpt2-124m", 12, (50257, 1024))
    assert (stage.model, stage.hidden, stage.layers) == ("gpt2-2.5b-stage", 1920, 13)
    assert step.variants == (step_profile.VARIANTS if full else step_profile.QUICK)
