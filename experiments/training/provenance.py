"""Origin of a result: versions, commit, hardware kind, data fingerprint."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from experiments.common.files import ROOT, atomic_write
from experiments.common.source import training_code
from experiments.spec.settings import RunConfig

PACKAGES = ("torch", "megatron-core", "numpy", "tokenizers", "lm_eval", "snakemake")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def git_state() -> dict[str, Any]:
    """Commit of the source tree and whether it has local changes; None where there is no repository."""

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """Kind of machine, without its name."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus, "system": platform.system()}


def code_so_far(checkpoints: Path, driver: str = "processes") -> str:
    """Fingerprints of the code that has worked on a run since its first checkpoint, today's too, joined by ``+``.

    They are kept beside the checkpoints: a run that goes on from one is a result of both.
    """
    path, known = checkpoints / "code", []
    if any(checkpoints.glob("iter_*")):
        known = path.read_text(encoding="utf-8").split("+") if path.is_file() else ["unknown"]
    code = "+".join(dict.fromkeys([*known, training_code(driver)]))
    atomic_write(path, code)
    return code


def collect(run: RunConfig, fingerprint: str) -> dict[str, Any]:
    """Provenance of one run. ``fingerprint`` is that of its prepared data."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "world": run.parallel.world,
        "data_fingerprint": fingerprint,
        "code": training_code(run.driver),
        "versions": versions(),
        "git": git_state(),
        "hardware": hardware(),
    }
