"""The zero-shot table from lm-eval's results: every run, task and metric, failed runs included."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.evaluation_inputs import Model, Row, TaskFile
from experiments.run_folder import atomic_write

BASELINE = "none"  # compression.method of the uncompressed runs
RUN_COLUMNS = ("study", "run", "variant", "label", "seed", "status")
SCORE_COLUMNS = (
    "value",
    "stderr",
    "n",
    "chance",
    "best_constant",
    "baseline",
    "difference",
    "difference_stderr",
)
COLUMNS = (*RUN_COLUMNS, "task", "version", "metric", "higher_is_better", *SCORE_COLUMNS)


def influence(metric: str, samples: Sequence[Row], value: float) -> list[float] | None:
    """Each document's share in a metric's deviation from its expectation (delta method, ours).

    Needed because lm-eval gives no standard error for weighted perplexities, and none for the difference of
    two models on the same documents. With losses l_i and weights w_i (bytes, words, or 1), R = sum(l_i) /
    sum(w_i): the share in R is (l_i - R w_i) / sum(w_i); bits per byte are R / log 2, a perplexity is
    exp(R), an accuracy is the mean of 0 and 1. None for other metrics and for fewer than two documents.
    """
    if len(samples) < 2:
        return None
    if metric in ("acc", "acc_norm"):
        return [(float(row[metric]) - value) / len(samples) for row in samples]
    scale = {"bits_per_byte": 1 / math.log(2)}.get(metric, value)
    if metric == "perplexity":
        pairs = [(-float(row[metric]), 1.0) for row in samples]
    elif metric in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        pairs = [(-float(row[metric][0]), float(row[metric][1])) for row in samples]
    else:
        return None
    weight = math.fsum(w for _, w in pairs)
    rate = math.fsum(loss for loss, _ in pairs) / weight
    return [scale * (loss - rate * w) / weight for loss, w in pairs]


def spread(shares: Sequence[float]) -> float:
    """Standard error from the documents' shares: sqrt(n / (n - 1) * sum of squares)."""
    n = len(shares)
    return math.sqrt(n / (n - 1) * math.fsum(share * share for share in shares))


def scores(folder: Path, task: TaskFile) -> tuple[Row, dict[str, list[float] | None]]:
    """(value, stderr and n by metric; influence by metric) of one finished evaluation.

    The value is lm-eval's; so is the standard error where lm-eval gives one.
    """
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    with (folder / "samples.jsonl").open(encoding="utf-8") as handle:
        samples = sorted((json.loads(line) for line in handle), key=lambda row: row["doc_id"])
    found, shares = results["results"][task.name], {}
    row: Row = {}
    for metric in task.metrics:
        value, stderr = found[f"{metric},none"], found.get(f"{metric}_stderr,none")
        shares[metric] = influence(metric, samples, value)
        if not isinstance(stderr, float):  # lm-eval writes "N/A"
            own = shares[metric]
            stderr = spread(own) if own else None
        row[metric] = {"value": value, "stderr": stderr, "n": results["n-samples"][task.name]["effective"]}
    return row, shares


def table(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path) -> list[Row]:
    """One row per run, task and metric; runs without a model keep their rows, with status and no values.

    ``difference`` is to the uncompressed run of the same study and seed; its standard error is paired over
    documents.
    """
    baselines = {(m.info["study"], m.info["seed"]): m for m in models if m.info["method"] == BASELINE}
    done = {
        (m.name, t.name): scores(out / m.name / t.name, t) for m in models for t in tasks if m.info["model"]
    }
    rows: list[Row] = []
    for model in models:
        baseline = baselines.get((model.info["study"], model.info["seed"]))
        for task in tasks:
            for metric, higher in task.metrics.items():
                row: Row = {key: model.info[key] for key in RUN_COLUMNS}
                row |= {
                    "task": task.name,
                    "version": task.version,
                    "metric": metric,
                    "higher_is_better": higher,
                }
                row |= {key: task.reference.get(key, {}).get(metric) for key in ("chance", "best_constant")}
                row["baseline"] = baseline.name if baseline else None
                ours, theirs = done.get((model.name, task.name)), done.get((row["baseline"], task.name))
                if ours:
                    row |= ours[0][metric]
                if ours and theirs:
                    row["difference"] = ours[0][metric]["value"] - theirs[0][metric]["value"]
                    pair = (ours[1][metric], theirs[1][metric])
                    if pair[0] and pair[1]:
                        row["difference_stderr"] = spread(
                            [a - b for a, b in zip(pair[0], pair[1], strict=True)]
                        )
                rows.append(row)
    return rows


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Numbers are written in full, so that two runs on one machine give the same bytes."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, buffer.getvalue())


def timings(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path) -> list[Row]:
    """Seconds that each evaluation took when it was made."""
    return [
        {
            "run": model.name,
            "task": task.name,
            "seconds": json.loads(path.read_text(encoding="utf-8"))["seconds"],
        }
        for model in models
        for task in tasks
        if model.info["model"] and (path := out / model.name / task.name / "inputs.json").is_file()
    ]
