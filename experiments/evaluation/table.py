"""The zero-shot tables from lm-eval's results: every run, task and metric, and the means over seeds.

Runs without a model keep their rows. The statistics are :mod:`experiments.evaluation.statistics`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.equivalence import LEAST_SEEDS, NOT_DECIDED, ON_PAR, Equivalence, Scale
from experiments.evaluation.inputs import Model, Row, Task
from experiments.evaluation.statistics import Gap, beats, gap, influence, judge, pooled, seed_interval, spread

HIGHER = "higher_is_better"
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


@dataclass(frozen=True)
class Score:
    """One metric of one run on one task; ``shares`` by :func:`~experiments.evaluation.statistics.influence`."""

    value: float
    stderr: float | None
    documents: int
    shares: list[float] | None


class Results:
    """Finished evaluations of ``models`` on ``tasks``, below the folder ``out``, judged by ``rule``."""

    def __init__(self, models: Sequence[Model], tasks: Sequence[Task], out: Path, rule: Equivalence) -> None:
        self.models, self.tasks, self.out, self.rule = models, tasks, out, rule
        self.evaluated = [(model, task) for model in models for task in tasks if model.info["model"]]
        # By run, task and metric.
        self.scores = {
            (model.name, task.name, metric): score
            for model, task in self.evaluated
            for metric, score in read_scores(out / model.name / task.name, task).items()
        }
        keys = {model.name: (model.info["study"], model.info["seed"]) for model in models}
        twins = {keys[model.name]: model for model in models if model.info["method"] == BASELINE}
        # The uncompressed run of the same study and seed, by the name of each run that has one.
        self.baselines = {name: twins[key] for name, key in keys.items() if key in twins}

    def metrics(self) -> Iterator[tuple[Task, str, Row]]:
        """Task, metric and their columns."""
        for task in self.tasks:
            for metric, higher in task.metrics.items():
                yield task, metric, {"task": task.name, "version": task.version, "metric": metric, HIGHER: higher}

    def gap(self, metric: str, ours: Score, theirs: Score) -> Gap | None:
        """Gap on the scale of the metric's margin; None where lm-eval's samples do not tell it."""
        if ours.shares is None or theirs.shares is None:
            return None
        scale: Scale = self.rule.margins[metric].scale if metric in self.rule.margins else "difference"
        return gap(metric, scale, (ours.value, ours.shares), (theirs.value, theirs.shares))

    def table(self) -> list[Row]:
        """One row per run, task and metric; runs without a model keep their rows, with status and no values.

        ``difference`` is to the uncompressed run of the same study and seed; its standard error is paired over
        documents. The uncompressed run itself gets a difference of 0 and no verdict.
        """
        rows: list[Row] = []
        for model, (task, metric, columns) in itertools.product(self.models, self.metrics()):
            baseline = self.baselines.get(model.name)
            ours = self.scores.get((model.name, task.name, metric))
            theirs = self.scores.get((baseline.name, task.name, metric)) if baseline else None
            row: Row = {key: model.info[key] for key in RUN_COLUMNS} | columns
            row |= {key: task.reference.get(key, {}).get(metric) for key in ("chance", "best_constant")}
            row["baseline"] = baseline.name if baseline else None
            if ours:
                row |= {"value": ours.value, "stderr": ours.stderr, "documents": ours.documents}
                row["above_chance"] = above_chance(ours, task, metric)
            if ours and theirs:
                row["difference"] = ours.value - theirs.value
                if difference := self.gap(metric, ours, theirs):
                    pairs = zip(ours.shares or (), theirs.shares or (), strict=True)
                    row["difference_stderr"] = spread([a - b for a, b in pairs])
                    row |= judge(difference, self.rule)
                if baseline is model:
                    row["verdict"] = None
            rows.append(row)
        return rows

    def summary(self) -> list[Row]:
        """One row per variant, task and metric over the seeds that have both models; the uncompressed has none.

        ``difference_low`` and ``difference_high`` are the 95 % t interval over seeds, from two seeds on. The test
        and the verdict are over documents, on each document's mean over seeds; they say nothing about other seeds, and
        fewer than three make no verdict of equality.
        """
        variants: dict[tuple[str, str], list[Model]] = {}
        for model in self.models:
            if self.baselines.get(model.name) is not model:
                variants.setdefault((model.info["study"], model.info["variant"]), []).append(model)
        rows: list[Row] = []
        for runs, (task, metric, columns) in itertools.product(variants.values(), self.metrics()):
            pairs = [(run, self.baselines[run.name]) for run in runs if run.name in self.baselines]
            both = [
                (self.scores[run.name, task.name, metric], self.scores[twin.name, task.name, metric])
                for run, twin in pairs
                if run.info["model"] and twin.info["model"]
            ]
            row: Row = {key: runs[0].info[key] for key in ("study", "variant", "label")} | columns
            row |= {"primary": metric == next(iter(task.metrics)), "n_seeds": len(both)}
            rows.append(row | self.over_seeds(both, task, metric) if both else row)
        return rows

    def over_seeds(self, both: Sequence[tuple[Score, Score]], task: Task, metric: str) -> Row:
        """Columns of :meth:`summary` from (compressed, uncompressed) of each seed."""
        differences = [ours.value - theirs.value for ours, theirs in both]
        low, high = seed_interval(differences)
        beyond = [above_chance(theirs, task, metric) for _, theirs in both]
        row: Row = {
            "n_documents": both[0][0].documents,
            "value": math.fsum(ours.value for ours, _ in both) / len(both),
            "baseline_value": math.fsum(theirs.value for _, theirs in both) / len(both),
            "above_chance": None if None in beyond else all(beyond),
            "difference": math.fsum(differences) / len(both),
            "difference_low": low,
            "difference_high": high,
        }
        gaps = [difference for ours, theirs in both if (difference := self.gap(metric, ours, theirs))]
        if len(gaps) == len(both):
            row |= judge(pooled(gaps), self.rule, len(gaps))
            if row["verdict"] == ON_PAR and len(both) < LEAST_SEEDS:
                row["verdict"] = NOT_DECIDED
        return row

    def timings(self) -> list[Row]:
        """Seconds that each evaluation took when it was made."""
        places = [(model.name, task.name, self.out / model.name / task.name) for model, task in self.evaluated]
        return [
            {"run": run, "task": task, "seconds": json.loads((place / "inputs.json").read_text())["seconds"]}
            for run, task, place in places
        ]


def read_scores(folder: Path, task: Task) -> dict[str, Score]:
    """Scores by metric of one finished evaluation; values and, where it has some, standard errors are lm-eval's."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    with (folder / "samples.jsonl").open(encoding="utf-8") as handle:
        samples = sorted((json.loads(line) for line in handle), key=lambda row: row["doc_id"])
    numbers, documents = results["results"][task.name], results["n-samples"][task.name]["effective"]
    scores = {}
    for metric in task.metrics:
        value, stderr = numbers[f"{metric},none"], numbers.get(f"{metric}_stderr,none")
        shares = influence(metric, samples, value)
        if not isinstance(stderr, float):  # lm-eval writes "N/A"
            stderr = spread(shares) if shares else None
        scores[metric] = Score(value, stderr, documents, shares)
    return scores


def above_chance(score: Score, task: Task, metric: str) -> bool | None:
    """Tell if a score is beyond chance and beyond the best constant answer, by its 95 % interval."""
    levels = [task.reference.get(key, {}).get(metric) for key in ("chance", "best_constant")]
    return beats(score.value, score.stderr, levels, task.metrics[metric])
