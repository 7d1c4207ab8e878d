"""A Python whose torch runs on this machine's NVIDIA GPU; of the standard library alone, for nothing is installed yet.

``.venv``, made from ``requirements.lock``, holds whatever torch the configured package index gives: from PyPI a build
for CUDA 13, from many mirrors one for CPUs. Where that does not see the GPU, ``.venv-gpu`` is laid over it: a CUDA
build of the same version, and everything else from ``.venv``, which stays as it is. Or over a Python that has a torch
of its own for this GPU: then only packages that are missing there are added.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
PYPI = "https://pypi.org/simple"  # its Linux wheel of torch is a build for CUDA 13
CUDA_12 = "https://download.pytorch.org/whl/cu126"
# What the parts of the kit import, with the first version that will do.
NEEDED = {
    "megatron-core": "0.16.1",
    "psutil": "5",
    "numpy": "1.26",
    "pandas": "2",
    "pydantic": "2",
    "PyYAML": "6",
    "rich": "13",
    "typer": "0.9",
    "scipy": "1.10",
    "pytest": "9",
}
Run = Callable[[list[str], Mapping[str, str]], None]


@dataclass(frozen=True)
class Gpu:
    """The first GPU that the driver names; ``cuda`` is the newest version that the driver runs."""

    name: str
    capability: tuple[int, int]
    cuda: tuple[int, int]


@dataclass(frozen=True)
class Torch:
    """The torch of a Python: ``cuda`` is what it was built for (None: CPUs alone), ``sees`` whether it finds a GPU."""

    version: str
    cuda: str | None
    sees: bool


def find_gpu() -> Gpu | None:
    """What nvidia-smi says; None where there is no nvidia-smi, UserError where it is there and finds no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    listed, header = (_output(command) for command in (query, ["nvidia-smi"]))
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", header)
    first = re.match(r"(.+),\s*(\d+)\.(\d+)", listed)
    if first is None or cuda is None:
        fix = "mend the driver, or take nvidia-smi off the PATH to rehearse on the CPU"
        raise UserError("nvidia-smi is there but names no GPU", where="make gpu", fix=fix)
    name, major, minor = first.groups()
    return Gpu(name.strip(), (int(major), int(minor)), (int(cuda[1]), int(cuda[2])))


def index_for(gpu: Gpu) -> str:
    """The package index whose torch runs on this GPU with this driver; ``EDGC_GPU_INDEX`` stands above it. UserError if
    the driver is too old for any build."""
    if "EDGC_GPU_INDEX" in os.environ:
        return os.environ["EDGC_GPU_INDEX"]
    # Builds for CUDA 13 begin with Turing; a build for CUDA 12.6 runs on every driver for CUDA 12.
    if gpu.cuda >= (13, 0) and gpu.capability >= (7, 5):
        return PYPI
    if gpu.cuda >= (12, 0):
        return CUDA_12
    version = ".".join(map(str, gpu.cuda))
    fix = "use a driver for CUDA 12 or newer, or PYTHON=/a/python that has a torch for this GPU"
    raise UserError(f"the driver runs CUDA up to {version}", where="make gpu", fix=fix)


def torch_of(python: str) -> Torch | None:
    """The torch that a Python imports; None if it imports none."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Torch(*json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def prepare(venv: Path, over: Path, make: str, given: str | None, run: Run | None = None) -> str:
    """The Python that the other parts run with; installs what is missing.

    Args:
        venv, over: ``.venv`` and ``.venv-gpu``.
        make: the command whose target ``venv`` makes the first.
        given: a Python of the user's with a torch of its own, instead.
        run: runs a command and raises where it fails; for tests.

    Raises:
        UserError: no Python sees the GPU at the end.
    """
    run = run or _run
    gpu = find_gpu()
    if given is not None:
        return _over_given(given, over, run)
    run([make, "--no-print-directory", "venv", f"VENV={venv}"], {})
    python = str(venv / "bin" / "python")
    own = torch_of(python)
    if gpu is None or (own is not None and own.sees):
        return python
    ready = str(over / "bin" / "python")
    if not _sees(ready):
        _over_venv(venv, over, index_for(gpu), run)
    if not _sees(ready):
        fix = "see docs/gpu.md; EDGC_GPU_INDEX names another package index"
        raise UserError(f"torch from {index_for(gpu)} sees no GPU: {torch_of(ready)}", where=str(over), fix=fix)
    return ready


def _sees(python: str) -> bool:
    found = torch_of(python)
    return found is not None and found.sees


def _over_venv(venv: Path, over: Path, index: str, run: Run) -> None:
    """torch from ``index``, and everything else from ``venv``."""
    python = _new_environment(str(venv / "bin" / "python"), over, run)
    pin = pins()["torch"]
    # The configured index and wheels are what gave the other build; only how it is reached is kept.
    kept = ["CERT", "PROXY", "CACHE_DIR", "TRUSTED_HOST", "DEFAULT_TIMEOUT", "CLIENT_CERT"]
    dropped = {key: "" for key in os.environ if key.startswith("PIP_") and key.removeprefix("PIP_") not in kept}
    alone = {**dropped, "PIP_CONFIG_FILE": os.devnull}
    run([python, "-m", "pip", "install", "--quiet", "--index-url", index, f"torch=={pin}"], alone)
    _put_below(over, [str(_site_packages(venv))])


def _over_given(given: str, over: Path, run: Run) -> str:
    """What ``given`` lacks of ``NEEDED``, beside its own packages."""
    own = torch_of(given)
    if own is None or not own.sees:
        what = "has no torch" if own is None else f"has torch {own.version}, which sees no GPU"
        raise UserError(f"{given} {what}", where="PYTHON", fix="name a Python whose torch runs on this GPU, or none")
    python = _new_environment(given, over, run)
    # Not --system-site-packages: made from a virtual environment that gives the system's packages, not its own.
    _put_below(over, _packages_of(given))
    installed = _installed(python)
    missing = [name for name, least in NEEDED.items() if not _will_do(installed.get(_normal(name)), least)]
    if missing:
        wanted = {_normal(name) for name in missing}
        # Pins of the lock for what comes new; what is there stays as it is, torch above all.
        lines = [f"{n}=={v}" for n, v in pins().items() if _normal(n) in wanted or _normal(n) not in installed]
        # As pip knows its version: torch itself adds what it was built for.
        lines = [line for line in lines if not line.startswith("torch==")] + [f"torch=={installed['torch']}"]
        constraints = over / "constraints.txt"
        constraints.write_text("\n".join(lines) + "\n")
        run([python, "-m", "pip", "install", "--quiet", "-c", str(constraints), *missing], {})
    return python


def _new_environment(base: str, folder: Path, run: Run) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    run([base, "-m", "venv", str(folder)], {})
    return str(folder / "bin" / "python")


def _put_below(over: Path, folders: Iterable[str]) -> None:
    """Packages of ``folders`` behind those of ``over``: what is installed in ``over`` comes first."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (_site_packages(over) / "edgc_below.pth").write_text("".join(lines))


def _packages_of(python: str) -> list[str]:
    """The folders that a Python imports packages from: its own, the user's, the system's where it has access."""
    code = (
        "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"
    )
    return list(json.loads(_output([python, "-c", code]).splitlines()[-1]))


def pins() -> dict[str, str]:
    """Package -> version of ``requirements.lock``."""
    lines = (line.partition("#")[0].strip() for line in LOCK.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def _installed(python: str) -> dict[str, str]:
    """Packages that a Python has, by name."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
    )
    listed: Iterable[Any] = json.loads(_output([python, "-c", code]).splitlines()[-1])
    return {_normal(name): version for name, version in listed if name}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _will_do(version: str | None, least: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    return version is not None and numbers(version) >= numbers(least)


def _site_packages(folder: Path) -> Path:
    [found] = (folder / "lib").resolve().glob("python3*/site-packages")
    return found


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    # Of a variable that is set to nothing pip believes that it is set.
    variables = {key: value for key, value in (os.environ | dict(environment)).items() if value}
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if done.returncode:
        raise UserError(
            f"`{' '.join(command[:4])} ...` ended with {done.returncode}", where="make gpu", fix="see above"
        )
