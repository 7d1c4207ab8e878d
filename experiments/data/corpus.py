"""Sources of text behind one small interface, opened by what a run's ``data`` settings name.

``stdlib``       the running Python's own standard library (no download; differs between Python versions)
``debian``       manuals and books in English from Debian's documentation packages (:mod:`experiments.data.debian`)
``folder``       ``.txt`` files (one document each) and ``.jsonl`` files (one document a line, key ``text``)
``openwebtext``  a Hugging Face dataset, streamed; its id may also name a local folder of parquet or JSON files

A source is re-iterable and deterministic: the same text gives the same documents, in the same order, in the
same splits. Documents are split by a hash, so a document keeps its split when others are added or removed.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.spec.settings import DataConfig

OPENWEBTEXT = "Skylion007/openwebtext"
# A commit whose files are parquet: `datasets` >= 4 no longer runs the loading script of older commits.
OPENWEBTEXT_REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"
SPLITS = ("train", "validation", "test")
_STDLIB_SKIP_TOP = {"site-packages", "dist-packages", "lib2to3", "ensurepip"}
_STDLIB_SKIP_ANY = {"test", "tests", "idle_test", "__pycache__"}
_STDLIB_MIN_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """One document: ``path`` names it inside its source, ``sha256`` is the hex digest of its UTF-8 text."""

    path: str
    text: str
    sha256: str

    @classmethod
    def from_text(cls, path: str, text: str) -> Document:
        """Build a document with LF line ends; lone surrogates (legal in JSON, not in UTF-8) become ``?``."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        data = text.encode("utf-8", "replace")
        return cls(path, data.decode("utf-8"), hashlib.sha256(data).hexdigest())


class Source(ABC):
    """Documents of one corpus.

    Args:
        where: the folder or dataset id, for messages.
        max_documents: stop after this many distinct documents; None takes all.
    """

    #: shares of (train, validation, test), in thousandths
    shares: tuple[int, int, int] = (900, 50, 50)

    def __init__(self, where: object, max_documents: int | None) -> None:
        self.where, self.max_documents = str(where), max_documents

    @abstractmethod
    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield (path, text) in a fixed order."""

    @abstractmethod
    def identity(self) -> str:
        """Hex digest that changes when the source would yield other documents; cheap next to tokenizing."""

    def documents(self) -> Iterator[Document]:
        """Yield the distinct, non-empty documents; of equal texts the first is kept.

        Raises:
            UserError: the source cannot be read or holds no text.
        """
        seen: set[bytes] = set()
        for path, text in self._texts():
            document = Document.from_text(path, text)
            # Half of the digest: 8 million documents stay below 1 GB, and a collision has probability 1e-25.
            key = bytes.fromhex(document.sha256[:32])
            if not document.text.strip() or key in seen:
                continue
            seen.add(key)
            yield document
            if len(seen) == self.max_documents:
                return
        if not seen:
            raise UserError("the corpus holds no text", where=self.where, fix="give documents with text in them")

    def split_of(self, document: Document) -> str:
        """``train``, ``validation`` or ``test``, from the hash of the path."""
        return self._split_of_hash(hashlib.sha256(document.path.encode("utf-8", "replace")).hexdigest())

    def _split_of_hash(self, digest: str) -> str:
        position = int(digest, 16) % 1000
        train, validation, _ = self.shares
        return SPLITS[0] if position < train else SPLITS[1] if position < train + validation else SPLITS[2]


class StandardLibrary(Source):
    """The ``.py`` files of the running Python's standard library, without tests and build-machine files."""

    def __init__(self, max_documents: int | None = None, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        super().__init__(self.root, max_documents)

    def _texts(self) -> Iterator[tuple[str, str]]:
        for path in sorted(self.root.rglob("*.py"), key=lambda path: path.relative_to(self.root).as_posix()):
            relative = path.relative_to(self.root)
            skipped = relative.parts[0] in _STDLIB_SKIP_TOP or _STDLIB_SKIP_ANY.intersection(relative.parts[:-1])
            if skipped or relative.name.startswith("_sysconfigdata"):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):  # a few files of the library are in other encodings by design
                continue
            if len(text) >= _STDLIB_MIN_CHARACTERS:
                yield relative.as_posix(), text

    def identity(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents():
            digest.update(f"{document.path}\0{document.sha256}\n".encode())
        return digest.hexdigest()


class TextFolder(Source):
    """A folder of ``.txt`` and ``.jsonl`` files, searched recursively."""

    def __init__(self, folder: Path, max_documents: int | None = None) -> None:
        super().__init__(folder, max_documents)
        self.folder, self.files = folder, _files(folder, (".txt", ".jsonl"))

    def _texts(self) -> Iterator[tuple[str, str]]:
        for path in self.files:
            name = path.relative_to(self.folder).as_posix()
            try:
                if path.suffix == ".txt":
                    yield name, path.read_text(encoding="utf-8")
                    continue
                with path.open(encoding="utf-8") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip():
                            yield f"{name}:{number}", _text_of(json.loads(line), f"{path}:{number}")
            except UnicodeDecodeError:
                raise UserError("the file is not UTF-8 text", where=path, fix="convert it to UTF-8") from None
            except json.JSONDecodeError as error:
                fix = 'write one {"text": "..."} object a line'
                raise UserError(f"line {number} is not JSON: {error.msg}", where=path, fix=fix) from None

    def identity(self) -> str:
        return _digest_of_files(self.folder, self.files)


class HuggingFaceText(Source):
    """A Hugging Face dataset with a ``text`` column, streamed; or a local folder of parquet or JSON files.

    Split by the hash of the text in the shares 949 : 50 : 1 of the paper's runs (Megatron's split
    "949,50,1"), so that the split does not depend on how the rows are spread over files.
    """

    shares = (949, 50, 1)

    def __init__(self, dataset: str, revision: str | None, max_documents: int | None = None) -> None:
        super().__init__(f"{dataset}@{revision}", max_documents)
        self.dataset, self.revision = dataset, revision
        self.folder: Path | None = None
        if Path(dataset).is_dir() or dataset.startswith((".", "/", "~")):
            self.folder = Path(dataset).expanduser()
            self.where = str(self.folder)
            self.files = _files(self.folder, (".parquet", ".json", ".jsonl"))

    def _texts(self) -> Iterator[tuple[str, str]]:
        import datasets

        datasets.disable_progress_bars()
        name = self.dataset
        options: dict[str, Any] = {"revision": self.revision}
        if self.folder:
            name = "parquet" if self.files[0].suffix == ".parquet" else "json"
            options = {"data_files": [str(path) for path in self.files]}
        try:
            rows = datasets.load_dataset(name, **options, split="train", streaming=True)
            for index, row in enumerate(rows):
                yield f"row-{index:09d}", _text_of(row, f"{self.where}, row {index}")
        except UserError:
            raise
        except Exception as error:  # network, hub, arrow and JSON errors share no base class
            fix = "repair or replace the files"
            if not self.folder:
                fix = "check the network, or set data.dataset to a folder with the dataset's parquet or jsonl files"
            lines = str(error).strip().splitlines() or ["no message"]
            message = f"data.dataset cannot be read: {type(error).__name__}: {lines[0][:200]}"
            raise UserError(message, where=self.where, fix=fix) from error

    def split_of(self, document: Document) -> str:
        return self._split_of_hash(document.sha256)

    def identity(self) -> str:
        if self.folder:
            return _digest_of_files(self.folder, self.files)
        return hashlib.sha256(self.where.encode()).hexdigest()


def normalise(config: DataConfig) -> DataConfig:
    """``config`` with the defaults of its source filled in and settings that it ignores cleared."""
    update: dict[str, str | None] = {}
    if config.source != "openwebtext":
        update["revision"] = None
    elif config.dataset in (None, OPENWEBTEXT):
        update |= {"dataset": OPENWEBTEXT, "revision": config.revision or OPENWEBTEXT_REVISION}
    if config.source in ("stdlib", "debian"):
        update["dataset"] = None
    if config.tokenizer == "gpt2":
        update["vocab_size"] = None
    return config.model_copy(update=update)


def open_source(config: DataConfig) -> Source:
    """Source that ``config`` names; ``UserError`` where a folder is missing or has no readable file."""
    config = normalise(config)
    if config.source == "stdlib":
        return StandardLibrary(config.max_documents)
    if config.source == "debian":
        from experiments.data.debian import DebianManuals

        return DebianManuals(config.max_documents)
    if not config.dataset:
        fix = "set data.dataset to a folder of .txt or .jsonl files"
        raise UserError("data.dataset is missing for data.source = folder", fix=fix)
    if config.source == "folder":
        return TextFolder(Path(config.dataset).expanduser(), config.max_documents)
    return HuggingFaceText(config.dataset, config.revision, config.max_documents)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files below ``folder`` with one of ``suffixes``, sorted by their path inside it."""
    kinds = ", ".join(suffixes)
    if not folder.is_dir():
        fix = f"create the folder with {kinds} files or correct data.dataset"
        raise UserError("data.dataset is not a folder", where=folder, fix=fix)
    files = [path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()]
    if not files:
        fix = "put text there or correct the path"
        raise UserError(f"data.dataset holds no {kinds} file", where=folder, fix=fix)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _digest_of_files(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\0{manifest.entry(path).sha256}\n".encode())
    return digest.hexdigest()


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError("no string under the key `text`", where=where, fix="give every row a `text`")
    return text
