"""Tokenisation in several processes that a kill does not take back: shards of documents, each whole or not there.

A shard is a file of token ids and a JSON file, written after it, that names the documents and holds the checksum of the
ids. Shards are cut by the number of documents alone and read in order, so what is made of them does not depend on the
number of processes, nor on how often the work was interrupted. A started-again preparation reads its source from the
beginning and tokenises only what no intact shard of the same documents holds.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.files import atomic_write
from experiments.common.processes import die_with_parent
from experiments.data.corpus import Document
from experiments.data.tokenizer import TextTokenizer

SHARD_DOCUMENTS = 2000  # some 10 MB of web text, a few seconds of work
_tokenizer: TextTokenizer | None = None  # of a worker
#: A document, its size in bytes of UTF-8, its token ids.
Encoded = tuple[Document, int, Any]


class Shards:
    """The shards of one corpus in ``folder``.

    Args:
        folder: made if missing; of the same tokenizer and type of token ids at every call.
        workers: processes; 1 works in this one.
        size: documents of a shard.

    Attributes:
        made: shards that were tokenised, and not found.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TextTokenizer,
        dtype: np.dtype | type,
        *,
        workers: int = 1,
        size: int = SHARD_DOCUMENTS,
    ) -> None:
        if workers < 1:
            raise UserError(f"--workers = {workers} is not valid", fix="use 1 or more")
        self.folder, self.size, self.workers, self.made = folder, size, workers, 0
        self._here, self._definition, self._dtype = tokenizer, tokenizer.to_json(), np.dtype(dtype)
        folder.mkdir(parents=True, exist_ok=True)

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Each document, its text dropped, with its token ids (1-D array), in order.

        At most two shards a worker are under way, so memory does not grow with the corpus.

        Raises:
            UserError: a worker was killed; the shards that are finished stay, as after any other error.
        """
        source = iter(documents)
        pool: Executor | None = None
        if self.workers > 1:
            # Forked, workers would share locks of whatever threads there are.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(self.workers, context, initializer=_begin, initargs=(self._definition,))
        under_way: deque[tuple[Path, list[tuple[Document, int]], Future[None] | None]] = deque()
        remaining = enumerate(iter(lambda: list(islice(source, self.size)), []))
        try:
            for number, chunk in remaining:
                path = self.folder / f"{number:06d}.bin"
                future = self._ensure(path, chunk, pool)
                kept = [(replace(one, text=""), len(one.text.encode("utf-8"))) for one in chunk]
                under_way.append((path, kept, future))
                if len(under_way) > 2 * self.workers:
                    yield from self._read(*under_way.popleft())
            while under_way:
                yield from self._read(*under_way.popleft())
        except BrokenProcessPool:
            fix = "start it again: finished shards are kept; with less memory use fewer --workers"
            raise UserError("a tokenising process was killed", where=self.folder, fix=fix) from None
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _ensure(self, path: Path, chunk: Sequence[Document], pool: Executor | None) -> Future[None] | None:
        """Have the shard made, unless it is there and intact."""
        if intact(path, _digest(chunk)):
            return None
        self.made += 1
        task = (path, _digest(chunk), [document.text for document in chunk], self._dtype.str)
        if pool is not None:
            return pool.submit(_write_in_worker, *task)
        write(self._here, *task)
        return None

    def _read(
        self, path: Path, documents: list[tuple[Document, int]], future: Future[None] | None
    ) -> Iterator[Encoded]:
        if future is not None:
            future.result()
        ids = np.fromfile(path, dtype=self._dtype)
        lengths = json.loads(path.with_suffix(".json").read_text())["lengths"]
        parts = np.split(ids, np.cumsum(lengths[:-1]))
        for (document, size), part in zip(documents, parts, strict=True):
            yield document, size, part


def intact(path: Path, documents: str) -> bool:
    """Whether ``path`` holds the token ids of these documents, unchanged since they were written."""
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        return bool(about["documents"] == documents and about["sha256"] == manifest.entry(path).sha256)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write(tokenizer: TextTokenizer, path: Path, documents: str, texts: Sequence[str], dtype: str) -> None:
    """Tokenise ``texts`` into the shard ``path``; what says that it is complete comes last."""
    about = path.with_suffix(".json")
    about.unlink(missing_ok=True)
    encoded = list(tokenizer.encode_documents(texts))
    ids = np.concatenate([np.asarray(row, dtype=dtype) for row in encoded]).tobytes()
    atomic_write(path, ids)
    content = {"documents": documents, "lengths": [len(row) for row in encoded]}
    atomic_write(about, json.dumps(content | {"sha256": hashlib.sha256(ids).hexdigest()}))


def _digest(chunk: Sequence[Document]) -> str:
    return hashlib.sha256("".join(document.sha256 for document in chunk).encode()).hexdigest()


def _begin(definition: str) -> None:
    """Of a worker: it ends with its parent, whatever ends that, and leaves interrupts to it."""
    global _tokenizer
    die_with_parent(signal.SIGKILL)()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = TextTokenizer(Tokenizer.from_str(definition))


def _write_in_worker(path: Path, documents: str, texts: Sequence[str], dtype: str) -> None:
    assert _tokenizer is not None
    write(_tokenizer, path, documents, texts, dtype)
