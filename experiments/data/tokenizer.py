"""Text to token ids: a byte-level BPE trained on the train split, or GPT-2's own BPE.

Token ids of the trained BPE: ``<|endoftext|>`` 0, ``[CLS]`` 1, ``[SEP]`` 2, ``[MASK]`` 3, ``[PAD]`` 4, then the 256
bytes and the merges. GPT-2's BPE keeps its ids (``<|endoftext|>`` 50256) and gets the other four appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgc.errors import UserError
from experiments.common.files import atomic_write
from experiments.data.corpus import Document

END_OF_TEXT, MASK, PAD = "<|endoftext|>", "[MASK]", "[PAD]"
SPECIAL_TOKENS = (END_OF_TEXT, "[CLS]", "[SEP]", MASK, PAD)
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256
GPT2, GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"
CHUNK = 2000  # documents that are tokenised at once: some 10 MB of web text


class TextTokenizer:
    """A `tokenizers` tokenizer that ends documents with ``<|endoftext|>``.

    Special tokens spelled out in a text are encoded as ordinary text: a corpus that mentions
    ``<|endoftext|>`` or ``[MASK]`` must not produce a document boundary or a masked position.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        if missing := [token for token, number in ids.items() if number is None]:
            raise UserError(f"the tokenizer has no token {missing[0]}", fix="prepare the data again")
        self.special_tokens = {token: int(number) for token, number in ids.items() if number is not None}
        self.end_of_text = self.special_tokens[END_OF_TEXT]
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, ended by ``<|endoftext|>``; in threads of `tokenizers`."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*encoding.ids, self.end_of_text] for encoding in encodings]

    def to_json(self) -> str:
        return str(self._tokenizer.to_str(pretty=True))

    def save(self, path: Path) -> None:
        atomic_write(path, self.to_json())


def encode_documents(
    documents: Iterable[Document], tokenizer: TextTokenizer, dtype: np.dtype | type
) -> Iterator[tuple[Document, np.ndarray]]:
    """Documents with their token ids (1-D arrays), in order; never more than ``CHUNK`` documents in memory."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, CHUNK)):
        rows = tokenizer.encode([document.text for document in chunk])
        yield from zip(chunk, (np.asarray(ids, dtype) for ids in rows), strict=True)


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (as GPT-2's, with our special tokens first); deterministic for the same texts.

    Raises:
        UserError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    if vocab_size < MIN_VOCABULARY:
        fix = f"use at least {MIN_VOCABULARY} (256 bytes and {len(SPECIAL_TOKENS)} special tokens)"
        raise UserError(f"data.vocab_size = {vocab_size} is too small for a byte-level BPE", fix=fix)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer)


def load_gpt2() -> TextTokenizer:
    """GPT-2's BPE (50 257 tokens) with our special tokens appended, from the Hugging Face hub or its local cache.

    Raises:
        UserError: it cannot be had.
    """
    try:
        tokenizer = Tokenizer.from_pretrained(GPT2, revision=GPT2_REVISION)
    except Exception as error:  # `tokenizers` raises bare Exception, the hub a family of its own
        line = (str(error).strip().splitlines() or ["no message"])[0]
        fix = "check the network, or put it into the hub's cache (HF_HOME) where there is one"
        message = f"data.tokenizer = gpt2 cannot be loaded: {type(error).__name__}: {line[:160]}"
        raise UserError(message, where=GPT2, fix=fix) from error
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None])
    return TextTokenizer(tokenizer)
