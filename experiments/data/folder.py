"""A folder of prepared text: written whole or not at all, checked by whoever reads it, and the text behind it again.

``python -m experiments.data prepare --scale ci --name stdlib`` writes ``results/ci/data/stdlib/``::

    tokenizer.json              the tokenizer, trained on the train split (or GPT-2's)
    {train,validation,test}.{bin,idx}   Megatron IndexedDataset, one item a document, each ending in
                                <|endoftext|>
    documents.jsonl             {path, split, bytes, tokens, sha256} a line; no corpus text
    data.yaml                   settings, counts, fingerprint, sizes and checksums of the files above
    index_cache/                sample order of runs, added by :mod:`experiments.data.batches`

Everything is written into a hidden sibling folder that is renamed when it is complete. A file that was cut short
later would still open: Megatron maps token files into memory and finds what is missing in the middle of a training.
So whoever reads a folder compares it first with the sizes and checksums in its ``data.yaml``. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from filelock import FileLock

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.files import atomic_write, check_writable
from experiments.common.source import data_code
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.data.corpus import SPLITS, Document, HuggingFaceText, Source, normalise, open_source
from experiments.spec.settings import DataConfig

if TYPE_CHECKING:
    from experiments.data.tokenizer import TextTokenizer

FORMAT = 1
CHECKSUM = "sha256"  # key of data.yaml that is written first
CHECKSUM_BYTES = 64 * 2**20  # larger files are not read through; at 1 GB/s this takes a tenth of a second
INDEX_CACHE = "index_cache"
FILES = ("tokenizer.json", "documents.jsonl", *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx")))

OPENWEBTEXT_DOCUMENTS = 8_013_769
# 9.04 G tokens of two bytes (nanoGPT, data/openwebtext), a line in documents.jsonl and entries in the indices.
BYTES_OF_DOCUMENT = 2500


class DataInfo(Settings):
    """Content of ``data.yaml``; counts are per split, sizes in bytes of UTF-8 text.

    ``identity`` is the source's digest before reading it through; ``fingerprint`` covers every document, its
    split and the tokenizer, so equal fingerprints mean equal training data. ``files`` holds size and SHA-256 of
    each file, ``code`` the fingerprint of the program.
    """

    source: str
    format: Literal[1]
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
    """Read ``data.yaml`` of a folder; ``UserError`` where that is missing or not as it was written."""
    path = folder / "data.yaml"
    if not path.is_file():
        fix = f"prepare it: python -m experiments.data prepare --scale <scale> --name {folder.name}"
        raise UserError("prepared data is missing", where=folder, fix=fix)
    checksum, _, rest = path.read_bytes().partition(b"\n")
    if checksum != f"{CHECKSUM}: {hashlib.sha256(rest).hexdigest()}".encode():
        raise damaged(path, "has another content than was written")
    values = load_yaml(path)
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


def prepare(config: DataConfig, folder: Path, *, show: bool = True) -> DataInfo:
    """Prepare ``config``'s corpus in ``folder``; does nothing where that is already done.

    Args:
        config: the ``data`` settings; ``path`` is not used.
        folder: replaced only if it holds prepared data or nothing.
        show: progress bar and messages on stderr.

    Raises:
        UserError: the source cannot be read, a split would be empty, the disk is too small, or ``folder`` in the way.
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
            for partial in folder.parent.glob(f".{folder.name}.partial-*"):
                shutil.rmtree(partial)
            _check_space(config, source, folder.parent)
            new = folder.parent / f".{folder.name}.partial-{os.getpid()}"
            new.mkdir()
            try:
                info = _write(config, source, identity, new, show)
                manifest.publish(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    if show:
        documents, tokens = sum(info.documents.values()), sum(info.tokens.values())
        summary = f"{documents} documents, {tokens / 1e6:.2f} M tokens, fingerprint {info.fingerprint[:12]}"
        print(f"data {folder.name}: {state} ({summary})", file=sys.stderr)
    return info


def _check_space(config: DataConfig, source: Source, folder: Path) -> None:
    """Refuse to begin with OpenWebText where the disk has no room for its tokens; of local files, half their bytes."""
    if not isinstance(source, HuggingFaceText):
        return
    needed = BYTES_OF_DOCUMENT * min(config.max_documents or OPENWEBTEXT_DOCUMENTS, OPENWEBTEXT_DOCUMENTS)
    if source.folder:
        needed = min(needed, sum(path.stat().st_size for path in source.files) // 2)
    if (free := shutil.disk_usage(folder).free) < needed:
        fix = "free space, choose another --out on a larger disk, or set data.max_documents"
        raise UserError(f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free", where=folder, fix=fix)


def _write(config: DataConfig, source: Source, identity: str, new: Path, show: bool) -> DataInfo:
    from rich.progress import track

    from experiments.data.tokenizer import encode_documents  # takes seconds to import, as Megatron does

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU packages that this program has no use for
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = _tokenizer(config, source, show)
    tokenizer.save(new / "tokenizer.json")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    counts = {name: dict.fromkeys(SPLITS, 0) for name in ("documents", "tokens", "bytes")}
    builders = {split: IndexedDatasetBuilder(str(new / f"{split}.bin"), dtype=dtype) for split in SPLITS}
    digest = hashlib.sha256()
    with (new / "documents.jsonl").open("w", encoding="utf-8") as index:
        documents = track(source.documents(), "write tokens", disable=not show)
        for document, ids in encode_documents(documents, tokenizer, dtype):
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


def _tokenizer(config: DataConfig, source: Source, show: bool) -> TextTokenizer:
    from rich.progress import track

    from experiments.data import tokenizer

    if config.tokenizer == "gpt2":
        return tokenizer.load_gpt2()
    if config.vocab_size is None:
        raise UserError("data.vocab_size is missing for data.tokenizer = bpe", fix="set data.vocab_size, e.g. 4096")
    documents = track(source.documents(), "train tokenizer", disable=not show)
    texts = (document.text for document in documents if source.split_of(document) == "train")
    return tokenizer.train_bpe(texts, config.vocab_size)
