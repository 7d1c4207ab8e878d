"""An empty Python environment that holds a wheel of this project and what the wheel declares, and nothing else.

Nothing is downloaded: the packages are those that are installed where the tests run, found by following the declared
dependencies, and linked. A package that is only there by chance, or by another extra, is not in it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution
from pathlib import Path, PurePath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "edgc")


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of its sources: what earlier builds have left in the checkout is not in it."""
    source = folder / "source"
    source.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _pip("wheel", *options, "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with ``wheel`` and its dependencies.

    Attributes:
        python: its interpreter.
        distributions: names of the packages in it, besides the wheel itself.

    Args:
        extra: an extra of the wheel whose dependencies are there as well.
        beside: a package that is there as well, with its dependencies, as of a user who has it.

    Raises:
        LookupError: a declared package is not installed where the tests run.
    """

    def __init__(self, folder: Path, wheel: Path, extra: str = "", beside: str = "") -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self._packages,) = folder.glob("lib/python*/site-packages")
        self._pip("install", "--quiet", "--no-index", "--no-deps", str(wheel))
        (own,) = importlib.metadata.distributions(path=[str(self._packages)])
        found: dict[str, Distribution] = {}
        _follow(own, extra, found)
        if beside:
            found[canonicalize_name(beside)] = other = importlib.metadata.distribution(beside)
            _follow(other, "", found)
        for distribution in found.values():
            _link(distribution, self._packages)
        self.distributions = sorted(found)

    def check(self) -> None:
        """Fail unless every dependency is there, in a version that is allowed."""
        self._pip("check")

    def run(self, *arguments: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run its interpreter in ``folder``, with no variable that could lead it elsewhere."""
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([str(self.python), *arguments], cwd=folder, env=variables, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers when it is asked to end, and leaves them behind when it is killed.
            process.terminate()
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout:.0f} s\n{out}{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def launch(self, *arguments: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """The same with two processes, by torchrun."""
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return self.run(*torchrun, *arguments, folder=folder, timeout=timeout)

    def _pip(self, *arguments: str) -> None:
        _pip("--python", str(self.python), *arguments)


def _pip(*arguments: str) -> None:
    variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    options: dict[str, Any] = {"env": variables, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], check=False, **options)
    assert done.returncode == 0, f"pip {' '.join(arguments)}\n{done.stdout}{done.stderr}"


def _follow(distribution: Distribution, extra: str, found: dict[str, Distribution]) -> None:
    """Add the dependencies of ``distribution``, and theirs, to ``found``."""
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if name in found and not wanted:
                continue
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                raise LookupError(f"{name} is declared but not installed here") from None
            _follow(found[name], wanted, found)


def _link(distribution: Distribution, packages: Path) -> None:
    """Link its packages, and single files where several distributions share a folder (a namespace package)."""
    files = [file for file in distribution.files or [] if ".." not in file.parts]  # scripts lie outside
    whole = {file.parent for file in files if file.name in {"__init__.py", "METADATA"}}
    places: set[PurePath] = set()
    for file in files:
        owned = [folder for folder in file.parents if folder in whole]
        places.add(owned[-1] if owned else file)
    for place in places:
        source, target = Path(str(distribution.locate_file(str(place)))), packages / place
        # Compiled files may be listed and missing.
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())
