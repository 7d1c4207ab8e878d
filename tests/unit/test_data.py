"""Preparing data: exact contents, whole or nothing, nothing done twice; a folder is as written, or is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from edgc.errors import UserError
from experiments.data import folder as module
from experiments.data import tokenizer
from experiments.data.corpus import SPLITS
from experiments.data.folder import (
    FILES,
    INDEX_CACHE,
    check_config,
    check_indices,
    check_whole,
    load_info,
    prepare,
    texts,
)
from experiments.spec import matrix
from experiments.spec.settings import DataConfig

ROOT = Path(__file__).parents[2]


def write_corpus(folder: Path, documents: int = 120, seed: int = 0) -> DataConfig:
    """A folder of generated text; returns its data settings."""
    words = ["gradient", "entropy", "rank", "<|endoftext|>", "[MASK]", "naïve", "\n", "stage", "日本"]
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = " ".join(generator.choices(words, k=generator.randint(20, 120)))
        (folder / f"doc{number:04d}.txt").write_text(text, encoding="utf-8")
    return DataConfig(source="folder", dataset=str(folder), vocab_size=300, path="toy")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return write_corpus(tmp_path / "corpus")


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]


def test_every_document_is_stored_whole_in_one_split(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "data" / "toy"
    info = prepare(config, out, show=False)
    assert info == load_info(out)
    reader = Tokenizer.from_file(str(out / "tokenizer.json"))
    recorded = rows(out)
    assert len({row["path"] for row in recorded}) == len(recorded) == 120
    for split in SPLITS:
        stored = IndexedDataset(str(out / split))
        expected = [row for row in recorded if row["split"] == split]
        assert len(stored) == len(expected) == info.documents[split] > 0
        assert len(stored.document_indices) == len(stored) + 1
        for index, row in enumerate(expected):
            ids = stored[index]
            original = (tmp_path / "corpus" / str(row["path"])).read_text(encoding="utf-8")
            assert reader.decode(ids.tolist()) == original
            assert ids[-1] == info.special_tokens[tokenizer.END_OF_TEXT]
            assert not set(ids[:-1].tolist()) & set(info.special_tokens.values())
            assert (row["tokens"], row["bytes"]) == (len(ids), len(original.encode()))
        assert info.tokens[split] == stored.sequence_lengths.sum()
        assert info.bytes[split] == sum(int(str(row["bytes"])) for row in expected)
    assert not [path for path in out.parent.iterdir() if path.name not in ("toy", ".toy.lock")]


def test_only_damage_and_other_text_or_settings_are_prepared_again(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    first = prepare(config, out, show=False)
    before = listing(out)
    assert prepare(config, out, show=False) == first
    assert listing(out) == before
    assert prepare(config, tmp_path / "again", show=False).fingerprint == first.fingerprint
    for name in ("train.bin", "data.yaml"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-2])
        assert prepare(config, out, show=False) == first
        assert (out / name).read_bytes() == content
    # Same size and same time stamp, other content: only a digest notices.
    path = tmp_path / "corpus" / "doc0003.txt"
    stamp = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert prepare(config, out, show=False).fingerprint != first.fingerprint
    smaller = config.model_copy(update={"vocab_size": 280})
    with pytest.raises(UserError, match=r"data.vocab_size = 280, but the folder was prepared with 300"):
        check_config(load_info(out), smaller, out)
    check_config(load_info(out), config.model_copy(update={"path": "elsewhere"}), out)
    assert prepare(smaller, out, show=False).vocab_size == 280


def test_texts_are_regenerated_and_a_changed_source_is_refused(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    info = prepare(config, out, show=False)
    found = {split: {document.path for document in texts(out, split)} for split in SPLITS}
    assert {split: len(paths) for split, paths in found.items()} == info.documents
    assert len(set.union(*found.values())) == 120
    with (out / "documents.jsonl").open("a") as lines:
        lines.write("no row\n")
    assert next(texts(out, "test")), "line by line: the file may have gigabytes"
    (out / "documents.jsonl").write_text((out / "documents.jsonl").read_text().removesuffix("no row\n"))
    victim = sorted(found["test"])[-1]
    for change in (lambda file: file.write_text("something else"), Path.unlink):
        change(tmp_path / "corpus" / victim)
        with pytest.raises(UserError, match="source has changed since the test split"):
            list(texts(out, "test"))
    assert {document.path for document in texts(out, "validation")} == found["validation"]


def _prepare_and_die(config: DataConfig, out: Path) -> None:
    """Prepare in a child process that is killed after 60 of 120 documents."""
    encode = tokenizer.encode_documents

    def dying(*arguments: Any) -> Iterator[Any]:
        for number, item in enumerate(encode(*arguments)):
            if number == 60:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    tokenizer.encode_documents = dying
    prepare(config, out, show=False)


def test_sigkill_leaves_nothing_that_looks_whole(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "killed" / "toy"
    child = multiprocessing.get_context("fork").Process(target=_prepare_and_die, args=(config, out))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(out.parent.glob(".toy.partial-*"))) == 1
    info = prepare(config, out, show=False)
    assert sum(info.documents.values()) == 120
    assert [path.name for path in out.parent.iterdir() if path.name != ".toy.lock"] == ["toy"]
    prepare(config, tmp_path / "whole", show=False)
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes(), path.name


def test_failure_keeps_the_old_folder(tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "toy"
    prepare(config, out, show=False)
    before = listing(out)
    monkeypatch.setattr(module.manifest, "publish", lambda new, folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config.model_copy(update={"vocab_size": 290}), out, show=False)
    assert listing(out) == before
    assert not list(tmp_path.glob(".toy.partial-*"))


def test_files_of_others_are_never_replaced(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    out.mkdir()
    (out / "thesis.tex").write_text("ten years")
    with pytest.raises(UserError, match="not a prepared data folder"):
        prepare(config, out, show=False)
    assert (out / "thesis.tex").read_text() == "ten years"
    (out / "thesis.tex").rename(tmp_path / "thesis.tex")
    assert prepare(config, out, show=False).documents["train"] > 0
    with pytest.raises(UserError, match="not a prepared data folder"):
        prepare(config, tmp_path / "thesis.tex", show=False)


def test_too_small_a_corpus(tmp_path: Path) -> None:
    config = write_corpus(tmp_path / "corpus", documents=3)
    with pytest.raises(UserError, match="split is empty: 3 documents are too few") as caught:
        prepare(config, tmp_path / "toy", show=False)
    assert str(tmp_path / "corpus") in str(caught.value)
    assert not (tmp_path / "toy").exists()
    with pytest.raises(UserError, match=r"data.vocab_size is missing"):
        prepare(config.model_copy(update={"vocab_size": None}), tmp_path / "toy", show=False)


def test_too_little_space_for_openwebtext_is_said_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DataConfig(source="openwebtext", tokenizer="gpt2", path="openwebtext")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e9))
    with pytest.raises(UserError, match=r"20\.0 GB are needed, 1\.0 GB are free .*max_documents"):
        prepare(whole, tmp_path / "data" / "toy", show=False)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".toy.lock"]


def test_settings_are_found_by_name_and_the_first_run_with_a_path_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (DataConfig(source="stdlib", path="two", max_documents=number) for number in (1, 2))
    studies = {name: [SimpleNamespace(data=data)] for name, data in (("a", first), ("b", second))}
    monkeypatch.setattr(matrix, "all_runs", lambda _: (studies, {}))
    assert matrix.data_config("ci", "two") == first

    monkeypatch.undo()
    assert matrix.data_config("ci", "stdlib") == DataConfig(source="stdlib", path="stdlib")
    with pytest.raises(UserError, match=r"no data.path = 'absent' at scale ci .*known: .*stdlib"):
        matrix.data_config("ci", "absent")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(write_corpus(folder / "corpus"), folder / "toy", show=False)
    return folder / "toy"


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "toy")
    return tmp_path / "toy"


def test_a_file_that_is_cut_short_altered_or_missing_is_named(folder: Path) -> None:
    info = load_info(folder)
    for name in FILES:
        path, content = folder / name, (folder / name).read_bytes()
        check_whole(folder, info)
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match=f"prepared data is damaged: {name} has ") as caught:
            check_whole(folder, info)
        assert f"(in {path})" in str(caught.value) and f"delete the folder {folder} " in str(caught.value)
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        check_whole(folder, info, checksums=False)
        with pytest.raises(UserError, match=f"{name} has another content than was written"):
            check_whole(folder, info)
        path.unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            check_whole(folder, info)
        path.write_bytes(content)


def test_every_cut_and_every_flipped_bit_of_data_yaml_is_found(folder: Path) -> None:
    path = folder / "data.yaml"
    content = path.read_bytes()
    for end in range(0, len(content), 7):
        flipped = content[:end] + bytes([content[end] ^ (1 << end % 8)]) + content[end + 1 :]
        for spoiled in (content[:end], flipped):
            path.write_bytes(spoiled)
            with pytest.raises(UserError):
                check_whole(folder, load_info(folder))
    path.unlink()
    with pytest.raises(UserError, match=r"prepared data is missing.*experiments\.data prepare"):
        load_info(folder)


def test_a_sample_order_that_is_cut_short_is_named(folder: Path) -> None:
    index = folder / INDEX_CACHE / "one"
    index.mkdir(parents=True)
    for name, array in {"a": numpy.arange(100), "b": numpy.zeros((50, 2), dtype=numpy.int32)}.items():
        numpy.save(index / f"{name}.npy", array)
    (folder / INDEX_CACHE / ".building-x").mkdir()
    (folder / INDEX_CACHE / ".building-x" / "half.npy").write_bytes(b"")
    check_indices(folder)
    for name in ("a.npy", "b.npy"):
        path = index / name
        content = path.read_bytes()
        for cut in (1, len(content) - 20, len(content)):
            path.write_bytes(content[: len(content) - cut])
            with pytest.raises(UserError, match=f"{name} is cut short") as caught:
                check_indices(folder)
            assert str(caught.value).endswith(f"delete the folder {index}: it is made again")
        path.write_bytes(content)
    check_indices(folder)
