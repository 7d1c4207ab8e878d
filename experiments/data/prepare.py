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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.files import atomic_write, check_space, check_writable
from experiments.common.source import data_code
from experiments.data.corpus import SPLITS, Document, HuggingFaceText, Source, open_source
from experiments.data.folder import FILES, FORMAT, INDEX_CACHE, DataInfo, recorded, up_to_date
from experiments.spec.settings import DataConfig

if TYPE_CHECKING:
    from experiments.data.tokenizer import TextTokenizer

OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_TOKENS = 8_013_769, 9.04e9
BYTES_BESIDE_TOKENS = 220  # of a document: its line in documents.jsonl and its entries in the indices
Track = Callable[[Iterable[Document], str], Iterable[Document]]  # documents, and a bar with this label beside them


def prepare(
    config: DataConfig,
    folder: Path,
    *,
    tokenizer_files: Path | None = None,
    show: bool = True,
    shard_documents: int | None = None,
) -> DataInfo:
    """Prepare ``config``'s corpus in ``folder``; does nothing where that is already done.

    Args:
        config: the ``data`` settings; ``path`` is not used.
        folder: replaced only if it holds prepared data or nothing.
        tokenizer_files: folder with GPT-2's tokenizer files, for ``tokenizer: gpt2`` without network.
        show: progress bar and messages on stderr.
        shard_documents: documents of a shard of an ``openwebtext`` source; shards outlive a kill
            (:func:`experiments.data.tokenizer.encode_documents`).

    Raises:
        UserError: the source cannot be read, a split would be empty, there is too little space, or ``folder`` is in
            the way.
    """
    folder = folder.resolve()
    known = {*FILES, "data.yaml", INDEX_CACHE, ".snakemake_timestamp"}
    if folder.exists() and not (folder.is_dir() and {entry.name for entry in folder.iterdir()} <= known):
        fix = "remove it or choose another --out"
        raise UserError("the output is not a prepared data folder", where=folder, fix=fix)
    check_writable(folder.parent)
    source = open_source(config)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # the kernel drops the lock of a killed process
        identity = source.identity()
        info = up_to_date(folder, config, identity)
        state = "up to date" if info else "prepared"
        if info is None:
            remove(folder.parent.glob(f".{folder.name}.partial-*"))
            new = folder.parent / f".{folder.name}.partial-{os.getpid()}"
            new.mkdir()
            try:
                if config.source == "openwebtext":
                    shard_bytes = sum(file.stat().st_size for file in folder.parent.glob(f".{folder.name}.shards-*/*"))
                    check_space(folder.parent, space_needed(config, source) - shard_bytes)
                info = _write(config, source, identity, new, folder, tokenizer_files, _track(show), shard_documents)
                manifest.publish(new, folder)
                remove(folder.parent.glob(f".{folder.name}.shards-*"))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                fix = "free space and start it again: shards that are finished are kept"
                raise UserError("no space left on the disk", where=folder.parent, fix=fix) from None
            finally:
                shutil.rmtree(new, ignore_errors=True)
    if show:
        documents, tokens = sum(info.documents.values()), sum(info.tokens.values())
        summary = f"{documents} documents, {tokens / 1e6:.2f} M tokens, fingerprint {info.fingerprint[:12]}"
        print(f"data {folder.name}: {state} ({summary})", file=sys.stderr)
    return info


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def space_needed(config: DataConfig, source: Source) -> int:
    """Bytes that preparing an ``openwebtext`` source takes, about: shards and datasets together.

    OpenWebText has 8 013 769 documents and 9.04 G tokens of GPT-2's, of two bytes each (nanoGPT, data/openwebtext). Of
    local files a token is about four bytes of text, so shards and datasets take about what the files take.
    """
    if isinstance(source, HuggingFaceText) and source.folder:
        return sum(path.stat().st_size for path in source.files)
    documents = min(config.max_documents or OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_DOCUMENTS)
    return round(documents * (2 * 2 * OPENWEBTEXT_TOKENS / OPENWEBTEXT_DOCUMENTS + BYTES_BESIDE_TOKENS))


def _track(show: bool) -> Track:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return lambda documents, label: track(documents, label, console=console, disable=not show)


def _write(
    config: DataConfig,
    source: Source,
    identity: str,
    new: Path,
    folder: Path,
    tokenizer_files: Path | None,
    track: Track,
    shard_documents: int | None,
) -> DataInfo:
    # Only here: these take seconds to import, and reading a prepared folder's facts needs none of them.
    from experiments.data.tokenizer import SHARD_DOCUMENTS, encode_documents

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU packages that this program has no use for
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = _tokenizer(config, source, tokenizer_files, track)
    tokenizer.save(new / "tokenizer.json")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    size, shards = shard_documents or SHARD_DOCUMENTS, None
    if config.source == "openwebtext":
        key = hashlib.sha256(f"{size}\0{dtype.__name__}\0{tokenizer.to_json()}".encode()).hexdigest()[:16]
        shards = folder.parent / f".{folder.name}.shards-{key}"
        remove(other for other in folder.parent.glob(f".{folder.name}.shards-*") if other != shards)
    counts = {name: dict.fromkeys(SPLITS, 0) for name in ("documents", "tokens", "bytes")}
    builders = {split: IndexedDatasetBuilder(str(new / f"{split}.bin"), dtype=dtype) for split in SPLITS}
    digest = hashlib.sha256()
    with (new / "documents.jsonl").open("w", encoding="utf-8") as index:
        documents = track(source.documents(), "write tokens")
        for document, ids in encode_documents(documents, tokenizer, dtype, shards, size):
            split, text_bytes = source.split_of(document), len(document.text.encode("utf-8"))
            builders[split].add_document(ids, [len(ids)])
            for name, amount in (("documents", 1), ("tokens", len(ids)), ("bytes", text_bytes)):
                counts[name][split] += amount
            row = {"path": document.path, "split": split, "bytes": text_bytes, "tokens": len(ids)}
            index.write(json.dumps(row | {"sha256": document.sha256}) + "\n")
            digest.update(f"{split}\0{document.path}\0{document.sha256}\n".encode("utf-8", "replace"))
    for split, share in zip(SPLITS, source.shares, strict=True):
        if not counts["documents"][split]:
            fix = f"give more documents or raise data.max_documents: {share} in 1000 go to {split}"
            message = f"the {split} split is empty: {sum(counts['documents'].values())} documents are too few"
            raise UserError(message, where=source.where, fix=fix)
    for split, builder in builders.items():
        builder.finalize(str(new / f"{split}.idx"))
    digest.update(tokenizer.to_json().encode("utf-8"))
    info = DataInfo(
        source=config.source,
        format=FORMAT,
        config=recorded(config),
        python=platform.python_version(),
        identity=identity,
        fingerprint=digest.hexdigest(),
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        files={name: manifest.entry(new / name) for name in FILES},
        code=data_code(),
        **counts,
    )
    atomic_write(new / "data.yaml", info.content())
    return info


def _tokenizer(config: DataConfig, source: Source, files: Path | None, track: Track) -> TextTokenizer:
    from experiments.data import tokenizer

    if config.tokenizer == "gpt2":
        return tokenizer.load_gpt2(files)
    if config.vocab_size is None:
        raise UserError("data.vocab_size is missing for data.tokenizer = bpe", fix="set data.vocab_size, e.g. 4096")
    texts = (document for document in source.documents() if source.split_of(document) == "train")
    return tokenizer.train_bpe((document.text for document in track(texts, "train tokenizer")), config.vocab_size)
