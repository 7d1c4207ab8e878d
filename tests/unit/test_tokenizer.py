"""Byte-level BPE: exact round trips, fixed special tokens, repeatable training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from edgc.errors import UserError
from experiments.data import tokenizer as module
from experiments.data.corpus import Document
from experiments.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, encode_documents, load, load_gpt2, train_bpe

TEXTS = [f"def function_{number}(value):\n    return value * {number}\n" for number in range(300)]
TRAINED = train_bpe(TEXTS, 400)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@example("a <|endoftext|> b [MASK] c")
def test_any_text_survives_a_round_trip(text: str) -> None:
    (ids,) = TRAINED.encode([text])
    assert ids[-1] == TRAINED.end_of_text
    assert TRAINED.decode(ids) == text
    assert not {TRAINED.special_tokens[token] for token in SPECIAL_TOKENS} & set(ids[:-1])


def test_special_tokens_come_first() -> None:
    assert TRAINED.special_tokens == {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    assert TRAINED.vocab_size == 400


def test_bad_tokenizers_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.vocab_size = 200 is too small.*use at least 261"):
        train_bpe(TEXTS, 200)
    with pytest.raises(UserError, match="tokenizer is missing"):
        load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer file"):
        load(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="has no token"):
        TextTokenizer(Tokenizer(models.BPE()))


def gpt2_files(folder: Path) -> None:
    """A stand-in with GPT-2's file layout: no special tokens but a last <|endoftext|>."""
    model = json.loads(TRAINED.to_json())["model"]
    order = sorted((number, token) for token, number in model["vocab"].items() if token not in SPECIAL_TOKENS)
    vocabulary = {token: number for number, (_, token) in enumerate(order)} | {"<|endoftext|>": len(order)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges + "\n")


def test_gpt2_from_local_files(tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    gpt2 = load_gpt2(tmp_path)
    assert gpt2.end_of_text == 395
    assert [gpt2.special_tokens[token] for token in SPECIAL_TOKENS[1:]] == [396, 397, 398, 399]
    assert gpt2.vocab_size == 400
    (ids,) = gpt2.encode([TEXTS[5]])
    (expected,) = TRAINED.encode([TEXTS[5]])
    assert ids[:-1] == [number - len(SPECIAL_TOKENS) for number in expected[:-1]]
    assert gpt2.decode(ids) == TEXTS[5]
    gpt2.save(tmp_path / "tokenizer.json")
    assert load_gpt2(tmp_path).encode([TEXTS[5]]) == [ids]
    assert load(tmp_path / "tokenizer.json").special_tokens == gpt2.special_tokens


def test_gpt2_without_files_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--tokenizer-files holds no GPT-2 tokenizer"):
        load_gpt2(tmp_path)

    def from_pretrained(identifier: str, revision: str) -> Tokenizer:
        raise OSError(f"cannot reach {identifier}\nsecond line")

    monkeypatch.setattr(module, "Tokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    with pytest.raises(UserError, match=r"data.tokenizer = gpt2 cannot be loaded") as caught:
        load_gpt2()
    assert "second line" not in str(caught.value)
    assert "--tokenizer-files" in str(caught.value)


DOCUMENTS = [Document.from_text(f"row-{number}", text) for number, text in enumerate(TEXTS[:95])]


def encoded(folder: Path | None, documents: list[Document] = DOCUMENTS) -> list[list[int]]:
    return [ids.tolist() for _, ids in encode_documents(iter(documents), TRAINED, np.uint16, folder, 10)]


def test_shards_hold_what_the_tokenizer_gives(tmp_path: Path) -> None:
    assert encoded(tmp_path) == encoded(None) == TRAINED.encode(TEXTS[:95])
    assert len(list(tmp_path.iterdir())) == 10
    assert [document for document, _ in encode_documents(DOCUMENTS, TRAINED, np.uint16, tmp_path, 10)] == DOCUMENTS


def flip(content: bytes, place: int | None = None) -> bytes:
    place = place or len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE: list[Callable[[bytes], bytes | None]] = [
    flip,
    lambda content: flip(content, content.find(b"PK\1\2") + 10),  # an unknown compression, in zip's directory
    lambda content: content[:-9],
    lambda _: None,
    lambda _: b"",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_only_missing_damaged_and_other_shards_are_made_again(
    tmp_path: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    encoded(tmp_path, DOCUMENTS[:90])
    path = tmp_path / "000003.npz"
    content = damage(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    inodes = {shard.name: shard.stat().st_ino for shard in tmp_path.iterdir()}
    documents = [*DOCUMENTS[:55], Document.from_text("row-55", "another text"), *DOCUMENTS[56:]]
    assert encoded(tmp_path, documents) == TRAINED.encode([document.text for document in documents])
    after = {shard.name: shard.stat().st_ino for shard in tmp_path.iterdir()}
    new = {name for name, inode in after.items() if inodes.get(name) != inode}
    assert new == {"000003.npz", "000005.npz", "000009.npz"}


def test_a_shard_whose_header_says_less_than_it_holds_is_made_again(tmp_path: Path) -> None:
    """NumPy reads as much as its header says; in a large shard that ends before zip compares the checksum."""
    documents = [Document.from_text("long", "".join(TEXTS) * 10)]
    expected = encoded(tmp_path, documents)
    path, length = tmp_path / "000000.npz", len(expected[0])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(%d,)" % length, b"(%d,)" % (length - 5000), 1))
    assert path.read_bytes() != content and len(path.read_bytes()) == len(content)
    assert encoded(tmp_path, documents) == expected
