"""Minimal pairs in the manner of BLiMP: a Python statement, and the same with two of its parts exchanged.

Labels are certain: `ast.parse` accepts the one and refuses the other. Both have the same characters, so the
same bytes, the same number of tokens, and as many tokens that follow themselves. A unigram model (token
frequencies, no order) is right exactly as often as wrong in every kind of breakage: pairs are drawn so that
it is. No two tokens become or cease to be neighbours in more than ``SHARED`` pairs: an untrained model, which
prefers some neighbours to others for no reason, then answers like independent coins, not one way in many.
"""

from __future__ import annotations

import ast
import io
import itertools
import keyword
import math
import random
import textwrap
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

from experiments.evaluation.tasks.text import Row, Text

DOCUMENTS = 320
PER_TEXT = 40  # pairs of one text, at most
SHARED = 2  # pairs in which the same two tokens become or cease to be neighbours, at most
SHORTEST, LONGEST = 16, 100  # characters of a statement
MOST_TOKENS = 48  # of a statement, so that a model of 64 positions reads it whole
LINES = 2  # of a statement; compound ones are a header and a body of one line

Span = tuple[int, int]
Statement = tuple[str, int, str]  # path, line number, source


def parsed(source: str) -> ast.Module | None:
    """Syntax tree of ``source``; None if it is not Python of the running version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as "is" with a literal
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return None


def statements(text: str) -> list[tuple[int, str]]:
    """(line number, source without indentation) of the short statements of a module; [] if it is none."""
    tree, lines = parsed(text), text.split("\n")
    if tree is None:
        return []
    sources = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node.end_lineno is None or node.end_lineno - node.lineno >= LINES:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        # Not an elif, not one of two statements of a line, and no comment, whose words would stay in their order.
        if SHORTEST <= len(source) <= LONGEST and "#" not in source and parsed(source):
            sources[node.lineno] = source
    return sorted(sources.items())


def tokens(source: str) -> list[tuple[str, Span]]:
    """(text, place) of the tokens of a statement, without line ends and indentation."""
    starts = list(itertools.accumulate((len(line) + 1 for line in source.split("\n")), initial=0))
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    return [
        (token.string, (starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in kinds
    ]


def exchanged(source: str, first: Span, second: Span) -> str:
    """``source`` with two of its parts, in this order, in each other's place."""
    (a, b), (c, d) = first, second
    return source[:a] + source[c:d] + source[b:c] + source[a:b] + source[d:]


def keywords(source: str) -> Iterator[str]:
    """Two keywords exchanged: ``import a from b``."""
    words = [(text, span) for text, span in tokens(source) if keyword.iskeyword(text) and not text[0].isupper()]
    for (text, first), (other, second) in itertools.combinations(words, 2):
        if text != other:
            yield exchanged(source, first, second)


def brackets(source: str) -> Iterator[str]:
    """An opening bracket and the one that closes it exchanged: ``f)x(``."""
    opened: list[Span] = []
    for text, span in tokens(source):
        if text in ("(", "[", "{"):
            opened.append(span)
        elif text in (")", "]", "}") and opened:
            yield exchanged(source, opened.pop(), span)


def neighbours(source: str) -> Iterator[str]:
    """Two neighbouring tokens of a line exchanged: ``x 1 =``."""
    for (text, first), (other, second) in itertools.pairwise(tokens(source)):
        if text != other and "\n" not in source[first[1] : second[0]]:
            yield exchanged(source, first, second)


def delimiters(source: str) -> Iterator[str]:
    """Two different operators or brackets exchanged, other than a pair of brackets: ``x(f = y)``."""
    signs = [(text, span) for text, span in tokens(source) if not text[0].isalnum() and text[0] not in "\"'_"]
    for (text, first), (other, second) in itertools.combinations(signs, 2):
        if text != other and (text + other) not in ("()", "[]", "{}"):
            yield exchanged(source, first, second)


# The rarest first: a statement is used once, and later kinds fill up what an earlier one lacks.
KINDS: dict[str, Callable[[str], Iterator[str]]] = {
    function.__name__: function for function in (keywords, delimiters, brackets, neighbours)
}


class Unigram:
    """Token frequencies of the held-out texts themselves, so the best that frequencies alone can do."""

    def __init__(self, texts: list[Text], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.counts: Counter[int] = Counter()
        for _, text in texts:
            self.counts.update(self.ids(text))
        self.total = self.counts.total() + tokenizer.get_vocab_size()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def score(self, text: str) -> float:
        """Log-likelihood in nats, add-one smoothed; equal for the same tokens in any order."""
        return math.fsum(math.log((self.counts[token] + 1) / self.total) for token in self.ids(text))


def repeats(ids: list[int]) -> int:
    """Number of tokens that follow themselves; with tied embeddings untrained models prefer that."""
    return sum(token == following for token, following in itertools.pairwise(ids))


def neighbourhoods(ids: list[int]) -> Counter[tuple[int, int]]:
    """Number of times that two tokens are neighbours, in either order: tied embeddings make untrained models symmetric.

    The first token has -1, the start of the text, beside it.
    """
    return Counter((min(pair), max(pair)) for pair in itertools.pairwise([-1, *ids]))


class Pairs:
    """Statements chosen so far, of all kinds, and the number of times that each two tokens were changed by it."""

    def __init__(self, unigram: Unigram, draw: random.Random) -> None:
        self.unigram, self.draw = unigram, draw
        self.used: set[str] = set()
        self.shared: Counter[tuple[int, int]] = Counter()

    def broken(self, source: str, kind: str, room: Counter[int]) -> tuple[str, int] | None:
        """A version of ``source`` that may be chosen, at random, and its side; None if there is none.

        It does not parse, has as many tokens and repeats, and changes nothing that ``SHARED`` others change. The side
        says whether the unigram model is right (1), wrong (-1) or undecided (0), and has ``room``.
        """
        ids = self.unigram.ids(source)
        candidates = list(KINDS[kind](source)) if len(ids) <= MOST_TOKENS else []
        self.draw.shuffle(candidates)
        for candidate in candidates:
            other = self.unigram.ids(candidate)
            if len(other) != len(ids) or repeats(other) != repeats(ids) or parsed(candidate):
                continue
            gain = self.unigram.score(source) - self.unigram.score(candidate)
            pairs, other_pairs = neighbourhoods(ids), neighbourhoods(other)
            changed = {pair for pair in pairs | other_pairs if pairs[pair] != other_pairs[pair]}
            side = (gain > 0) - (gain < 0)
            if room[side] and all(self.shared[pair] < SHARED for pair in changed):
                self.used.add(source)
                self.shared.update(changed)
                return candidate, side
        return None

    def of_kind(self, kind: str, count: int, pool: list[Statement]) -> list[Row]:
        """At most ``count`` rows, the unigram model right in as many as wrong, or undecided."""
        sides: dict[int, list[Row]] = {1: [], -1: [], 0: []}
        room = Counter({1: count // 2, -1: count // 2, 0: count})
        for path, line, source in pool:
            if source not in self.used and (version := self.broken(source, kind, room)):
                row = {"id": f"{path}:{line}", "path": path, "kind": kind, "correct": source}
                sides[version[1]].append(row | {"broken": version[0]})
                room[version[1]] -= 1
        half = min(len(sides[1]), len(sides[-1]))
        return (sides[1][:half] + sides[-1][:half] + sides[0])[:count]


def syntax_rows(texts: list[Text], seed: int, tokenizer: Tokenizer) -> list[Row]:
    """At most ``DOCUMENTS`` rows; none without Python among the texts."""
    draw = random.Random(f"{seed}:syntax")
    pool: list[Statement] = []
    for path, text in texts:
        if path.endswith(".py"):
            sources = statements(text)
            pool += [(path, line, source) for line, source in draw.sample(sources, min(PER_TEXT, len(sources)))]
    pool = list({source: (path, line, source) for path, line, source in pool}.values())
    draw.shuffle(pool)
    chosen = Pairs(Unigram(texts, tokenizer), draw)
    rows: list[Row] = []
    for earlier, kind in enumerate(KINDS):
        count = (DOCUMENTS - len(rows)) // (len(KINDS) - earlier)
        for place, pair in enumerate(chosen.of_kind(kind, count, pool)):
            choices = [pair["correct"], pair["broken"]]
            rows.append(pair | {"choices": choices[:: 1 - 2 * (place % 2)], "answer": place % 2})
    return sorted(rows, key=lambda row: str(row["id"]))


def controls(rows: list[Row], texts: list[Text], tokenizer: Tokenizer) -> dict[str, float]:
    """Accuracies of what knows no syntax: token frequencies (half a point for a tie), always the first choice."""
    unigram = Unigram(texts, tokenizer)
    gains = [unigram.score(row["correct"]) - unigram.score(row["broken"]) for row in rows]
    return {
        "unigram": sum(0.5 if gain == 0 else float(gain > 0) for gain in gains) / len(rows),
        "first": sum(row["answer"] == 0 for row in rows) / len(rows),
    }
