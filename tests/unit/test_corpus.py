"""Sources of text: what they yield, how they split it, and how they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from edgc.errors import UserError
from experiments.data import corpus
from experiments.data.corpus import SPLITS, Document, HuggingFaceText, StandardLibrary, TextFolder, open_source
from experiments.spec.settings import DataConfig


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_standard_library_of_this_python() -> None:
    source = open_source(DataConfig(source="stdlib"))
    documents = list(source.documents())
    assert 300 < len(documents) < 3000
    paths = [document.path for document in documents]
    assert paths == sorted(paths)
    assert {"json/decoder.py", "argparse.py"} <= set(paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.split("/"))]
    assert len({document.sha256 for document in documents}) == len(documents)
    shares = [sum(source.split_of(document) == split for document in documents) / len(documents) for split in SPLITS]
    assert 0.85 < shares[0] < 0.95
    assert min(shares[1:]) > 0.02


def test_standard_library_recipe(tmp_path: Path) -> None:
    long = "x = 1  # a line of a module\r\n" * 20
    kept = {"b/z.py": long, "a.py": long.replace("1", "2")}
    left_out = {
        "c.py": kept["a.py"],  # the same text again
        "short.py": "x = 1\n",
        "test/t.py": long.replace("1", "3"),
        "pkg/tests/t.py": long.replace("1", "4"),
        "site-packages/p.py": long.replace("1", "5"),
        "_sysconfigdata_linux.py": long.replace("1", "6"),
    }
    for name, text in (kept | left_out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    source = StandardLibrary(root=tmp_path)
    documents = {document.path: document.text for document in source.documents()}
    assert list(documents) == ["a.py", "b/z.py"]
    assert "\r" not in documents["b/z.py"]
    before = source.identity()
    assert before == StandardLibrary(root=tmp_path).identity()
    (tmp_path / "a.py").write_text(long.replace("1", "7"))
    assert source.identity() != before


def test_folder_reads_text_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.txt").write_bytes("first\r\ntext é".encode())
    write_jsonl(tmp_path / "two.jsonl", [{"text": text} for text in ("second", "  \n", "second", "a\ud800b")])
    (tmp_path / "notes.md").write_text("not read")
    found = [(document.path, document.text) for document in TextFolder(tmp_path).documents()]
    assert found == [("sub/one.txt", "first\ntext é"), ("two.jsonl:1", "second"), ("two.jsonl:4", "a?b")]
    assert [document.path for document in TextFolder(tmp_path, max_documents=2).documents()] == [
        path for path, _ in found[:2]
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        (b'{"text": "a"}\n{"body": "b"}\n', "no string under the key `text`"),
        (b'{"text": "caf\xe9"}\n', "not UTF-8"),
        (b"\n", "holds no text"),
    ],
)
def test_folder_with_bad_content(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=expected) as caught:
        list(TextFolder(tmp_path).documents())
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"source": "folder"}, "data.dataset is missing"),
        ({"source": "folder", "dataset": "{tmp}/absent"}, "data.dataset is not a folder"),
        ({"source": "folder", "dataset": "{tmp}"}, "data.dataset holds no .txt, .jsonl file"),
        ({"source": "openwebtext", "dataset": "{tmp}/absent"}, "data.dataset is not a folder"),
        ({"source": "openwebtext", "dataset": "{tmp}"}, "data.dataset holds no .parquet"),
    ],
)
def test_missing_corpus_names_key_path_and_fix(tmp_path: Path, config: dict[str, str], expected: str) -> None:
    filled = {key: value.format(tmp=tmp_path) for key, value in config.items()}
    with pytest.raises(UserError, match=expected) as caught:
        open_source(DataConfig(**filled))
    assert caught.value.fix
    if "dataset" in filled:
        assert filled["dataset"] in str(caught.value)


def test_hash_splits_have_their_shares_and_are_stable() -> None:
    documents = [Document.from_text(f"p{number}", f"text {number}") for number in range(20000)]
    source = HuggingFaceText("someone/something", "main")
    counts = {split: sum(source.split_of(document) == split for document in documents) for split in SPLITS}
    assert counts["train"] == pytest.approx(18980, abs=150)
    assert counts["validation"] == pytest.approx(1000, abs=150)
    assert 5 <= counts["test"] <= 45
    moved = Document.from_text("elsewhere", documents[7].text)
    assert source.split_of(moved) == source.split_of(documents[7])


def test_local_parquet_and_jsonl_give_the_same_documents(tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(50)] + ["document number 3"]
    write_jsonl(tmp_path / "json" / "rows.jsonl", [{"text": text, "extra": 1} for text in texts])
    (tmp_path / "parquet").mkdir()
    for part in range(2):
        table = pyarrow.table({"text": texts[part * 25 : part * 25 + 25 + part]})
        pyarrow.parquet.write_table(table, tmp_path / "parquet" / f"train-{part:05d}.parquet")
    found = {}
    for kind in ("json", "parquet"):
        source = open_source(DataConfig(source="openwebtext", dataset=str(tmp_path / kind)))
        found[kind] = [(document.path, document.text) for document in source.documents()]
        assert found[kind] == [(document.path, document.text) for document in source.documents()]
    assert found["json"] == found["parquet"]
    assert [text for _, text in found["json"]] == texts[:50]
    few = open_source(DataConfig(source="openwebtext", dataset=str(tmp_path / "json"), max_documents=5))
    assert len(list(few.documents())) == 5
    (tmp_path / "json" / "rows.jsonl").unlink()
    (tmp_path / "json" / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"data.dataset cannot be read") as caught:
        list(HuggingFaceText(str(tmp_path / "json"), None).documents())
    assert "\n" not in str(caught.value)


def test_openwebtext_asks_the_hub_for_a_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, **options: Any) -> list[dict[str, str]]:
        asked.append((name, options))
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = open_source(DataConfig(source="openwebtext")).documents()
    assert [document.text for document in found] == ["one", "two"]
    pinned = {"revision": corpus.OPENWEBTEXT_REVISION, "split": "train", "streaming": True}
    assert asked == [(corpus.OPENWEBTEXT, pinned)]
    assert len(corpus.OPENWEBTEXT_REVISION) == 40
    other = open_source(DataConfig(source="openwebtext", dataset="someone/text", revision="v1"))
    assert other.where == "someone/text@v1"
    assert other.identity() != open_source(DataConfig(source="openwebtext")).identity()
