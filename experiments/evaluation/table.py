"""The zero-shot tables from lm-eval's results: every run, task and metric, and the means over seeds.

Runs without a model keep their rows. The statistics are :mod:`experiments.evaluation.statistics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.common.equivalence import LEAST_SEEDS, NOT_DECIDED, ON_PAR, Equivalence, Scale
from experiments.evaluation.inputs import Model, Row, TaskFile
from experiments.evaluation.statistics import (
    ACCURACIES,
    Gap,
    beats,
    gap,
    judge,
    pooled,
    seed_interval,
    spread,
)

Scores = tuple[dict[str, Row], dict[str, list[float] | None]]  # both by metric
BASELINE = "none"  # compression.method of the uncompressed runs
RUN_COLUMNS = ("study", "run", "variant", "label", "seed", "status")
SCORE_COLUMNS = (
    "value", "stderr", "documents", "chance", "best_constant", "above_chance", "baseline", "difference",
    "difference_stderr"
)  # fmt: skip
# Of the gap to the uncompressed run: on the margin's scale, with the interval of the equivalence test.
GAP_COLUMNS = (
    "gap", "gap_low", "gap_high", "gap_scale", "test", "p_value", "margin", "p_equivalence", "verdict"
)  # fmt: skip
COLUMNS = (*RUN_COLUMNS, "task", "version", "metric", "higher_is_better", *SCORE_COLUMNS, *GAP_COLUMNS)
SUMMARY_COLUMNS = (
    "study", "variant", "label", "task", "version", "metric", "primary", "higher_is_better", "n_seeds",
    "n_documents", "value", "baseline_value", "above_chance", "difference", "difference_low",
    "difference_high", *GAP_COLUMNS
)  # fmt: skip


def influence(metric: str, samples: Sequence[Row], value: float) -> list[float] | None:
    """Each document's share in a metric's deviation from its expectation (delta method, ours).

    Needed because lm-eval gives no standard error for weighted perplexities, and none for the difference of
    two models on the same documents. With losses l_i and weights w_i (bytes, words, or 1), R = sum(l_i) /
    sum(w_i): the share in R is (l_i - R w_i) / sum(w_i); bits per byte are R / log 2, a perplexity is
    exp(R), an accuracy is the mean of 0 and 1. None for other metrics and for fewer than two documents.
    """
    if len(samples) < 2:
        return None
    if metric in ACCURACIES:
        return [(float(row[metric]) - value) / len(samples) for row in samples]
    scale = {"bits_per_byte": 1 / math.log(2)}.get(metric, value)
    if metric not in ("bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity"):
        return None
    entries = [row[metric] if isinstance(row[metric], list | tuple) else (row[metric], 1.0) for row in samples]
    pairs = [(-float(log_likelihood), float(weight)) for log_likelihood, weight in entries]
    weight = math.fsum(w for _, w in pairs)
    rate = math.fsum(loss for loss, _ in pairs) / weight
    return [scale * (loss - rate * w) / weight for loss, w in pairs]


def scores(folder: Path, task: TaskFile) -> Scores:
    """(value, stderr and documents by metric; influence by metric) of one finished evaluation.

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
        row[metric] = {"value": value, "stderr": stderr, "documents": results["n-samples"][task.name]["effective"]}
    return row, shares


def baselines_of(models: Sequence[Model]) -> dict[str, Model]:
    """The uncompressed run of the same study and seed, by the name of each run that has one."""
    found = {(m.info["study"], m.info["seed"]): m for m in models if m.info["method"] == BASELINE}
    keys = {m.name: (m.info["study"], m.info["seed"]) for m in models}
    return {name: found[key] for name, key in keys.items() if key in found}


def finished(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path) -> dict[tuple[str, str], Scores]:
    """What :func:`scores` finds of every run that left a model, by run and task."""
    return {(m.name, t.name): scores(out / m.name / t.name, t) for m in models for t in tasks if m.info["model"]}


def gap_between(ours: Scores, theirs: Scores, metric: str, rule: Equivalence) -> Gap | None:
    """The gap on the scale of the metric's margin; None where lm-eval's samples do not tell it."""
    shares, other = ours[1][metric], theirs[1][metric]
    if shares is None or other is None:
        return None
    scale: Scale = rule.margins[metric].scale if metric in rule.margins else "difference"
    return gap(metric, scale, (ours[0][metric]["value"], shares), (theirs[0][metric]["value"], other))


def gap_row(found: Gap, rule: Equivalence, seeds: int = 1) -> Row:
    """The columns ``GAP_COLUMNS``."""
    finding, stated = judge(found, rule, seeds), rule.margins.get(found.metric)
    return {
        "gap": found.value,
        "gap_low": finding.low,
        "gap_high": finding.high,
        "gap_scale": stated.scale if stated else "difference",
        "test": finding.test,
        "p_value": finding.p_value,
        "margin": stated.margin if stated else None,
        "p_equivalence": finding.p_equivalence,
        "verdict": finding.verdict,
    }


def above_chance(score: Row, task: TaskFile, metric: str) -> bool | None:
    """Whether a score is beyond chance and beyond the best constant answer, by its 95 % interval."""
    levels = [task.reference.get(key, {}).get(metric) for key in ("chance", "best_constant")]
    return beats(score["value"], score["stderr"], levels, task.metrics[metric])


def table(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path, rule: Equivalence) -> list[Row]:
    """One row per run, task and metric; runs without a model keep their rows, with status and no values.

    ``difference`` is to the uncompressed run of the same study and seed; its standard error is paired over
    documents. The uncompressed run itself gets a difference of 0 and no verdict.
    """
    baselines, done = baselines_of(models), finished(models, tasks, out)
    rows: list[Row] = []
    for model in models:
        baseline = baselines.get(model.name)
        for task in tasks:
            ours = done.get((model.name, task.name))
            theirs = done.get((baseline.name, task.name)) if baseline else None
            for metric, higher in task.metrics.items():
                row: Row = {key: model.info[key] for key in RUN_COLUMNS}
                row |= {"task": task.name, "version": task.version, "metric": metric}
                row |= {key: task.reference.get(key, {}).get(metric) for key in ("chance", "best_constant")}
                row |= {"higher_is_better": higher, "baseline": baseline.name if baseline else None}
                if ours:
                    row |= ours[0][metric]
                    row["above_chance"] = above_chance(ours[0][metric], task, metric)
                if ours and theirs:
                    row["difference"] = ours[0][metric]["value"] - theirs[0][metric]["value"]
                    found = gap_between(ours, theirs, metric, rule)
                    if found is not None:
                        pair = zip(ours[1][metric] or (), theirs[1][metric] or (), strict=True)
                        row["difference_stderr"] = spread([a - b for a, b in pair])
                        row |= gap_row(found, rule)
                    if baseline is model:
                        row["verdict"] = None
                rows.append(row)
    return rows


def summary(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path, rule: Equivalence) -> list[Row]:
    """One row per variant, task and metric over the seeds that have both models; the uncompressed has none.

    ``difference_low`` and ``difference_high`` are the 95 % t interval over seeds, from two seeds on. The test
    and the verdict are over documents, on each document's mean over seeds; they say nothing about other seeds, and
    fewer than three make no verdict of equality.
    """
    baselines, done = baselines_of(models), finished(models, tasks, out)
    variants: dict[tuple[str, str], list[Model]] = {}
    for model in models:
        if baselines.get(model.name) is not model:
            variants.setdefault((model.info["study"], model.info["variant"]), []).append(model)
    rows: list[Row] = []
    for runs in variants.values():
        pairs = [(run, baselines[run.name]) for run in runs if run.info["model"] and run.name in baselines]
        pairs = [(run, twin) for run, twin in pairs if twin.info["model"]]
        for task in tasks:
            both = [(done[run.name, task.name], done[twin.name, task.name]) for run, twin in pairs]
            for index, (metric, higher) in enumerate(task.metrics.items()):
                row: Row = {key: runs[0].info[key] for key in ("study", "variant", "label")}
                row |= {"task": task.name, "version": task.version, "metric": metric, "primary": index == 0}
                row |= {"higher_is_better": higher, "n_seeds": len(both)}
                if both:
                    row |= over_seeds(both, task, metric, rule)
                rows.append(row)
    return rows


def over_seeds(both: Sequence[tuple[Scores, Scores]], task: TaskFile, metric: str, rule: Equivalence) -> Row:
    """The columns of :func:`summary` from (compressed, uncompressed) of each seed."""
    ours = [one[0][metric]["value"] for one, _ in both]
    theirs = [other[0][metric]["value"] for _, other in both]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    interval = seed_interval(differences) or (None, None)
    beyond = [above_chance(other[0][metric], task, metric) for _, other in both]
    row: Row = {
        "n_documents": both[0][0][0][metric]["documents"],
        "value": math.fsum(ours) / len(both),
        "baseline_value": math.fsum(theirs) / len(both),
        "above_chance": None if None in beyond else all(beyond),
        "difference": math.fsum(differences) / len(both),
        "difference_low": interval[0],
        "difference_high": interval[1],
    }
    gaps = [found for pair in both if (found := gap_between(*pair, metric, rule)) is not None]
    if len(gaps) == len(both):
        row |= gap_row(pooled(gaps), rule, len(gaps))
        if row["verdict"] == ON_PAR and len(both) < LEAST_SEEDS:
            row["verdict"] = NOT_DECIDED
    return row


def timings(models: Sequence[Model], tasks: Sequence[TaskFile], out: Path) -> list[Row]:
    """Seconds that each evaluation took when it was made."""
    return [
        {"run": model.name, "task": task.name, "seconds": json.loads(path.read_text(encoding="utf-8"))["seconds"]}
        for model in models
        for task in tasks
        if model.info["model"] and (path := out / model.name / task.name / "inputs.json").is_file()
    ]
