"""Text to token ids: a byte-level BPE trained on the train split, or GPT-2's own BPE.

Token ids of the trained BPE: ``<|endoftext|>`` 0, ``[CLS]`` 1, ``[SEP]`` 2, ``[MASK]`` 3, ``[PAD]`` 4, then the 256
bytes and the merges. GPT-2's BPE keeps its ids (``<|endoftext|>`` 50256) and gets the other four appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgc.errors import UserError
from experiments.common.files import atomic_write

END_OF_TEXT = "<|endoftext|>"
MASK, PAD = "[MASK]", "[PAD]"
SPECIAL_TOKENS = (END_OF_TEXT, "[CLS]", "[SEP]", MASK, PAD)
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256
GPT2 = "openai-community/gpt2"
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


class TextTokenizer:
    """A `tokenizers` tokenizer that ends documents with ``<|endoftext|>``.

    Special tokens spelled out in a text are encoded as ordinary text: a corpus that mentions
    ``<|endoftext|>`` or ``[MASK]`` must not produce a document boundary or a masked position.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.special_tokens = {token: self._id(token) for token in SPECIAL_TOKENS}
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise UserError(f"the tokenizer has no token {token}", fix="prepare the data again")
        return int(number)

    @property
    def end_of_text(self) -> int:
        return self.special_tokens[END_OF_TEXT]

    def encode_documents(self, texts: Iterable[str], chunk: int = 256) -> Iterator[list[int]]:
        """Token ids of each text, ended by ``<|endoftext|>``; ``chunk`` texts at a time, in threads."""
        remaining = iter(texts)
        while batch := list(islice(remaining, chunk)):
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield [*encoding.ids, self.end_of_text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens are left out."""
        return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str(pretty=True))

    def save(self, path: Path) -> None:
        atomic_write(path, self.to_json())


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


def load(path: Path) -> TextTokenizer:
    """Read ``tokenizer.json``; ``UserError`` where it is missing or no tokenizer."""
    if not path.is_file():
        fix = "prepare the data: python -m experiments.data prepare"
        raise UserError("the tokenizer is missing", where=path, fix=fix)
    try:
        return TextTokenizer(Tokenizer.from_file(str(path)))
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise UserError(f"not a tokenizer file: {error}", where=path, fix="prepare the data again") from None


def load_gpt2(files: Path | None = None) -> TextTokenizer:
    """GPT-2's BPE (50 257 tokens) with our special tokens appended.

    Args:
        files: folder with ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``; None takes the Hugging
            Face hub or its local cache.

    Raises:
        UserError: the files are missing, or the hub cannot be reached.
    """
    try:
        tokenizer = _gpt2_from_files(files) if files else Tokenizer.from_pretrained(GPT2, revision=GPT2_REVISION)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception, the hub a family of its own
        lines = str(error).strip().splitlines() or ["no message"]
        fix = "check the network, or give the folder of GPT-2's tokenizer files with --tokenizer-files"
        message = f"data.tokenizer = gpt2 cannot be loaded: {type(error).__name__}: {lines[0][:160]}"
        raise UserError(message, where=files or GPT2, fix=fix) from error
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None])
    return TextTokenizer(tokenizer)


def _gpt2_from_files(folder: Path) -> Tokenizer:
    whole, vocabulary, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        return Tokenizer.from_file(str(whole))
    if not (vocabulary.is_file() and merges.is_file()):
        fix = "put tokenizer.json, or vocab.json and merges.txt, there"
        raise UserError("--tokenizer-files holds no GPT-2 tokenizer", where=folder, fix=fix)
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
