"""What EDGC would have asked for had warm-up ended elsewhere, of kept runs."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from experiments.analyse import policies
from experiments.analyse.runs import Run, load_run
from experiments.verdicts import archive
from tests.unit.conftest import REFERENCE


@pytest.fixture(scope="module")
def one(kept_results: Path) -> Run:
    return load_run(kept_results / "workstation" / "policies_bert" / "cqm-s1")


def test_at_its_own_end_of_warm_up_a_run_has_its_own_ranks(tmp_path: Path) -> None:
    kept = REFERENCE / "workstation" / "policies_late"
    for name, content in archive.read(kept, "cqm-s1").items():
        (tmp_path / name).write_bytes(content)
    own = pd.read_csv(kept / "table.csv").set_index(["variant", "seed"])["ranks_stage0"]
    rows = [row for row in policies.anchors([load_run(tmp_path)]) if row["warm_up_share"] == 0.2]
    [found] = [row["ranks_stage0"] for row in rows if row["parameters"] == "layers"]
    assert found == own["cqm", 1]
    assert len(set(found.split(">"))) > 2, "a rank that stays would show nothing"


def test_another_end_gives_other_ranks(one: Run) -> None:
    rows = {row["warm_up_share"]: row for row in policies.anchors([one]) if row["parameters"] == "layers"}
    assert [row["warm_up_ended"] for row in rows.values()] == [round(1000 * share) for share in rows]
    assert len({row["ranks_stage0"].split(">")[-1] for row in rows.values()}) > 3
    # The entropy falls until a fifth of the run is over: an earlier end asks for lower ranks.
    assert rows[0.05]["target_low"] < rows[0.3]["target_low"]


def test_both_kinds_by_their_shares_and_the_first_stage_alone(one: Run) -> None:
    event = {"entropy_layers": [-6.0], "entropy_embeddings": [-4.0], "embedding_share": [0.25], "entropy_error": [0.1]}
    assert policies.entropy(event, "layers") == (-6.0, 0.1)
    assert policies.entropy(event, "all") == (pytest.approx(-5.5), 0.1)
    assert all(map(math.isnan, policies.entropy({}, "layers"))), "runs from before it was recorded"
    model = {"layers": 4, "hidden": 96, "sequence_length": 64}
    more = {"model": model, "parallel": {"tensor": 1, "pipeline": 2}, "data": {"vocab_size": 512}}
    shapes = policies.matrices(Run(Path("x"), "ok", one.config | more))
    assert len(shapes["layers"]) == 2 * 4 and shapes["layers"][:2] == [(288, 96), (96, 96)]
    assert shapes["all"][-2:] == [(512, 96), (64, 96)]


def test_other_policies_and_runs_that_failed_have_none(one: Run) -> None:
    other = Run(one.path, "ok", one.config | {"compression": one.compression | {"policy": "loss"}})
    assert not list(policies.anchors([other, Run(one.path, "failed", one.config)]))
