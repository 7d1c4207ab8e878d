"""Reading a folder of prepared data: its facts, whether it is what a run asks for, and the text behind it.

Written by :mod:`experiments.data`; see there for the files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.corpus import SPLITS, Document, normalise, open_source
from experiments.settings import DataConfig, load_yaml, validate

FORMAT = 1
INDEX_CACHE = "index_cache"


@dataclass(frozen=True)
class DataInfo:
    """What ``data.yaml`` says about a prepared folder; counts are per split, sizes in bytes of UTF-8 text.

    ``identity`` is the source's digest before reading it through; ``fingerprint`` covers every document, its
    split and the tokenizer, so equal fingerprints mean equal training data.
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

    @property
    def source(self) -> str:
        return str(self.config["source"])

    @property
    def tokens_per_byte(self) -> float:
        return sum(self.tokens.values()) / sum(self.bytes.values())


def load_info(folder: Path) -> DataInfo:
    """Read ``data.yaml`` of a prepared folder.

    Raises:
        UserError: the folder is missing, incomplete or of another format.
    """
    path = folder / "data.yaml"
    fix = "prepare it: python -m experiments.data prepare --scale <scale> --name " + folder.name
    if not path.is_file():
        raise UserError("prepared data is missing", where=folder, fix=fix)
    values = load_yaml(path)
    if values.get("format") != FORMAT:
        raise UserError(f"data.yaml has format {values.get('format')}, not {FORMAT}", where=path, fix=fix)
    try:
        values = {key: value for key, value in values.items() if key != "source"}
        return DataInfo(**values)
    except TypeError:
        raise UserError("data.yaml lacks or has unknown keys", where=path, fix=fix) from None


def check_config(info: DataInfo, config: DataConfig, folder: Path) -> None:
    """Raise ``UserError`` when ``folder`` was prepared with other settings than a run asks for."""
    for key, wanted in recorded(config).items():
        if info.config.get(key) != wanted:
            message = f"data.{key} = {wanted!r}, but the folder was prepared with {info.config.get(key)!r}"
            raise UserError(
                message, where=folder / "data.yaml", fix="prepare it again or use another data.path"
            )


def texts(folder: Path, split: str) -> Iterator[Document]:
    """Regenerate the documents of ``split`` from the source of ``folder``, in the same order.

    Raises:
        UserError: the source no longer yields the documents that were prepared.
    """
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
    if info.identity != identity or not (folder / "tokenizer.json").is_file():
        return None
    width = 2 if info.vocab_size < 65500 else 4  # bytes per token, as Megatron's DType.optimal_dtype
    for split in SPLITS:
        data, index = folder / f"{split}.bin", folder / f"{split}.idx"
        if not (data.is_file() and index.is_file() and data.stat().st_size == width * info.tokens[split]):
            return None
    with contextlib.suppress(OSError), (folder / "documents.jsonl").open("rb") as lines:
        if sum(1 for _ in lines) == sum(info.documents.values()):
            return info
    return None
