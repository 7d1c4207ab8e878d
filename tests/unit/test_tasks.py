"""The rows of the choice tasks: labels that are certain, and nothing that tells the answer without the task."""

from __future__ import annotations

import ast
import itertools
import json
import math
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from experiments.data.tokenizer import train_bpe
from experiments.evaluation.tasks import continuation, make, syntax
from experiments.evaluation.tasks.text import Row, Text
from tests.unit.test_evaluate import corpus

MODULES = [f"{name}.py" for name in ("ast", "bisect", "calendar", "cmd", "csv", "json/decoder", "queue", "textwrap")]


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Modules of the standard library: real statements."""
    root = Path(sysconfig.get_path("stdlib"))
    return [(name, (root / name).read_text(encoding="utf-8")) for name in MODULES]


@pytest.fixture(scope="module")
def tokenizer(texts: list[Text], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe((text for _, text in texts), 600).save(path)
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def pairs(texts: list[Text], tokenizer: Tokenizer) -> list[Row]:
    return syntax.syntax_rows(texts, 0, tokenizer)


def test_one_statement_of_a_pair_is_python_and_the_other_is_not(pairs: list[Row], texts: list[Text]) -> None:
    assert len(pairs) > 100
    assert set(Counter(row["kind"] for row in pairs)) == set(syntax.KINDS)
    sources = dict(texts)
    for row in pairs:
        right, wrong = row["choices"][row["answer"]], row["choices"][1 - row["answer"]]
        assert len(ast.parse(right).body) == 1
        with pytest.raises(SyntaxError):
            ast.parse(wrong)
        path, line = row["id"].rsplit(":", 1)
        first = sources[path].split("\n")[int(line) - 1]
        assert first.strip() == right.split("\n")[0].strip()
    assert len({row["correct"] for row in pairs}) == len(pairs)


def test_neither_length_nor_token_frequencies_tell_the_broken_statement(
    pairs: list[Row], texts: list[Text], tokenizer: Tokenizer
) -> None:
    counts: Counter[int] = Counter()
    for _, text in texts:
        counts.update(tokenizer.encode(text).ids)
    by_kind: dict[str, list[int]] = {}
    for row in pairs:
        assert Counter(row["correct"]) == Counter(row["broken"])
        right, wrong = (tokenizer.encode(row[key]).ids for key in ("correct", "broken"))
        assert len(right) == len(wrong) <= syntax.MOST_TOKENS
        repeated = [sum(x == y for x, y in itertools.pairwise(ids)) for ids in (right, wrong)]
        assert repeated[0] == repeated[1], "untrained models with tied embeddings prefer repeats"
        # Products of counts are whole numbers, so this comparison is exact.
        a, b = (math.prod(counts[token] + 1 for token in ids) for ids in (right, wrong))
        by_kind.setdefault(row["kind"], []).append((a > b) - (a < b))
    assert {kind: sum(signs) for kind, signs in by_kind.items()} == dict.fromkeys(syntax.KINDS, 0)
    assert abs(sum(1 - 2 * row["answer"] for row in pairs)) <= len(syntax.KINDS)
    assert syntax.controls(pairs, texts, tokenizer)["unigram"] == 0.5


def answers(pairs: list[Row], scores: Callable[[list[int]], float], tokenizer: Tokenizer) -> float:
    """Share of the pairs in which the statement scores higher than its broken version."""
    sides = [tuple(scores(tokenizer.encode(row[key]).ids) for key in ("correct", "broken")) for row in pairs]
    return sum(right > wrong for right, wrong in sides) / len(pairs)


def test_preferences_for_neighbours_answer_like_coins(pairs: list[Row], tokenizer: Tokenizer) -> None:
    """Scorers that know nothing but have a random liking for each two neighbours scatter as the interval says."""
    found = []
    for seed in range(300):
        liking = np.random.default_rng(seed).standard_normal((600, 601))

        def scores(ids: list[int], liking: np.ndarray = liking) -> float:
            return math.fsum(liking[min(two), max(two)] for two in itertools.pairwise([600, *ids]))

        found.append(answers(pairs, scores, tokenizer))
    binomial = 0.5 / math.sqrt(len(pairs))
    assert abs(np.mean(found) - 0.5) < 4 * binomial / math.sqrt(len(found))
    # Of 300 it is known within 4 %; without the bound on shared neighbours it is 1.31 times as large here.
    assert np.std(found) == pytest.approx(binomial, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("keywords", "from a import b", {"import a from b"}),
        ("brackets", "f(x[1])", {"f)x[1](", "f(x]1[)"}),
        ("neighbours", "x = 1", {"= x 1", "x 1 ="}),
        ("delimiters", "x = f(y)", {"x ( f=y)", "x ) f(y="}),
    ],
)
def test_kinds_of_breakage(kind: str, source: str, expected: set[str]) -> None:
    assert set(syntax.KINDS[kind](source)) == expected


def test_continuations_follow_their_contexts_and_distractors_come_from_other_texts(texts: list[Text]) -> None:
    rows = continuation.continuation_rows(texts, 3, None)
    assert len(rows) >= 80
    sources = dict(texts)
    for row in rows:
        path, start = row["id"].rsplit(":", 1)
        assert sources[path][: int(start)].endswith(row["context"])
        assert sources[path][int(start) :].startswith(row["choices"][row["answer"]])
        assert row["context"] == row["context"].rstrip()
        assert row["sources"][row["answer"]] == row["id"]
        origins = [source.rsplit(":", 1)[0] for source in row["sources"]]
        assert len(set(origins)) == len(set(row["choices"])) == continuation.CHOICES
        assert len({Path(origin).suffix for origin in origins}) == 1
        assert max(len(choice.encode()) for choice in row["choices"]) <= continuation.PASSAGE_BYTES


LINES = [(f"{k}.txt", "".join(f"line {k} {i} of some words\n" for i in range(60))) for k in range(5)]
UNREAD = continuation.continuation_rows(LINES, 0, None)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_preference_for_passages_without_the_context_is_right_once_in_four(seed: int) -> None:
    def preference(passage: str) -> int:
        return hash((seed, passage))

    right = sum(max(row["choices"], key=preference) == row["choices"][row["answer"]] for row in UNREAD)
    assert UNREAD
    assert right * continuation.CHOICES == len(UNREAD)
    assert Counter(row["answer"] for row in UNREAD) == dict.fromkeys(range(4), len(UNREAD) // 4)


def test_texts_without_python_have_no_syntax_task(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = [text for text in corpus() if text[0].endswith(".txt")]
    (tmp_path / "edgc_syntax.yaml").write_text("of an earlier time")
    make.make(words, tokenizer, tmp_path, seed=0, fingerprint=None)
    manifest = json.loads((tmp_path / "tasks.json").read_text())
    assert set(manifest["left_out"]) == {"edgc_syntax"}
    assert set(manifest["tasks"]) == set(make.TASKS) - {"edgc_syntax"}
    assert not (tmp_path / "edgc_syntax.yaml").exists()
