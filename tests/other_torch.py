"""``python -m tests.other_torch 2.6.0``: the library's tests with another torch, in an environment that is thrown away.

The wheel is built and installed with what it declares, so a version of torch below the declared floor is refused. The
tests are those that need nothing else: compressors, entropy, controller, the hook for DDP, and the examples.
pip gets torch as it is set up to; with ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` a build for the
CPU can be had (``2.6.0+cpu``, 200 MB), else the package index's, which brings CUDA: 3 GB to fetch, 7 GB on disk.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path

from tests.integration.fresh_environment import ROOT, build_wheel

RUNNERS = ("hypothesis", "pytest")
NEEDED = {"edgc", "hypothesis", "numpy", "pytest", "tests", "torch"} | sys.stdlib_module_names


@cache
def imported(path: Path) -> frozenset[str]:
    """Full names of the modules that a file of the tests imports, itself or through other files of the tests."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Either may be the module: ``from tests.integration import ddp_runs``.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name in [name for name in names if name.startswith("tests.")]:
        file = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if file.is_file():
            names |= imported(file)
    return frozenset(names)


def library_tests() -> list[Path]:
    """The files of tests that exercise the library and need only what its wheel declares."""
    tests = []
    for path in [*(ROOT / "tests/unit").glob("test_*.py"), *(ROOT / "tests/integration").glob("test_*.py")]:
        names = imported(path)
        tops = {name.partition(".")[0] for name in names}
        if "edgc" in tops and tops <= NEEDED and not any(name.startswith("edgc.megatron") for name in names):
            tests.append(path)
    return [*sorted(tests), ROOT / "tests/integration/test_readme.py"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.other_torch", description=__doc__.partition("\n")[0])
    parser.add_argument("torch", help="version, e.g. 2.6.0")
    extra = {"action": "append", "default": [], "metavar": "PACKAGE==VERSION"}
    parser.add_argument("--with", dest="others", help="install this, too, e.g. numpy==1.26.4", **extra)
    options, pytest_options = parser.parse_known_args()
    if importlib.util.find_spec("pip") is None:
        parser.error("this Python has no pip: run it with .venv/bin/python")
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.partition("==")[0] in RUNNERS]
    with tempfile.TemporaryDirectory(prefix="other-torch-") as folder:
        python = str(Path(folder) / "environment/bin/python")
        venv.EnvBuilder(symlinks=True).create(Path(folder) / "environment")
        wheel = build_wheel(Path(folder) / "wheel")
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "-q"]
        packages = [str(wheel), f"torch=={options.torch}", *options.others, *pins]
        if subprocess.run([*install, *packages], check=False).returncode:
            sys.stderr.write(f"error: torch {options.torch} cannot be installed with what pyproject.toml declares\n")
            return 2
        versions = "import torch, numpy; print('torch', torch.__version__, 'numpy', numpy.__version__)"
        subprocess.run([python, "-c", versions], check=True)
        tests = [str(path.relative_to(ROOT)) for path in library_tests()]
        run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *pytest_options]
        return subprocess.run(run, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
