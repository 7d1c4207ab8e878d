"""A folder of prepared data: its facts, checks that its files are what was written, and the text behind it.

Written by :mod:`experiments.data.prepare`; see there for the files. A file that was cut short would still open:
Megatron maps token files into memory and finds what is missing in the middle of a training. So whoever reads a folder
compares it first with the sizes and checksums in its ``data.yaml``. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.data.corpus import SPLITS, Document, normalise, open_source
from experiments.spec.settings import DataConfig

FORMAT = 1
CHECKSUM = "sha256"  # key of data.yaml that is written first
CHECKSUM_BYTES = 64 * 2**20  # larger files are not read through; at 1 GB/s this takes a tenth of a second
INDEX_CACHE = "index_cache"
FILES = ("tokenizer.json", "documents.jsonl", *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")))


class DataInfo(Settings):
    """Content of ``data.yaml``; counts are per split, sizes in bytes of UTF-8 text.

    ``identity`` is the source's digest before reading it through; ``fingerprint`` covers every document, its
    split and the tokenizer, so equal fingerprints mean equal training data. ``files`` holds size and SHA-256 of
    each file, ``code`` the fingerprint of the program.
    """

    source: str
    format: int
    config: dict[str, Any]
    python: str
    identity: str
    fingerprint: str
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: dict[str, int]
    special_tokens: dict[str, int]
    files: dict[str, manifest.Entry]
    code: str
    vocab_size: int

    def content(self) -> str:
        """Text of ``data.yaml``: in its first line the checksum of all others."""
        rest = yaml.safe_dump(self.model_dump(), sort_keys=False)
        return f"{CHECKSUM}: {hashlib.sha256(rest.encode()).hexdigest()}\n{rest}"


def load_info(folder: Path) -> DataInfo:
    """Read ``data.yaml`` of a folder; ``UserError`` where that is missing, incomplete or of another format."""
    path = folder / "data.yaml"
    fix = "prepare it: python -m experiments.data prepare --scale <scale> --name " + folder.name
    if not path.is_file():
        raise UserError("prepared data is missing", where=folder, fix=fix)
    values = load_yaml(path)
    if values.get("format") != FORMAT:
        raise UserError(f"data.yaml has format {values.get('format')}, not {FORMAT}", where=path, fix=fix)
    if CHECKSUM not in values:
        raise UserError("an earlier version wrote data.yaml: it has no checksum", where=path, fix=fix)
    checksum, _, rest = path.read_bytes().partition(b"\n")
    if checksum != f"{CHECKSUM}: {hashlib.sha256(rest).hexdigest()}".encode():
        raise damaged(path, "has another content than was written")
    del values[CHECKSUM]
    info: DataInfo = validate(DataInfo, values, path)
    return info


def damaged(path: Path, problem: str, fix: str | None = None) -> UserError:
    """Error about one file of a prepared folder, or of the indices in it."""
    fix = fix or f"delete the folder {path.parent} and start again: it is prepared anew"
    return UserError(f"prepared data is damaged: {path.name} {problem}", where=path, fix=fix)


def check_whole(folder: Path, info: DataInfo, names: Iterable[str] = FILES, *, checksums: bool = True) -> None:
    """Compare the files of ``folder`` called ``names`` with ``info``: sizes, and ``checksums`` of all but large ones.

    Raises:
        UserError: naming the first file that is missing, cut short or altered, and the folder to delete.
    """
    for name in names:
        entry = info.files[name]
        if not checksums or entry.bytes > CHECKSUM_BYTES:
            entry = manifest.Entry(entry.bytes, "")
        if problem := manifest.problem(folder / name, entry):
            raise damaged(folder / name, problem)


def check_indices(folder: Path) -> None:
    """Refuse (``UserError``) a sample order in ``index_cache/`` that is shorter than its header says."""
    import numpy

    for path in sorted((folder / INDEX_CACHE).glob("[!.]*/*.npy")):
        try:
            numpy.load(path, mmap_mode="r")
        except (ValueError, OSError, EOFError):
            raise damaged(path, "is cut short", f"delete the folder {path.parent}: it is made again") from None


def check_config(info: DataInfo, config: DataConfig, folder: Path) -> None:
    """Raise ``UserError`` when ``folder`` was prepared with other settings than a run asks for."""
    for key, value in recorded(config).items():
        if info.config.get(key) != value:
            message = f"data.{key} = {value!r}, but the folder was prepared with {info.config.get(key)!r}"
            raise UserError(message, where=folder / "data.yaml", fix="prepare it again or use another data.path")


def recorded(config: DataConfig) -> dict[str, Any]:
    """Settings that decide the content of a prepared folder."""
    return normalise(config).model_dump(exclude={"path"})


def up_to_date(folder: Path, config: DataConfig, identity: str) -> DataInfo | None:
    """The folder's info if it holds what ``config`` and the source would give, every file whole."""
    try:
        info = load_info(folder)
        check_config(info, config, folder)
        check_whole(folder, info)
    except UserError:
        return None
    return info if info.identity == identity else None


def texts(folder: Path, split: str) -> Iterator[Document]:
    """Documents of ``split`` again from the source of ``folder``, in order; ``UserError`` if they have changed."""
    config = validate(DataConfig, load_info(folder).config, folder / "data.yaml")
    source = open_source(config)
    with (folder / "documents.jsonl").open(encoding="utf-8") as lines:  # may be gigabytes
        expected = ((row["path"], row["sha256"]) for row in map(json.loads, lines) if row["split"] == split)
        for document in source.documents():
            if source.split_of(document) == split:
                if next(expected, None) != (document.path, document.sha256):
                    break
                yield document
        else:
            if next(expected, None) is None:
                return
    fix = "restore the source (same files, same Python version) or prepare the data again"
    raise UserError(f"the source has changed since the {split} split was prepared", where=folder, fix=fix)
