"""Preparing data: exact contents, whole or nothing, nothing done twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from edgc.errors import UserError
from experiments.data import prepare as module
from experiments.data import tokenizer
from experiments.data.__main__ import find_config
from experiments.data.corpus import SPLITS
from experiments.data.folder import check_config, load_info, texts
from experiments.data.prepare import prepare
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
    assert info.source == "folder"
    reader = tokenizer.load(out / "tokenizer.json")
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
            assert reader.decode(ids) == original
            assert ids[-1] == reader.end_of_text
            assert not set(ids[:-1].tolist()) & set(info.special_tokens.values())
            assert (row["tokens"], row["bytes"]) == (len(ids), len(original.encode()))
        assert info.tokens[split] == stored.sequence_lengths.sum()
        assert info.bytes[split] == sum(int(str(row["bytes"])) for row in expected)
    assert 0.1 < sum(info.tokens.values()) / sum(info.bytes.values()) < 1.0
    assert not [path for path in out.parent.iterdir() if path.name not in ("toy", ".toy.lock")]


def test_tokenizer_sees_the_train_split_only(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    prepare(config, out, show=False)
    trained = tokenizer.train_bpe([document.text for document in texts(out, "train")], 300)
    assert trained.to_json() == (out / "tokenizer.json").read_text(encoding="utf-8")


def test_second_time_does_nothing_and_changes_are_noticed(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    first = prepare(config, out, show=False)
    before = listing(out)
    assert prepare(config, out, show=False) == first
    assert listing(out) == before
    assert prepare(config, tmp_path / "again", show=False).fingerprint == first.fingerprint

    # Same size and same time stamp, other content: only a digest notices.
    path = tmp_path / "corpus" / "doc0003.txt"
    stamp = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.swapcase())
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = prepare(config, out, show=False)
    assert second.fingerprint != first.fingerprint
    assert listing(out)["train.bin"] != before["train.bin"]
    smaller = prepare(config.model_copy(update={"vocab_size": 280}), out, show=False)
    assert smaller.vocab_size == 280


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "documents.jsonl", "tokenizer.json", "data.yaml"])
def test_damaged_folder_is_prepared_again(tmp_path: Path, config: DataConfig, name: str) -> None:
    out = tmp_path / "toy"
    first = prepare(config, out, show=False)
    content = (out / name).read_bytes()
    if name == "train.bin":
        (out / name).write_bytes(content[:-2])
    else:
        (out / name).unlink()
    assert prepare(config, out, show=False) == first
    assert (out / name).read_bytes() == content


def test_texts_are_regenerated_and_a_changed_source_is_refused(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    info = prepare(config, out, show=False)
    found = {split: {document.path for document in texts(out, split)} for split in SPLITS}
    assert {split: len(paths) for split, paths in found.items()} == info.documents
    assert len(set.union(*found.values())) == 120
    victim = sorted(found["test"])[-1]
    (tmp_path / "corpus" / victim).write_text("something else")
    with pytest.raises(UserError, match="source has changed since the test split"):
        list(texts(out, "test"))
    (tmp_path / "corpus" / victim).unlink()
    with pytest.raises(UserError, match="source has changed since the test split"):
        list(texts(out, "test"))
    assert {document.path for document in texts(out, "validation")} == found["validation"]
    with pytest.raises(UserError, match="unknown split"):
        list(texts(out, "dev"))


def _prepare_and_die(config: DataConfig, out: Path) -> None:
    """Prepare in a child process that is killed after 60 of 120 documents."""
    encode = module._encode

    def dying(*arguments: Any) -> Iterator[Any]:
        for number, item in enumerate(encode(*arguments)):
            if number == 60:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    module._encode = dying  # type: ignore[assignment]
    prepare(config, out, show=False)


def test_sigkill_leaves_nothing_that_looks_whole(tmp_path: Path, config: DataConfig) -> None:
    out = tmp_path / "toy"
    child = multiprocessing.get_context("fork").Process(target=_prepare_and_die, args=(config, out))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob(".toy.partial-*"))) == 1
    info = prepare(config, out, show=False)
    assert sum(info.documents.values()) == 120
    assert not list(tmp_path.glob(".toy.partial-*"))


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


def test_openwebtext_program_on_a_local_stand_in(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [json.dumps({"text": f"row {number} of a small stand-in"}) for number in range(3000)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    config = DataConfig(source="openwebtext", dataset=str(folder), vocab_size=300, max_documents=2500)
    info = prepare(config, tmp_path / "toy", show=False)
    assert sum(info.documents.values()) == 2500
    assert info.documents["validation"] == pytest.approx(125, abs=60)
    assert info.documents["test"] >= 1
    assert [document.text for document in texts(tmp_path / "toy", "test")]


def test_check_config_names_the_key(tmp_path: Path, config: DataConfig) -> None:
    info = prepare(config, tmp_path / "toy", show=False)
    check_config(info, config.model_copy(update={"path": "elsewhere"}), tmp_path / "toy")
    with pytest.raises(UserError, match=r"data.vocab_size = 500, but the folder was prepared with 300"):
        check_config(info, config.model_copy(update={"vocab_size": 500}), tmp_path / "toy")


def test_load_info_of_missing_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prepared data is missing") as caught:
        load_info(tmp_path / "toy")
    assert "experiments.data prepare" in str(caught.value)
    (tmp_path / "data.yaml").write_text("format: 0\n")
    with pytest.raises(UserError, match="format 0, not 1"):
        load_info(tmp_path)
    (tmp_path / "data.yaml").write_text("format: 1\n")
    with pytest.raises(UserError, match="lacks or has unknown keys"):
        load_info(tmp_path)


def test_settings_are_found_by_name() -> None:
    assert find_config("ci", "stdlib") == DataConfig(source="stdlib", path="stdlib")
    with pytest.raises(UserError, match=r"no data.path = 'absent' at scale ci .*known: .*stdlib"):
        find_config("ci", "absent")


def test_command_line_reports_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "toy"
    command = [sys.executable, "-m", "experiments.data", "prepare", "--scale", "ci", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "file") in line
