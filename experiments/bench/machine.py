"""Machine that a timing was taken on: processor, caches, GPU, versions. Never the machine's name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from experiments.training.provenance import git_state, hardware, versions

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe(device: str) -> dict[str, Any]:
    """Processor or GPU, caches of one core in KiB, versions and commit.

    Args:
        device: ``cpu`` or ``cuda``, whichever is measured.
    """
    host = hardware()
    name = host["gpus"][0] if device == "cuda" else f"{host['cpu']}, {host['cores']} cores"
    return {
        "name": name,
        "slug": slug(name),
        **{key: host[key] for key in ("cpu", "cores", "gpus")},
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "caches_kib": _caches(),
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
        level, kind, size = ((index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size"))
        if size.endswith("K"):
            sizes[f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")] = int(size[:-1])
    return sizes
