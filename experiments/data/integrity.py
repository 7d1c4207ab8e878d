"""Whether the files of a folder of prepared data are what they were when it was written. Imports no torch.

A file that was cut short would still open: Megatron maps token files into memory and finds what is missing in the
middle of a training. So whoever reads a folder compares it first with the sizes and checksums in its ``data.yaml``.
Large files are compared by size alone, for reading through them would take longer than a start should.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.data.corpus import SPLITS

if TYPE_CHECKING:
    from experiments.data.folder import DataInfo

CHECKSUM_BYTES = 64 * 2**20  # larger files are not read through; at 1 GB/s this takes a tenth of a second
INDEX_CACHE = "index_cache"
TOKENIZER, DOCUMENTS = "tokenizer.json", "documents.jsonl"
TOKENS = tuple(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx"))
FILES = (TOKENIZER, DOCUMENTS, *TOKENS)


def record(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file, for ``data.yaml``."""
    return {name: asdict(manifest.entry(folder / name)) for name in FILES}


def token_bytes(vocab_size: int) -> int:
    """Bytes of a token on disk, as Megatron's ``DType.optimal_dtype`` chooses."""
    return 2 if vocab_size < 65500 else 4


def index_bytes(documents: int) -> int:
    """Size of Megatron's index of so many documents: header, a length and an offset for each, and their bounds."""
    return 34 + (4 + 8) * documents + 8 * (documents + 1)


def damaged(path: Path, problem: str, fix: str | None = None) -> UserError:
    """The error about one file of a prepared folder, or of the indices in it."""
    again = f"delete the folder {path.parent} and start again: it is prepared anew"
    return UserError(f"prepared data is damaged: {path.name} {problem}", where=path, fix=fix or again)


def check(folder: Path, info: DataInfo, names: Iterable[str], checksums: bool) -> None:
    """Does :func:`experiments.data.folder.check_whole`; what was written before ``data.yaml`` had sizes, by counts."""
    for name in names:
        path, expected = folder / name, _expected(name, info, checksums)
        if expected is None and not path.exists():
            raise damaged(path, "is missing")
        problem = None if expected is None else manifest.problem(path, expected)
        if problem is not None:
            raise damaged(path, problem)
        if name not in info.files and name == DOCUMENTS:
            with path.open("rb") as lines:
                rows = sum(line.endswith(b"\n") for line in lines)
            if rows != sum(info.documents.values()):
                raise damaged(path, f"has {rows} lines instead of {sum(info.documents.values())}")


def _expected(name: str, info: DataInfo, checksums: bool) -> manifest.Entry | None:
    """What a file should be; None where nothing says it."""
    if name in info.files:
        size = int(info.files[name]["bytes"])
        small = checksums and size <= CHECKSUM_BYTES
        return manifest.Entry(size, info.files[name]["sha256"] if small else "")
    split, _, suffix = name.partition(".")
    if name not in TOKENS:
        return None
    if suffix == "bin":
        return manifest.Entry(token_bytes(info.vocab_size) * info.tokens[split], "")
    return manifest.Entry(index_bytes(info.documents[split]), "")


def check_indices(folder: Path) -> None:
    """Refuse (``UserError``) a sample order in ``index_cache/`` that was cut short: shorter than its header says."""
    from numpy.lib import format as npy

    for path in sorted((folder / INDEX_CACHE).glob("[!.]*/*.npy")):
        fix = f"delete the folder {path.parent}: it is made again"
        try:
            with path.open("rb") as handle:
                first = npy.read_magic(handle) == (1, 0)
                read = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
                shape, _, dtype = read(handle)
                expected = handle.tell() + math.prod(shape) * dtype.itemsize
        except (ValueError, OSError):
            raise damaged(path, "has no valid header", fix) from None
        size = path.stat().st_size
        if size != expected:
            raise damaged(path, f"has {size} bytes instead of {expected}", fix)
