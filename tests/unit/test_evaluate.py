"""Zero-shot evaluation, offline and end to end with lm-eval, on random-weight models and generated tasks."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from edgc.errors import UserError
from experiments.data.tokenizer import train_bpe
from experiments.evaluation import evaluate
from experiments.evaluation.tasks import continuation, make, syntax
from experiments.evaluation.tasks.text import CONTEXT_CHARACTERS

VOCABULARY, LENGTH = 300, 64
FREQUENT = ("the", "and", "self", "is", "in", "not", "to", "of", "for", "none", "or", "as")


def module(draw: random.Random, words: list[str]) -> str:
    """Python of random names and numbers."""
    lines = []
    for _ in range(12):
        a, b, c, d = draw.sample(words, 4)
        n = draw.randint(1, 99)
        lines += [
            f"from {a} import {b}",
            f"def {c}({a}, {b}={n}):",
            f"    if {a} not in {b}[{n}]:",
            f"        return {a}.{d}({b}, {n})",
            f"    for {d} in range({n}):",
            f"        {c}({d} + {n})",
            f"    {b} = {a}({d})[{n}] + {c}({a}, ({n}, {d}))",
            f"    return {b} if {a} else [{c}, {d}]",
        ]
    return "\n".join(lines) + "\n"


def corpus(count: int = 24) -> list[tuple[str, str]]:
    """Texts of random words, frequent and rare, in lines; and Python modules."""
    draw = random.Random(1)
    rare = ["".join(draw.choices("abcdefghij", k=draw.randint(3, 7))) for _ in range(80)]
    texts = []
    for index in range(count):
        words = [draw.choice(FREQUENT if draw.random() < 0.5 else rare) for _ in range(300)]
        lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        texts.append((f"text{index:02d}.txt", "\n".join(lines) + "\n"))
    return texts + [(f"module{index:02d}.py", module(draw, rare)) for index in range(count // 2)]


def run_json(name: str, **values: Any) -> dict[str, Any]:
    variant, _, seed = name.rpartition("-s")
    common = {"study": "methods", "run": name, "variant": variant, "label": variant, "seed": int(seed)}
    method = {"none": "none"}.get(variant, "edgc")
    return common | {"scale": "ci", "method": method, "status": "ok", "model": True} | values


def save_model(folder: Path, tokenizer: Path, seed: int, **shape: Any) -> None:
    """An exported GPT-2 of random weights; the run is called like the folder."""
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), bos_token=end, eos_token=end, pad_token="[PAD]")
    shape |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(seed)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(fast), **shape)).save_pretrained(folder)
    fast.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps(run_json(folder.name)))


class Place:
    """A folder of exported models and tasks, and the evaluator's command line on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tasks, self.out = root / "tasks", root / "zero_shot"
        # Two models; one of them again under another name; and a run that diverged.
        self.names = ["none-s1", "edgc_cqm-s1", "twin-s1", "edgc_released-s1"]

    def evaluate(self, *options: str, models: list[str] | None = None, out: Path | None = None) -> None:
        folders = [str(self.root / "models" / name) for name in models or self.names]
        target = ["--tasks-dir", str(self.tasks), "--out", str(out or self.out)]
        evaluate.app([*folders, *target, *options], standalone_mode=False)

    def table(self) -> list[dict[str, str]]:
        with (self.out / "table.csv").open(newline="") as handle:
            return list(csv.DictReader(handle))

    def row(self, run: str, task: str, metric: str) -> dict[str, str]:
        (row,) = [r for r in self.table() if (r["run"], r["task"], r["metric"]) == (run, task, metric)]
        return row


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe((text for _, text in corpus()), VOCABULARY).save(path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Place:
    """Random models and a run that diverged, evaluated once on all tasks."""
    found = Place(tmp_path_factory.mktemp("place"))
    for seed, name in enumerate(found.names[:2]):
        save_model(found.root / "models" / name, tokenizer, seed, n_positions=LENGTH)
    twin, diverged = (found.root / "models" / name for name in found.names[2:])
    shutil.copytree(found.root / "models" / "none-s1", twin)
    (twin / "run.json").write_text(json.dumps(run_json(twin.name)))
    diverged.mkdir()
    (diverged / "run.json").write_text(json.dumps(run_json(diverged.name, status="diverged", model=False)))
    with pytest.MonkeyPatch.context() as patch:  # fewer documents, which take less time
        for changed, name, count in (
            (make, "LASTWORD", 60),
            (make, "CLOZE", 60),
            (make, "PAGES", 10),
            (continuation, "DOCUMENTS", 60),
            (syntax, "DOCUMENTS", 80),
        ):
            patch.setattr(changed, name, count)
        make.make(corpus(), Tokenizer.from_file(str(tokenizer)), found.tasks, seed=0, fingerprint="f")
    # Later evaluations are made in one process, and have to come out the same.
    found.evaluate("--processes", "2")
    return found


def log_likelihood(model: GPT2LMHeadModel, tokens: list[int]) -> float:
    """Sum over all tokens of their log-probability in nats, each predicted once.

    Tokens are predicted in windows of the model's length after one end-of-text token; the last window is moved
    back so that it is full, and counts its new tokens only.
    """
    stream, total = [0, *tokens], 0.0
    for start in range(0, len(tokens), LENGTH):
        stop = min(start + LENGTH, len(tokens))
        first = max(0, stop - LENGTH)
        with torch.no_grad():
            logits = model(torch.tensor([stream[first:stop]])).logits[0]
        scores = torch.log_softmax(logits.double(), dim=-1)
        total += sum(float(scores[at - first, tokens[at]]) for at in range(start, stop))
    return total


def test_rolling_perplexity_is_the_models_log_likelihood(place: Place, tokenizer: Path) -> None:
    run = "edgc_cqm-s1"
    model = GPT2LMHeadModel.from_pretrained(place.root / "models" / run).eval()
    pages = [json.loads(line)["page"] for line in (place.tasks / "edgc_rolling.jsonl").read_text().splitlines()]
    encode = Tokenizer.from_file(str(tokenizer)).encode
    assert max(len(encode(page).ids) for page in pages) > 3 * LENGTH
    total = sum(log_likelihood(model, encode(page).ids) for page in pages)
    size, words = sum(len(page.encode()) for page in pages), sum(len(page.split()) for page in pages)
    expected = {
        "bits_per_byte": -total / size / math.log(2),
        "byte_perplexity": math.exp(-total / size),
        "word_perplexity": math.exp(-total / words),
    }
    for metric, value in expected.items():
        assert float(place.row(run, "edgc_rolling", metric)["value"]) == pytest.approx(value, rel=1e-5)


def test_random_models_score_at_chance_on_every_task(place: Place) -> None:
    tasks = set()
    left_out = [row for row in place.table() if row["run"] == "edgc_released-s1"]
    assert {(row["status"], row["value"], row["difference"]) for row in left_out} == {("diverged", "", "")}
    assert len(left_out) == 9
    for run in ("none-s1", "edgc_cqm-s1"):
        for row in (row for row in place.table() if row["run"] == run):
            tasks.add(row["task"])
            value, chance = float(row["value"]), float(row["chance"])
            if row["metric"].startswith("acc"):
                right = round(value * int(row["documents"]))
                assert stats.binomtest(right, int(row["documents"]), chance).pvalue > 0.001, row
            elif row["metric"] == "bits_per_byte":
                assert value == pytest.approx(chance, rel=0.01), row
            else:
                assert math.log(value) == pytest.approx(math.log(chance), rel=0.01), row
    assert tasks == set(make.TASKS)
    for task in tasks:  # lm-eval's own results are kept beside the table
        folder = place.out / "edgc_cqm-s1" / task
        results = json.loads((folder / "results.json").read_text())
        assert results["config"]["bootstrap_iters"] == 1000
        (version,) = re.findall(r"^  version: ([\d.]+)$", (make.HERE / f"{task}.yaml").read_text(), re.MULTILINE)
        assert results["versions"] == {task: float(version)}
        samples = (folder / "samples.jsonl").read_text().splitlines()
        assert len(samples) == results["n-samples"][task]["effective"]


def test_a_model_against_itself_has_no_difference(place: Place) -> None:
    rows = [row for row in place.table() if row["run"] == "twin-s1"]
    assert len(rows) == 9
    for row in rows:
        assert row["baseline"] == "none-s1"
        assert row["value"] == place.row("none-s1", row["task"], row["metric"])["value"]
        assert float(row["difference"]) == float(row["gap"]) == 0.0
        assert float(row["p_value"]) == 1.0
        assert row["verdict"] in ("on par", "not decided")
        assert float(row["gap_low"]) <= 0 <= float(row["gap_high"])
    assert {row["verdict"] for row in rows if "perplexity" in row["metric"]} == {"on par"}


def test_the_summary_has_a_verdict_for_every_variant_task_and_metric(place: Place) -> None:
    with (place.out / "summary.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert Counter(row["variant"] for row in rows) == dict.fromkeys(("edgc_cqm", "twin", "edgc_released"), 9)
    for row in rows:
        if row["variant"] == "edgc_released":
            assert (row["n_seeds"], row["verdict"], row["difference"]) == ("0", "", "")
            continue
        one = place.row(f"{row['variant']}-s1", row["task"], row["metric"])
        assert row["n_seeds"] == "1" and row["difference_low"] == ""
        for column in ("difference", "gap", "gap_low", "gap_high", "test", "p_value", "margin"):
            assert row[column] == one[column], column
        # One seed shows no equality.
        assert row["verdict"] == (one["verdict"] if one["verdict"] != "on par" else "not decided")
    primary = {row["task"]: row["metric"] for row in rows if row["primary"] == "True"}
    assert primary["edgc_rolling"] == "bits_per_byte"
    assert primary["edgc_continuation"] == "acc_mutual_info"
    assert len(primary) == 5


@pytest.mark.slow
def test_the_command_typed_by_hand_gives_the_same_numbers(place: Place, tmp_path: Path) -> None:
    """As docs/evaluation.md says it, in a process that knows nothing of the project."""
    tasks = ("edgc_cloze", "edgc_rolling")
    options = {"model": "hf", "model_args": f"pretrained={place.root / 'models' / 'edgc_cqm-s1'}"}
    options |= {"include_path": place.tasks, "tasks": ",".join(tasks), "output_path": tmp_path / "out"}
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        *(word for key, value in options.items() for word in (f"--{key}", value)),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | evaluate.OFFLINE
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, timeout=600, check=True)
    (written,) = (tmp_path / "out").rglob("results_*.json")
    for task in tasks:
        theirs = json.loads(written.read_text())["results"][task]
        ours = json.loads((place.out / "edgc_cqm-s1" / task / "results.json").read_text())["results"][task]
        numbers = {key: value for key, value in ours.items() if isinstance(value, float)}
        assert numbers and numbers == {key: theirs[key] for key in numbers}
        rows = [row for row in place.table() if (row["run"], row["task"]) == ("edgc_cqm-s1", task)]
        assert rows and all(float(row["value"]) == theirs[f"{row['metric']},none"] for row in rows)


def test_only_changed_inputs_are_evaluated_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = (place.out / "table.csv").read_bytes()
    place.evaluate()
    assert "0 evaluations done, 15 taken from earlier ones" in capsys.readouterr().out
    assert (place.out / "table.csv").read_bytes() == before
    file = place.tasks / "edgc_rolling.jsonl"
    content = file.read_text()
    try:
        file.write_text("".join(content.splitlines(keepends=True)[:-1]))
        place.evaluate()
        said = capsys.readouterr()
        assert "3 evaluations done, 12 taken from earlier ones" in said.out
        assert f"twin-s1 edgc_rolling: {len(content.splitlines()) - 1} samples" in said.err
        row = place.row("none-s1", "edgc_rolling", "bits_per_byte")
        assert int(row["documents"]) == len(content.splitlines()) - 1
    finally:
        file.write_text(content)
    place.evaluate()
    assert (place.out / "table.csv").read_bytes() == before


def twins(models: Path) -> None:
    (models / "twin-s1" / "run.json").write_bytes((models / "none-s1" / "run.json").read_bytes())


def shrink(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": VOCABULARY - 1}))


BAD = {
    "zero documents": (lambda at: (at / "tasks/edgc_cloze.jsonl").write_text("\n"), "edgc_cloze has zero documents"),
    "no tasks": (lambda at: shutil.rmtree(at / "tasks"), "no tasks"),
    "no model": (lambda at: shutil.rmtree(at / "models/none-s1"), "no exported model"),
    "torn export": (lambda at: (at / "models/none-s1/model.safetensors").unlink(), "has no model.safetensors"),
    "tokenizer": (lambda at: shrink(at / "models/none-s1/config.json"), "has 300 tokens, the model 299"),
    "no model key": (lambda at: (at / "models/none-s1/run.json").write_text('{"run": "a"}'), "run.json is cut short"),
    "list": (lambda at: (at / "models/none-s1/run.json").write_text("[]"), "run.json is cut short or altered"),
    "twins": (lambda at: twins(at / "models"), "two models are called none-s1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_overwrites_nothing(
    case: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = BAD[case]
    shutil.copytree(place.root, tmp_path / "copy")
    copy = Place(tmp_path / "copy")
    spoil(copy.root)
    before = {path: path.read_bytes() for path in copy.out.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        copy.evaluate()
    assert stop.value.code == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error
    assert {path: path.read_bytes() for path in copy.out.rglob("*") if path.is_file()} == before


def test_tasks_are_deterministic_and_balanced(tmp_path: Path, tokenizer: Path) -> None:
    loaded = Tokenizer.from_file(str(tokenizer))
    texts = corpus()
    for name, order in (("one", texts), ("two", texts[::-1])):
        make.make(order, loaded, tmp_path / name, seed=4, fingerprint="f")
    with pytest.raises(UserError, match="gets no document from 1 held-out texts"):
        make.make([("a", "word " * 4)], loaded, tmp_path / "out", seed=0, fingerprint=None)
    assert not (tmp_path / "out").exists(), "refused before anything is written"
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 12
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    cloze = [json.loads(line) for line in (tmp_path / "one" / "edgc_cloze.jsonl").read_text().splitlines()]
    counts = Counter(row["word"] for row in cloze)
    assert len(counts) == 10
    assert len(set(counts.values())) == 1
    by_path = dict(texts)
    for row in cloze:
        path, start = row["id"].split(":")
        assert row["words"][row["answer"]] == row["word"]
        assert not any(re.search(rf"(?<![a-zA-Z]){word}$", row["context"]) for word in row["words"])
        assert by_path[path][: int(start)].endswith(row["context"] + " ")
        assert by_path[path][int(start) :].startswith(row["word"])
        assert len(row["context"]) <= CONTEXT_CHARACTERS
    lastword = (tmp_path / "one" / "edgc_lastword.jsonl").read_text().splitlines()
    most = Counter(json.loads(line)["word"] for line in lastword).most_common(1)[0][1]
    assert most <= max(1, make.WORD_SHARE * len(lastword))
