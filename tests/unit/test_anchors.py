"""What EDGC would have asked for had warm-up ended elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edgc.control.controller import make_controller
from edgc.control.policies.cqm import CQMConfig
from edgc.measurement.report import Report
from experiments.analyse.anchors import anchors, entropy, matrices
from experiments.analyse.runs import Run

COMPRESSION: dict[str, Any] = {
    "method": "edgc", "window": 10, "r_max": 48, "r_min": 8, "warmup_fraction": 0.1, "warmup_limit_fraction": 0.1,
    "stability_tolerance": 100.0,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "variant": "cqm",
    "seed": 1,
    "compression": COMPRESSION,
    "model": {"layers": 4, "hidden": 96, "sequence_length": 64},
    "parallel": {"tensor": 1, "pipeline": 2},
    "data": {"vocab_size": 512},
    "train": {"iterations": 200},
}
LAYERS = [-6.0, -6.1, -6.4, -6.5, -6.45, -6.6, -6.55, -6.6, -6.5, -6.4]
LAYERS += [-6.45, -6.3, -6.35, -6.3, -6.2, -6.25, -6.2, -6.1, -6.1, -6.0]
EMBEDDINGS, SHARE = [-5.0 + 0.05 * k for k in range(20)], 0.3


def run(**more: Any) -> Run:
    """One whose controller was told ``LAYERS``, window by window."""
    found = Run(Path("x"), "ok", {**CONFIG, **more})
    controller = make_controller(found.edgc, [matrices(found)["layers"]], 200)
    decisions = []
    for k, value in enumerate(LAYERS):
        made = controller.observe(10 * (k + 1), Report((value,), entropy_error=(0.01,), loss=5.0))
        assert made is not None
        event = {key: getattr(made, key) for key in ("iteration", "phase", "ranks", "r_min", "r_max", "target")}
        kinds = {"entropy_layers": [value], "entropy_embeddings": [EMBEDDINGS[k]], "embedding_share": [SHARE]}
        decisions.append({**event, **kinds, "entropy_error": [0.01]})
    found.events = {"decision": decisions}
    return found


def test_at_its_own_end_of_warm_up_a_run_has_its_own_ranks() -> None:
    one = run()
    rows = {(row["parameters"], row["warm_up_share"]): row for row in anchors([one])}
    own = ">".join(str(event["ranks"][0]) for event in one.decisions if event["phase"] == "active")
    assert rows["layers", 0.1]["ranks_stage0"] == own
    assert rows["layers", 0.1]["warm_up_ended"] == 20
    assert len(set(own.split(">"))) > 4, "a rank that stays would show nothing"


def test_another_end_gives_other_ranks() -> None:
    rows = {(row["parameters"], row["warm_up_share"]): row for row in anchors([run()])}
    early, late = rows["layers", 0.05], rows["layers", 0.3]
    assert early["warm_up_ended"] == 10 and late["warm_up_ended"] == 60
    assert early["target_low"] < 10 and early["acted"], "the entropy falls by 0.6 nats from there"
    assert late["target_low"] > 47.9 and not late["acted"], "and rises from there: the rank stays at r_max"
    # With the embeddings the entropy hardly falls.
    assert rows["all", 0.05]["target_low"] > early["target_low"]


def test_both_kinds_by_their_shares() -> None:
    event = {"entropy_layers": [-6.0], "entropy_embeddings": [-4.0], "embedding_share": [0.25], "entropy_error": [0.1]}
    assert entropy(event, "layers") == (-6.0, 0.1)
    assert entropy(event, "all") == (pytest.approx(-5.5), 0.1)
    assert all(map(math.isnan, entropy({}, "layers"))), "runs from before it was recorded"


def test_the_first_stage_alone_counts() -> None:
    shapes = matrices(run())
    assert len(shapes["layers"]) == 2 * 4 and shapes["layers"][:2] == [(288, 96), (96, 96)]
    assert shapes["all"][-2:] == [(512, 96), (64, 96)]


def test_other_policies_and_runs_that_failed_have_none() -> None:
    other = run()
    other.config["compression"] = {**COMPRESSION, "policy": "loss"}
    del other.__dict__["edgc"]
    assert not list(anchors([other]))
    failed = run()
    failed.status = "failed"
    assert not list(anchors([failed]))
    assert isinstance(run().edgc, CQMConfig)
