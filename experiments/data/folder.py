"""Reading a folder of prepared data: its facts, whether it is what a run asks for, and the text behind it.

Written by :mod:`experiments.data.prepare`; see there for the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgc.errors import UserError
from experiments.common.yaml_settings import load_yaml, validate
from experiments.data import integrity
from experiments.data.corpus import SPLITS, Document
from experiments.data.integrity import FILES
from experiments.data.sources import normalise, open_source
from experiments.spec.settings import DataConfig

FORMAT = 1
LAST = "vocab_size"  # key of data.yaml that is written last: a file that was cut short lacks it
CHECKSUM = "sha256"  # key that is written first; files of earlier versions have none


@dataclass(frozen=True)
class DataInfo:
    """What ``data.yaml`` says about a prepared folder; counts are per split, sizes in bytes of UTF-8 text.

    ``identity`` is the source's digest before reading it through; ``fingerprint`` covers every document, its
    split and the tokenizer, so equal fingerprints mean equal training data. ``files`` holds size and SHA-256 of
    each file, ``code`` the fingerprint of the program; both are empty where an earlier version wrote the folder.
    """

    format: int
    config: dict[str, Any]
    python: str
    identity: str
    fingerprint: str
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: dict[str, int]
    vocab_size: int
    special_tokens: dict[str, int]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: str = ""

    @property
    def source(self) -> str:
        return str(self.config["source"])

    def content(self) -> str:
        """What ``data.yaml`` holds: in its first line the checksum of all others."""
        values = {"source": self.source, **asdict(self)}
        values = {key: values[key] for key in sorted(values, key=lambda key: key == LAST)}
        rest = yaml.safe_dump(values, sort_keys=False)
        return f"{CHECKSUM}: {hashlib.sha256(rest.encode()).hexdigest()}\n{rest}"


def load_info(folder: Path) -> DataInfo:
    """Read ``data.yaml`` of a folder; ``UserError`` where that is missing, incomplete or of another format."""
    path = folder / "data.yaml"
    fix = "prepare it: python -m experiments.data prepare --scale <scale> --name " + folder.name
    if not path.is_file():
        raise UserError("prepared data is missing", where=folder, fix=fix)
    values = load_yaml(path)
    content = path.read_bytes()
    if CHECKSUM in values:
        first, _, rest = content.partition(b"\n")
        if first != f"{CHECKSUM}: {hashlib.sha256(rest).hexdigest()}".encode():
            raise integrity.damaged(path, "has another content than was written")
    if values.get("format") != FORMAT:
        raise UserError(f"data.yaml has format {values.get('format')}, not {FORMAT}", where=path, fix=fix)
    try:
        values = {key: value for key, value in values.items() if key not in ("source", CHECKSUM)}
        info = DataInfo(**values)
    except TypeError:
        raise UserError("data.yaml lacks or has unknown keys", where=path, fix=fix) from None
    if not content.endswith(b"\n"):
        raise integrity.damaged(path, "is cut short")
    return info


def check_whole(folder: Path, info: DataInfo, names: Iterable[str] = FILES, *, checksums: bool = True) -> None:
    """Compare the files of ``folder``, or those called ``names``, with what ``info`` says of them.

    Without ``checksums`` only sizes are compared.

    Raises:
        UserError: naming the first file that is missing, cut short or altered, and the folder to delete.
    """
    try:
        integrity.check(folder, info, names, checksums)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise integrity.damaged(folder / "data.yaml", "has entries that are no counts") from None


def check_config(info: DataInfo, config: DataConfig, folder: Path) -> None:
    """Raise ``UserError`` when ``folder`` was prepared with other settings than a run asks for."""
    for key, wanted in recorded(config).items():
        if info.config.get(key) != wanted:
            message = f"data.{key} = {wanted!r}, but the folder was prepared with {info.config.get(key)!r}"
            raise UserError(message, where=folder / "data.yaml", fix="prepare it again or use another data.path")


def texts(folder: Path, split: str) -> Iterator[Document]:
    """The documents of ``split`` again from the source of ``folder``, in order; ``UserError`` if they have changed."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    info = load_info(folder)
    config = validate(DataConfig, info.config, folder / "data.yaml")
    fix = "restore the source (same files, same Python version) or prepare the data again"
    changed = UserError(f"the source has changed since the {split} split was prepared", where=folder, fix=fix)
    with (folder / "documents.jsonl").open(encoding="utf-8") as lines:
        expected = (row for row in map(json.loads, lines) if row["split"] == split)
        source = open_source(config)
        for document in source.documents():
            if source.split_of(document) != split:
                continue
            row = next(expected, None)
            if row is None or (row["path"], row["sha256"]) != (document.path, document.sha256):
                raise changed
            yield document
        if next(expected, None) is not None:
            raise changed


def recorded(config: DataConfig) -> dict[str, Any]:
    """The settings that decide what a prepared folder holds."""
    return normalise(config).model_dump(exclude={"path"})


def up_to_date(folder: Path, config: DataConfig, identity: str) -> DataInfo | None:
    """The folder's info if it holds what ``config`` and the source would give, every file at full size."""
    try:
        info = load_info(folder)
        check_config(info, config, folder)
    except UserError:
        return None
    if info.identity != identity:
        return None
    try:
        check_whole(folder, info)
    except UserError:
        return None
    return info
