"""Prepared data of random words, for tests that need a data folder and care little what is in it."""

from __future__ import annotations

import random
from pathlib import Path

from experiments.data.folder import prepare
from experiments.spec.settings import DataConfig

VOCABULARY = 300  # Megatron pads it to 384, and with two tensor ranks to 512


def prepare_words(root: Path) -> Path:
    """The folder ``root/words``, with a tokenizer of ``VOCABULARY`` tokens."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    (root / "text").mkdir()
    for index in range(60):
        text = " ".join(draw.choices(words, k=60))
        (root / "text" / f"{index}.txt").write_text(text + "\n", encoding="utf-8")
    config = DataConfig(source="folder", dataset=str(root / "text"), vocab_size=VOCABULARY)
    assert prepare(config, root / "words", show=False).vocab_size == VOCABULARY
    return root / "words"
