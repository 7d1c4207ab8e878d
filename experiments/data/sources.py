"""The source of text that a run's ``data`` settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.data.corpus import HuggingFaceText, Source, StandardLibrary, TextFolder
from experiments.data.debian import DebianManuals
from experiments.spec.settings import DataConfig

OPENWEBTEXT = "Skylion007/openwebtext"
# A commit whose files are parquet: `datasets` >= 4 no longer runs the loading script of older commits.
OPENWEBTEXT_REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"


def normalise(config: DataConfig) -> DataConfig:
    """``config`` with the defaults of its source filled in and settings that it ignores cleared."""
    update: dict[str, Any] = {}
    if config.source == "openwebtext":
        update["dataset"] = config.dataset or OPENWEBTEXT
        if update["dataset"] == OPENWEBTEXT:
            update["revision"] = config.revision or OPENWEBTEXT_REVISION
    elif config.source in ("stdlib", "debian"):
        update |= {"dataset": None, "revision": None}
    else:
        update["revision"] = None
    if config.tokenizer == "gpt2":
        update["vocab_size"] = None
    return config.model_copy(update=update)


def open_source(config: DataConfig) -> Source:
    """The source that ``config`` names; ``UserError`` where a folder is missing or has no readable file."""
    config = normalise(config)
    if config.source == "stdlib":
        return StandardLibrary(config.max_documents)
    if config.source == "debian":
        return DebianManuals(config.max_documents)
    if config.source == "folder":
        if not config.dataset:
            fix = "set data.dataset to a folder of .txt or .jsonl files"
            raise UserError("data.dataset is missing for data.source = folder", fix=fix)
        return TextFolder(Path(config.dataset).expanduser(), config.max_documents)
    assert config.dataset is not None
    return HuggingFaceText(config.dataset, config.revision, config.max_documents)
