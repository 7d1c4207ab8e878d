"""Prepare a corpus for training: text to Megatron indexed datasets, written whole or not at all.

``python -m experiments.data prepare --scale ci --name stdlib`` writes ``results/ci/data/stdlib/``::

    tokenizer.json              the tokenizer, trained on the train split (or GPT-2's)
    {train,validation,test}.{bin,idx}   Megatron IndexedDataset, one item a document, each ending in
                                <|endoftext|>
    documents.jsonl             {path, split, bytes, tokens, sha256} a line; no corpus text
    data.yaml                   settings, counts, fingerprint, sizes and checksums of the files above
    index_cache/                sample order of runs, added by :mod:`experiments.data.batches`

Everything is written into a hidden sibling folder that is renamed when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.files import atomic_write, check_space, check_writable
from experiments.data import integrity
from experiments.data.corpus import SPLITS, Document, HuggingFaceText, Source
from experiments.data.folder import FORMAT, DataInfo, recorded, up_to_date
from experiments.data.integrity import INDEX_CACHE
from experiments.data.sources import open_source
from experiments.spec.code import data_code
from experiments.spec.settings import DataConfig

if TYPE_CHECKING:
    from rich.progress import Progress

    from experiments.data.token_shards import Encoded, Shards
    from experiments.data.tokenizer import TextTokenizer

OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_TOKENS = 8_013_769, 9.04e9
BYTES_BESIDE_TOKENS = 220  # of a document: its line in documents.jsonl and its entries in the indices
_OURS = {*integrity.FILES, "data.yaml", INDEX_CACHE, ".snakemake_timestamp"}


def prepare(
    config: DataConfig,
    folder: Path,
    *,
    tokenizer_files: Path | None = None,
    show: bool = True,
    workers: int = 1,
    shard_documents: int | None = None,
) -> DataInfo:
    """Prepare ``config``'s corpus in ``folder``; does nothing where that is already done.

    Args:
        config: the ``data`` settings; ``path`` is not used.
        folder: replaced only if it holds prepared data or nothing.
        tokenizer_files: folder with GPT-2's tokenizer files, for ``tokenizer: gpt2`` without network.
        show: progress bar and messages on stderr.
        workers: processes that tokenise an ``openwebtext`` source, whose shards outlive a kill
            (:mod:`experiments.data.token_shards`); the result does not depend on it.
        shard_documents: of these shards.

    Raises:
        UserError: the source cannot be read, a split would be empty, there is too little space, or ``folder`` is in
            the way.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and {entry.name for entry in folder.iterdir()} <= _OURS):
        fix = "remove it or choose another --out"
        raise UserError("the output is not a prepared data folder", where=folder, fix=fix)
    check_writable(folder.parent)
    source = open_source(config)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # the kernel drops the lock of a killed process
        identity = source.identity()
        done = up_to_date(folder, config, identity)
        if done is not None:
            _say(f"data {folder.name}: up to date ({_summary(done)})", show)
            return done
        for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(leftover)
        new = folder.parent / f".{folder.name}.partial-{os.getpid()}"
        new.mkdir()
        try:
            make_shards = None
            if config.source == "openwebtext":
                there = sum(file.stat().st_size for file in folder.parent.glob(f".{folder.name}.shards-*/*"))
                check_space(folder.parent, space_needed(config, source) - there)
                make_shards = partial(_shards, folder, workers, shard_documents)
            info = _write(config, source, identity, new, tokenizer_files, show, make_shards)
            manifest.publish(new, folder)
            for leftover in folder.parent.glob(f".{folder.name}.shards-*"):
                shutil.rmtree(leftover)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            fix = "free space and start it again: shards that are finished are kept"
            raise UserError("no space left on the disk", where=folder.parent, fix=fix) from None
        finally:
            shutil.rmtree(new, ignore_errors=True)
    _say(f"data {folder.name}: prepared ({_summary(info)})", show)
    return info


def _shards(folder: Path, workers: int, size: int | None, tokenizer: TextTokenizer, dtype: Any) -> Shards:
    """The shards of ``folder``, beside it; those of another tokenizer are deleted."""
    from experiments.data.token_shards import SHARD_DOCUMENTS, Shards

    size = size or SHARD_DOCUMENTS
    key = hashlib.sha256(f"{size}\0{dtype.__name__}\0{tokenizer.to_json()}".encode()).hexdigest()[:16]
    own = folder.parent / f".{folder.name}.shards-{key}"
    for other in folder.parent.glob(f".{folder.name}.shards-*"):
        if other != own:
            shutil.rmtree(other)
    return Shards(own, tokenizer, dtype, workers=workers, size=size)


def space_needed(config: DataConfig, source: Source) -> int:
    """Bytes that preparing an ``openwebtext`` source takes, about: shards and datasets together.

    OpenWebText has 8 013 769 documents and 9.04 G tokens of GPT-2's, of two bytes each (nanoGPT, data/openwebtext). Of
    local files a token is about four bytes of text, so shards and datasets take about what the files take.
    """
    if isinstance(source, HuggingFaceText) and source.folder:
        return sum(path.stat().st_size for path in source.files)
    documents = min(config.max_documents or OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_DOCUMENTS)
    return round(documents * (2 * 2 * OPENWEBTEXT_TOKENS / OPENWEBTEXT_DOCUMENTS + BYTES_BESIDE_TOKENS))


def _write(
    config: DataConfig,
    source: Source,
    identity: str,
    folder: Path,
    tokenizer_files: Path | None,
    show: bool,
    make_shards: Callable[[TextTokenizer, Any], Shards] | None,
) -> DataInfo:
    # Only here: both take seconds to import, and reading a prepared folder's facts needs neither.
    import numpy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU packages that this program has no use for
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    counts = {name: dict.fromkeys(SPLITS, 0) for name in ("documents", "tokens", "bytes")}
    with _progress(show) as progress:
        tokenizer = _tokenizer(config, source, tokenizer_files, progress)
        tokenizer.save(folder / "tokenizer.json")
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        builders = {split: IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=dtype) for split in SPLITS}
        digest = hashlib.sha256()
        with (folder / "documents.jsonl").open("w", encoding="utf-8") as index:
            shards = make_shards(tokenizer, dtype) if make_shards is not None else None
            for document, size, ids in _encode(source.documents(), tokenizer, progress, shards):
                split = source.split_of(document)
                builders[split].add_document(numpy.asarray(ids), [len(ids)])
                for name, amount in (("documents", 1), ("tokens", len(ids)), ("bytes", size)):
                    counts[name][split] += amount
                row = {"path": document.path, "split": split, "bytes": size, "tokens": len(ids)}
                index.write(json.dumps(row | {"sha256": document.sha256}) + "\n")
                digest.update(f"{split}\0{document.path}\0{document.sha256}\n".encode("utf-8", "replace"))
    for split, share in zip(SPLITS, source.shares, strict=True):
        if not counts["documents"][split]:
            fix = f"give more documents or raise data.max_documents: {share} in 1000 go to {split}"
            message = f"the {split} split is empty: {sum(counts['documents'].values())} documents are too few"
            raise UserError(message, where=source.where, fix=fix)
    for split, builder in builders.items():
        builder.finalize(str(folder / f"{split}.idx"))
    digest.update(tokenizer.to_json().encode("utf-8"))
    info = DataInfo(
        format=FORMAT,
        config=recorded(config),
        python=platform.python_version(),
        identity=identity,
        fingerprint=digest.hexdigest(),
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        files=integrity.record(folder),
        code=data_code(),
        **counts,
    )
    atomic_write(folder / "data.yaml", info.content())
    return info


def _tokenizer(config: DataConfig, source: Source, files: Path | None, progress: Progress) -> TextTokenizer:
    from experiments.data import tokenizer

    if config.tokenizer == "gpt2":
        return tokenizer.load_gpt2(files)
    if config.vocab_size is None:
        raise UserError("data.vocab_size is missing for data.tokenizer = bpe", fix="set data.vocab_size, e.g. 4096")
    train = (document for document in source.documents() if source.split_of(document) == "train")
    counted = _counted(train, progress, "train tokenizer")
    return tokenizer.train_bpe((document.text for document in counted), config.vocab_size)


def _encode(
    documents: Iterator[Document], tokenizer: TextTokenizer, progress: Progress, shards: Shards | None
) -> Iterator[Encoded]:
    counted = _counted(documents, progress, "write tokens")
    if shards is not None:
        yield from shards.encode(counted)
        return
    # The copy lags by one chunk only, so a streamed corpus stays out of memory.
    named, encoded = tee(counted)
    ids = tokenizer.encode_documents(document.text for document in encoded)
    for document, row in zip(named, ids, strict=True):
        yield document, len(document.text.encode("utf-8")), row


def _counted(documents: Iterable[Document], progress: Progress, what: str) -> Iterator[Document]:
    """The documents, beside a bar that shows ``what`` is done with them, and at the end of how many."""
    task = progress.add_task(what, total=None)
    for document in documents:
        progress.advance(task)
        yield document
    progress.update(task, total=progress.tasks[task].completed)


def _progress(show: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("documents"))
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not show)


def _summary(info: DataInfo) -> str:
    documents, tokens = sum(info.documents.values()), sum(info.tokens.values())
    return f"{documents} documents, {tokens / 1e6:.2f} M tokens, fingerprint {info.fingerprint[:12]}"


def _say(message: str, show: bool) -> None:
    if show:
        print(message, file=sys.stderr)
