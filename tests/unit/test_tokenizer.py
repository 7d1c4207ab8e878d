"""Byte-level BPE: exact round trips, fixed special tokens, repeatable training."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from edgc.errors import UserError
from experiments.data import tokenizer as module
from experiments.data.corpus import Document
from experiments.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, encode_documents, load_gpt2, train_bpe

TEXTS = [f"def function_{number}(value):\n    return value * {number}\n" for number in range(300)]
TRAINED = train_bpe(TEXTS, 400)
READER = Tokenizer.from_str(TRAINED.to_json())  # as programs of others read it


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@example("a <|endoftext|> b [MASK] c")
def test_any_text_survives_a_round_trip(text: str) -> None:
    (ids,) = TRAINED.encode([text])
    assert ids[-1] == TRAINED.end_of_text
    assert READER.decode(ids) == text
    assert not {TRAINED.special_tokens[token] for token in SPECIAL_TOKENS} & set(ids[:-1])


def test_special_tokens_come_first() -> None:
    assert TRAINED.special_tokens == {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    assert TRAINED.vocab_size == 400


def test_bad_tokenizers_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"data.vocab_size = 200 is too small.*use at least 261"):
        train_bpe(TEXTS, 200)
    with pytest.raises(UserError, match="has no token"):
        TextTokenizer(Tokenizer(models.BPE()))


def test_gpt2_keeps_its_ids_and_gets_our_special_tokens_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with GPT-2's layout: no special tokens but a last <|endoftext|>."""
    content = json.loads(TRAINED.to_json())
    order = sorted((number, token) for token, number in content["model"]["vocab"].items())
    plain = [token for _, token in order if token not in SPECIAL_TOKENS]
    content["model"]["vocab"] = {token: number for number, token in enumerate([*plain, "<|endoftext|>"])}
    content["added_tokens"] = []
    theirs = Tokenizer.from_str(json.dumps(content))
    answer: list[Tokenizer | OSError] = [theirs, OSError("no hub\nsecond line")]

    def from_pretrained(identifier: str, revision: str) -> Tokenizer:
        if isinstance(first := answer.pop(0), OSError):
            raise first
        return first

    monkeypatch.setattr(module, "Tokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    gpt2 = load_gpt2()
    assert [gpt2.special_tokens[token] for token in SPECIAL_TOKENS] == [395, 396, 397, 398, 399]
    assert gpt2.vocab_size == 400
    (ids,), (expected,) = gpt2.encode([TEXTS[5]]), TRAINED.encode([TEXTS[5]])
    assert ids == [*(number - len(SPECIAL_TOKENS) for number in expected[:-1]), 395]
    assert theirs.decode(ids) == TEXTS[5]
    with pytest.raises(UserError, match=r"data.tokenizer = gpt2 cannot be loaded: OSError: no hub \(") as caught:
        load_gpt2()
    assert "second line" not in str(caught.value)


def test_documents_are_encoded_in_order_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document.from_text(f"row-{number}", text) for number, text in enumerate(TEXTS[:95])]
    monkeypatch.setattr(module, "CHUNK", 10)
    pairs = list(encode_documents(iter(documents), TRAINED, np.uint16))
    assert [document for document, _ in pairs] == documents
    assert [ids.tolist() for _, ids in pairs] == TRAINED.encode(TEXTS[:95])
