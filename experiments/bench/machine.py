"""Machine that a timing was taken on: processor, caches, GPU, versions. Never the machine's name."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from experiments.training.provenance import git_state, hardware, versions

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe(device: str) -> dict[str, Any]:
    """Processor or GPU, caches of one core in KiB, memory in GiB, versions and commit.

    Args:
        device: ``cpu`` or ``cuda``, whichever is measured.
    """
    host = hardware()
    name = host["gpus"][0] if device == "cuda" else f"{host['cpu']}, {host['cores']} cores"
    return {
        "name": name,
        "slug": slug(name),
        **{key: host[key] for key in ("cpu", "cores", "gpus")},
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "caches_kib": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "huge_pages": _read(HUGE_PAGES),
        "versions": versions(),
        "git": git_state(),
    }


def free_memory() -> int:
    """Bytes that programs can still take from this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def slug(text: str) -> str:
    """Name of a folder: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _caches() -> dict[str, int]:
    """Level and kind of each cache of the first core -> KiB; empty where the system does not say."""
    sizes = {}
    for index in sorted(CACHES.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type"), "")
        if size := re.fullmatch(r"(\d+)K", _read(index / "size")):
            sizes[f"L{_read(index / 'level')}{kind}"] = int(size.group(1))
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
