"""Tokenising in shards: the same bytes for any number of processes and interruptions, nothing done twice."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgc.errors import UserError
from experiments.common import files as file_tools
from experiments.data import prepare, token_shards
from experiments.data.corpus import SPLITS, Document
from experiments.data.folder import load_info
from experiments.data.token_shards import Shards
from experiments.data.tokenizer import TextTokenizer, train_bpe
from experiments.spec.settings import DataConfig

ROOT = Path(__file__).parents[2]
SIZE = 10


def corpus(documents: int = 95) -> list[Document]:
    generator = random.Random(1)
    words = ["gradient", "entropy", "rank", "<|endoftext|>", "[MASK]", "naïve", "\n", "stage", "日本"]
    texts = (" ".join(generator.choices(words, k=generator.randint(1, 60))) for _ in range(documents))
    return [Document.of(f"row-{i}", f"{i} {text}") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe((document.text for document in corpus()), 300)


def encoded(shards: Shards, documents: list[Document]) -> list[tuple[str, int, list[int]]]:
    return [(document.path, size, ids.tolist()) for document, size, ids in shards.encode(iter(documents))]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [SIZE, 95])
def test_one_and_three_processes_give_what_the_tokenizer_gives(
    tmp_path: Path, tokenizer: TextTokenizer, count: int
) -> None:
    documents = corpus(count)
    plain = list(tokenizer.encode_documents([document.text for document in documents]))
    expected = [(d.path, len(d.text.encode()), ids) for d, ids in zip(documents, plain, strict=True)]
    for workers in (1, 3):
        shards = Shards(tmp_path / str(workers), tokenizer, np.uint16, workers=workers, size=SIZE)
        assert encoded(shards, documents) == expected
        assert shards.made == -(-count // SIZE)
    assert files(tmp_path / "1") == files(tmp_path / "3")
    assert len(files(tmp_path / "1")) == 2 * shards.made


def test_what_is_there_is_not_done_again(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    first = Shards(tmp_path, tokenizer, np.uint16, size=SIZE)
    partly = encoded(first, corpus(40))
    again = Shards(tmp_path, tokenizer, np.uint16, size=SIZE)
    whole = encoded(again, corpus(95))
    assert whole[:40] == partly
    assert again.made == 10 - 4


@pytest.mark.parametrize("damage", ["flipped", "cut", "ids gone", "note gone", "note cut", "other note"])
def test_a_damaged_shard_is_found_and_made_again(tmp_path: Path, tokenizer: TextTokenizer, damage: str) -> None:
    expected = encoded(Shards(tmp_path, tokenizer, np.uint16, size=SIZE), corpus())
    before = files(tmp_path)
    ids, note = tmp_path / "000003.bin", tmp_path / "000003.json"
    if damage == "flipped":
        content = bytearray(ids.read_bytes())
        content[7] ^= 1
        ids.write_bytes(content)
    elif damage == "cut":
        ids.write_bytes(ids.read_bytes()[:-2])
    elif damage == "ids gone":
        ids.unlink()
    elif damage == "note gone":
        note.unlink()
    elif damage == "note cut":
        note.write_bytes(note.read_bytes()[:-9])
    else:
        note.write_bytes((tmp_path / "000004.json").read_bytes())
    shards = Shards(tmp_path, tokenizer, np.uint16, size=SIZE)
    assert encoded(shards, corpus()) == expected
    assert shards.made == 1
    assert files(tmp_path) == before


def test_shards_of_other_documents_are_not_taken(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    encoded(Shards(tmp_path, tokenizer, np.uint16, size=SIZE), corpus(50))
    other = corpus(50)
    other[25] = Document.of("row-25", "another text")
    shards = Shards(tmp_path, tokenizer, np.uint16, size=SIZE)
    found = encoded(shards, other)
    assert shards.made == 1
    assert found[25][2] == next(iter(tokenizer.encode_documents(["another text"])))


def test_few_documents_are_held_at_a_time(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    read = 0

    def source() -> Any:
        nonlocal read
        for document in corpus(95):
            read += 1
            yield document

    shards = Shards(tmp_path, tokenizer, np.uint16, size=5)
    for done, _ in enumerate(shards.encode(source()), start=1):
        assert read - done < 4 * 5


def test_without_workers_nothing_starts(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(UserError, match="--workers = 0"):
        Shards(tmp_path, tokenizer, np.uint16, workers=0)


def dataset(folder: Path, documents: int = 400) -> DataConfig:
    """A dataset of JSON lines, as `datasets` reads it."""
    folder.mkdir()
    lines = [json.dumps({"text": document.text}) for document in corpus(documents)]
    half = documents // 2
    for name, part in (("a.jsonl", lines[:half]), ("b.jsonl", lines[half:])):
        (folder / name).write_text("\n".join(part) + "\n")
    return DataConfig(source="openwebtext", dataset=str(folder), tokenizer="bpe", vocab_size=300, path="web")


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One document in a thousand goes to the test split; here there are only some hundred."""
    from experiments.data.corpus import HuggingFaceText

    monkeypatch.setattr(HuggingFaceText, "shares", (900, 50, 50))


def prepared(folder: Path) -> dict[str, bytes]:
    assert not [path for path in folder.parent.iterdir() if ".partial" in path.name or ".shards" in path.name]
    return files(folder)


PREPARE = """
import sys
from pathlib import Path
from experiments.data import corpus
from experiments.data import prepare
from experiments.data import token_shards
from experiments.spec.settings import DataConfig
corpus.HuggingFaceText.shares = (900, 50, 50)
if __name__ == "__main__":
    config = DataConfig(source="openwebtext", dataset=sys.argv[1], tokenizer="bpe", vocab_size=300, path="web")
    prepare.prepare(config, Path(sys.argv[2]), show=False, workers=2, shard_documents=4)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("small_splits")
def test_a_killed_preparation_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    config = dataset(tmp_path / "text")
    prepare.prepare(config, tmp_path / "whole" / "web", show=False, shard_documents=4)
    script = tmp_path / "prepare.py"
    script.write_text(PREPARE)
    killed = tmp_path / "killed" / "web"
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "text"), str(killed)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    finished: set[Path] = set()
    while process.poll() is None and len(finished) < 5 and time.monotonic() < deadline:
        finished = set(killed.parent.glob(".web.shards-*/*.json"))
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(finished) >= 5
    assert not killed.exists()
    kept = {path: path.stat().st_ino for path in finished}
    inodes: dict[Path, int] = {}
    original = Shards.encode

    def looking(self: Shards, documents: Any) -> Any:
        yield from original(self, documents)
        inodes.update({path: path.stat().st_ino for path in kept})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "encode", looking)
        prepare.prepare(config, killed, show=False, shard_documents=4)
    assert inodes == kept
    assert prepared(killed) == prepared(tmp_path / "whole" / "web")
    assert set(load_info(killed).documents) == set(SPLITS)


@pytest.mark.usefixtures("small_splits")
def test_a_full_disk_is_one_line_and_leaves_only_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = dataset(tmp_path / "text"), tmp_path / "data" / "web"
    room = 20

    def with_little_room(path: Path, content: str | bytes) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file_tools.atomic_write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(token_shards, "atomic_write", with_little_room)
        with pytest.raises(UserError, match=r"no space left on the disk.*finished are kept"):
            prepare.prepare(config, out, show=False, shard_documents=4)
    assert not out.exists()
    assert not list(out.parent.glob(".web.partial*"))
    (shards,) = out.parent.glob(".web.shards-*")
    assert len(list(shards.glob("*.json"))) == 10
    prepare.prepare(config, out, show=False, shard_documents=4)
    assert set(load_info(out).documents) == set(SPLITS)
    assert prepared(out)


def test_too_little_space_is_said_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = dataset(tmp_path / "text"), tmp_path / "data" / "web"
    monkeypatch.setattr(prepare, "space_needed", lambda *_: 10**18)
    with pytest.raises(UserError, match=r"1000000000\.0 GB are needed, .* GB are free"):
        prepare.prepare(config, out, show=False)
    assert [path.name for path in out.parent.iterdir()] == [".web.lock"]


def test_openwebtext_needs_about_forty_gigabytes() -> None:
    from experiments.data.sources import open_source

    config = DataConfig(source="openwebtext", tokenizer="gpt2", path="openwebtext")
    # Two copies of 9.04 G tokens of two bytes, and 8 M documents' names and indices.
    assert prepare.space_needed(config, open_source(config)) == pytest.approx(37.9e9, rel=0.01)
    half = config.model_copy(update={"max_documents": 4_006_884})
    assert prepare.space_needed(half, open_source(half)) == pytest.approx(19e9, rel=0.01)
