"""Generate the offline tasks from the held-out split into a folder for lm-eval's ``include_path``.

The folder gets one JSONL per task, the task files and `utils.py` beside them, and ``tasks.json``, written
last, with the chance level of every metric. The held-out text and the seed decide the rows; chance levels,
and the rows of `edgc_syntax`, whose pairs have as many tokens each, also depend on the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.data.folder import check_whole, load_info, texts
from experiments.evaluation.tasks import continuation, syntax
from experiments.evaluation.tasks.text import CONTEXT_CHARACTERS, Row, Text, context_before

HERE = Path(__file__).parent
MANIFEST = "tasks.json"
LASTWORD, CLOZE = 200, 200  # documents; the standard error of the cloze accuracy is then 2 to 3 %
CHOICES, CHOICE_TEXTS = 10, 15  # words of the cloze task, and in how many texts a word must occur
PER_TEXT = 16  # documents of one task from one text, at most, so that no long text dominates
WORD_SHARE = 0.02  # largest share of one target word: what "always the most frequent word" scores
PAGES, PAGE_BYTES = 40, 2048
WORD = re.compile(r"(?<=\S) ([A-Za-z]{2,})(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class Task:
    """One offline task: its rows, and what a uniform guesser scores on them, by metric name."""

    rows: Callable[[list[Text], int, Tokenizer], list[Row]]
    chance: Callable[[list[Row], Tokenizer], dict[str, float]]
    note: str
    constant: Callable[[list[Row]], dict[str, float]] = lambda rows: {}  # what the best single answer scores
    # Accuracies of what the task must not reward, by name.
    controls: Callable[[list[Row], list[Text], Tokenizer], dict[str, float]] | None = None
    suffix: str = ""  # made only where texts have this ending


def level(chance: float, *metrics: str) -> Callable[[list[Row], Tokenizer], dict[str, float]]:
    """The same chance for every document."""
    return lambda rows, _: dict.fromkeys(metrics, chance)


def words_in_context(texts: list[Text], seed: str, words: Container[str] | None = None) -> list[Row]:
    """Words that follow one space, with the text before them, shuffled; 4 * ``PER_TEXT`` a text at most."""
    rows: list[Row] = []
    for path, text in texts:
        spans = [match.span(1) for match in WORD.finditer(text) if words is None or match.group(1) in words]
        for start, end in random.Random(f"{seed}:{path}").sample(spans, min(4 * PER_TEXT, len(spans))):
            context = context_before(text, start - 1)
            if len(context) >= CONTEXT_CHARACTERS // 4:
                rows.append({"id": f"{path}:{start}", "path": path, "context": context, "word": text[start:end]})
    random.Random(seed).shuffle(rows)
    return rows


def pick(candidates: list[Row], count: int, per_word: int) -> list[Row]:
    """The first ``count`` with at most ``per_word`` of a word and ``PER_TEXT`` of a text, ordered by id."""
    words: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    rows: list[Row] = []
    for row in candidates:
        if len(rows) < count and words[row["word"]] < per_word and paths[row["path"]] < PER_TEXT:
            words[row["word"]] += 1
            paths[row["path"]] += 1
            rows.append(row)
    return sorted(rows, key=lambda row: str(row["id"]))


def lastword_rows(texts: list[Text], seed: int, _tokenizer: Tokenizer) -> list[Row]:
    """Any words, each at most ``WORD_SHARE`` of the documents."""
    candidates = words_in_context(texts, f"{seed}:lastword")
    return pick(candidates, LASTWORD, max(1, int(WORD_SHARE * min(LASTWORD, len(candidates)))))


def lastword_chance(rows: list[Row], tokenizer: Tokenizer) -> dict[str, float]:
    """A target of k tokens is hit with probability V^-k and has perplexity V^k."""
    lengths = [len(tokenizer.encode(" " + row["word"]).ids) for row in rows]
    size = tokenizer.get_vocab_size()
    return {
        "acc": sum(size**-length for length in lengths) / len(lengths),
        "perplexity": math.exp(math.log(size) * sum(lengths) / len(lengths)),
    }


def lastword_constant(rows: list[Row]) -> dict[str, float]:
    """Accuracy of the most frequent target given always."""
    return {"acc": Counter(row["word"] for row in rows).most_common(1)[0][1] / len(rows)}


def word_at_end(text: str) -> str:
    return text[len(text.rstrip(string.ascii_letters)) :]


def cloze_rows(texts: list[Text], seed: int, _tokenizer: Tokenizer) -> list[Row]:
    """The ``CHOICES`` words that occur most often, in enough texts; each is right equally often.

    Never after one of them: an untrained model repeats the last word it read, which is hardly ever right, and
    would score below chance (measured: never right in an eighth of the documents).
    """
    counts: Counter[str] = Counter()
    spread: Counter[str] = Counter()
    for _, text in texts:
        words = Counter(WORD.findall(text))
        counts.update(words)
        spread.update(words.keys())
    common = sorted(counts, key=lambda word: (-counts[word], word))
    choices = [word for word in common if spread[word] >= min(CHOICE_TEXTS, len(texts))][:CHOICES]
    if len(choices) < CHOICES:
        return []
    candidates = words_in_context(texts, f"{seed}:cloze", choices)
    after_others = [row for row in candidates if word_at_end(row["context"]) not in choices]
    rows = pick(after_others, CLOZE, CLOZE // CHOICES)
    fewest = min(Counter(row["word"] for row in rows).get(word, 0) for word in choices)
    balanced = []
    used: Counter[str] = Counter()
    for row in rows:
        used[row["word"]] += 1
        if used[row["word"]] <= fewest:
            balanced.append(row | {"words": choices, "answer": choices.index(row["word"])})
    return balanced


def rolling_rows(texts: list[Text], seed: int, _tokenizer: Tokenizer) -> list[Row]:
    """The first whole lines of ``PAGES`` texts drawn at random, at most ``PAGE_BYTES`` of each."""
    drawn = random.Random(f"{seed}:rolling").sample(texts, min(PAGES, len(texts)))
    rows = []
    for path, text in sorted(drawn):
        head = text.encode("utf-8")[:PAGE_BYTES].decode("utf-8", errors="ignore")
        page = head if len(head) == len(text) else head[: head.rfind("\n") + 1] or head
        if page.strip():
            rows.append({"id": path, "page": page})
    return rows


def rolling_chance(rows: list[Row], tokenizer: Tokenizer) -> dict[str, float]:
    """Every token costs log V nats."""
    pages = [row["page"] for row in rows]
    nats = math.log(tokenizer.get_vocab_size()) * sum(len(tokenizer.encode(page).ids) for page in pages)
    size = sum(len(page.encode("utf-8")) for page in pages)
    words = sum(len(re.findall(r"\S+", page)) for page in pages)
    return {
        "bits_per_byte": nats / size / math.log(2),
        "byte_perplexity": math.exp(nats / size),
        "word_perplexity": math.exp(nats / words),
    }


TASKS = {
    "edgc_cloze": Task(cloze_rows, level(1 / CHOICES, "acc"), "which of ten frequent words comes next"),
    "edgc_continuation": Task(
        continuation.continuation_rows,
        level(1 / continuation.CHOICES, "acc_mutual_info", "acc"),
        "continuation choice, HellaSwag-like",
    ),
    "edgc_lastword": Task(lastword_rows, lastword_chance, "last-word prediction, LAMBADA-like", lastword_constant),
    "edgc_rolling": Task(rolling_rows, rolling_chance, "rolling perplexity of held-out pages"),
    "edgc_syntax": Task(
        syntax.syntax_rows,
        level(1 / 2, "acc"),
        "minimal pairs of a statement and its broken twin, BLiMP-like",
        controls=syntax.controls,
        suffix=".py",
    ),
}


def make(held_out: Iterable[Text], tokenizer: Tokenizer, out: Path, *, seed: int, fingerprint: str | None) -> Row:
    """Write all tasks to ``out``; the manifest. ``UserError``, and nothing written, where one gets no document."""
    ordered = sorted(held_out)
    files: dict[str, str] = {"utils.py": (HERE / "utils.py").read_text(encoding="utf-8")}
    python = ".".join(platform.python_version_tuple()[:2])  # whose grammar says what is broken
    manifest: Row = {"format": 2, "seed": seed, "data_fingerprint": fingerprint, "python": python}
    manifest |= {"tasks": {}, "left_out": {}}
    for name, task in TASKS.items():
        if not any(path.endswith(task.suffix) for path, _ in ordered):
            manifest["left_out"][name] = f"no held-out text ends with {task.suffix}"
            continue
        rows = task.rows(ordered, seed, tokenizer)
        if not rows:
            raise UserError(f"task {name} gets no document from {len(ordered)} held-out texts", fix="give more text")
        lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        files[f"{name}.jsonl"] = lines
        files[f"{name}.yaml"] = (HERE / f"{name}.yaml").read_text(encoding="utf-8")
        manifest["tasks"][name] = {
            "note": task.note,
            "documents": len(rows),
            "sha256": hashlib.sha256(lines.encode()).hexdigest(),
            "chance": task.chance(rows, tokenizer),
            "best_constant": task.constant(rows),
        }
        if task.controls is not None:
            manifest["tasks"][name]["controls"] = task.controls(rows, ordered, tokenizer)
    for name in manifest["left_out"]:  # of an earlier time, with other texts
        (out / f"{name}.yaml").unlink(missing_ok=True)
    for file, content in files.items():
        atomic_write(out / file, content)
    atomic_write(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


@main_guard
def main(
    data: Annotated[Path, typer.Option(help="prepared data")],
    out: Annotated[Path, typer.Option(help="folder of the tasks")],
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
) -> None:
    """Generate the offline tasks."""
    info, path = load_info(data), data / "tokenizer.json"
    check_whole(data, info, (path.name, "documents.jsonl"))
    held_out = [(document.path, document.text) for document in texts(data, "test")]
    manifest = make(held_out, Tokenizer.from_file(str(path)), out, seed=seed, fingerprint=info.fingerprint)
    for name, task in manifest["tasks"].items():
        chance = ", ".join(f"{metric} {value:.4g}" for metric, value in task["chance"].items())
        print(f"{name}: {task['documents']} documents; chance: {chance}")
    for name, reason in manifest["left_out"].items():
        print(f"{name}: left out, {reason}")


if __name__ == "__main__":
    typer.run(main)
