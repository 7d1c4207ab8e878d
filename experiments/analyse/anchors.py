"""What EDGC would have asked for had warm-up ended elsewhere: its controller, fed with a run's recorded entropies.

Every rank of a run hangs on one number, the entropy at the end of warm-up, so a study has to say what another end
would have given. The entropies are of the gradients before compression; that the ranks in use leave them as they are is
assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgc.config import EDGCConfig
from edgc.control.controller import make_controller
from edgc.control.policies.cqm import CQMConfig
from edgc.measurement.report import Report
from experiments.analyse.acting import decisions_acting
from experiments.analyse.runs import Run, as_float
from experiments.analyse.tables import identity
from experiments.spec.settings import layer_matrices

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Of a run, at which warm-up may end; the paper's is 0.1."""
DECISION = ("iteration", "phase", "ranks", "r_min", "r_max", "target")


def anchors(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row per run of policy ``cqm``, kind of parameters and end of warm-up (stage 0).

    ``parameters``: what the entropy is of (:attr:`edgc.sections.EntropyConfig.parameters`). ``target_low`` and
    ``target_high``: the ranks asked for, before limits. The rest as in :mod:`experiments.analyse.acting`.
    """
    for run in runs:
        if not (isinstance(run.edgc, CQMConfig) and run.ok and run.config["parallel"].get("tensor", 1) == 1):
            continue
        if not run.decisions or run.decisions[-1].get("r_max") is None:
            continue
        for parameters, shapes in matrices(run).items():
            windows = [(int(event["iteration"]), *entropy(event, parameters)) for event in run.decisions]
            for share in SHARES:
                if round(share * run.iterations, 6) >= windows[0][0]:
                    about = identity(run) | {"parameters": parameters, "warm_up_share": share}
                    yield about | replay(run, shapes, windows, share)


def matrices(run: Run) -> dict[str, list[tuple[int, int]]]:
    """Shapes of the matrices of the first stage: its ``layers``, and ``all`` with its embeddings."""
    model, stages = run.config["model"], int(run.config["parallel"].get("pipeline", 1))
    width = int(model["hidden"])
    layers = list(layer_matrices(width, model.get("ffn_hidden"))) * (int(model["layers"]) // stages)
    words = int((run.config.get("data") or {}).get("vocab_size") or 0)
    return {"layers": layers, "all": [*layers, (words, width), (int(model["sequence_length"]), width)]}


def entropy(event: Mapping[str, Any], parameters: str) -> tuple[float, float]:
    """Entropy of stage 0 in the window that a decision ended, in nats, and its standard error."""
    keys = ("entropy_layers", "entropy_embeddings", "embedding_share", "entropy_error")
    layers, embeddings, share, error = (as_float((event.get(key) or [None])[0]) for key in keys)
    return layers if parameters == "layers" else (1 - share) * layers + share * embeddings, error


def replay(
    run: Run, shapes: list[tuple[int, int]], windows: Sequence[tuple[int, float, float]], share: float
) -> dict[str, Any]:
    """The ranks of one controller whose warm-up ends at ``share`` of the run."""
    limits = {key: run.decisions[-1][key] for key in ("r_min", "r_max")}  # which may have been searched
    ends = {"warmup_fraction": share, "warmup_limit_fraction": share, "stability_tolerance": 1e9}
    config = EDGCConfig.from_dict(EDGCConfig.usable(run.edgc.to_dict() | ends | limits | {"alignment": "off"}))
    controller = make_controller(config, [shapes], run.iterations)
    reports = [(at, Report((value,), entropy_error=(error,), loss=math.nan)) for at, value, error in windows]
    answers = [decision for at, report in reports if (decision := controller.observe(at, report)) is not None]
    decisions = [{name: getattr(decision, name) for name in DECISION} for decision in answers]
    targets = [decision["target"] for decision in decisions if decision["target"] is not None]
    active = [decision for decision in decisions if decision["phase"] == "active"]
    return {
        "warm_up_ended": active[0]["iteration"] if active else math.nan,
        "target_low": min(targets, default=math.nan),
        "target_high": max(targets, default=math.nan),
        **decisions_acting(decisions, config.window, run.iterations),
        "ranks_stage0": ">".join(str(decision["ranks"][0]) for decision in active),
    }
