"""Functions that the task files call: reading rows that lie beside this file, and perplexities.

This file is copied beside the generated JSONL, where lm-eval loads it by path, so it imports nothing of
the project.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def load_jsonl(file: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The rows of a JSONL file beside this one as split ``test``.

    Read without the `datasets` cache, which may answer with the rows of an older file of the same size.
    """
    lines = (HERE / file).read_text(encoding="utf-8").split("\n")
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines if line])}


def rolling_results(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood in nats, weight) of one document for lm-eval's weighted perplexities.

    Words are runs of non-space characters; bytes are UTF-8.
    """
    (log_likelihood,) = results
    words, size = len(re.findall(r"\S+", doc["page"])), len(doc["page"].encode("utf-8"))
    return {
        "bits_per_byte": (log_likelihood, size),
        "byte_perplexity": (log_likelihood, size),
        "word_perplexity": (log_likelihood, words),
    }


def lastword_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Score: 1 where the word is the greedy answer, else 0; and (log-likelihood in nats, 1) for its perplexity.

    With a weight, because lm-eval's own `perplexity` gets its standard error from a bootstrap, whose size the
    command line cannot set.
    """
    ((log_likelihood, is_greedy),) = results
    return {"acc": float(is_greedy), "perplexity": (log_likelihood, 1)}
