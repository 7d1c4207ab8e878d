"""Runs of one process: the losses, bytes and files of the same run by processes, refusals, and resumed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.training.outputs import read_events
from tests.integration.launching import Launcher, changed, launcher, prepared, repeatable, wait_for_steps

__all__ = ["launcher", "prepared"]  # fixtures

pytestmark = pytest.mark.slow

EDGC = {"method": "edgc", "policy": "cqm", "window": 3, "r_max": 8, "r_min": 2, "rank_multiple": 2}
EDGC |= {"warmup_fraction": 0.3, "warmup_limit_fraction": 0.3, "min_compression_elements": 64}
EDGC |= {"entropy": {"iteration_rate": 1.0}}


def replicas(variant: str, **sections: Any) -> dict[str, Any]:
    train = {"iterations": 12, "micro_batch": 1, "clip_grad": 0.5, **sections.pop("train", {})}
    return changed(variant=variant, parallel={"pipeline": 1, "data": 2}, train=train, **sections)


ALIKE: dict[str, dict[str, Any]] = {
    "edgc": {"compression": EDGC, "train": {"final": {"evaluations": 3, "every": 2, "batches": 3}}},
    "muon": {"train": {"optimizer": "muon", "matrix_lr": 0.02}},
}
DRIVERS = ("processes", "rehearsal")


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The folders of each run by either driver."""
    launcher = Launcher(prepared, tmp_path_factory.mktemp("configs"))
    pairs = [(name, driver) for name in ALIKE for driver in DRIVERS]
    folders = launcher.finish_all(
        *(replicas(f"{name}_{driver}", driver=driver, **ALIKE[name]) for name, driver in pairs)
    )
    return {name: folders[2 * at : 2 * at + 2] for at, name in enumerate(ALIKE)}


@pytest.mark.parametrize("name", ALIKE)
def test_two_replicas_train_alike_in_one_process_and_in_two(trained: dict[str, list[Path]], name: str) -> None:
    two, one = trained[name]
    assert repeatable(one) == repeatable(two), "bit for bit"
    stages = [[event["stages"] for event in read_events(folder / "metrics.jsonl", "step")] for folder in (one, two)]
    measured = ("rank", "entropy", "bytes", "worker_error", "mean_error", "error_feedback_ratio")
    for here, there in zip(*stages, strict=True):
        assert [here[0][key] for key in measured] == [there[0][key] for key in measured]
    assert (stages[0][-1][0]["rank"] is not None) == (name == "edgc"), "compressed at the end"
    starts = [read_events(folder / "metrics.jsonl", "start")[0] for folder in (one, two)]
    assert starts[0]["bytes_dense"] == starts[1]["bytes_dense"] and starts[0]["world"] == starts[1]["world"] == 2
    decisions = [read_events(folder / "metrics.jsonl", "decision") for folder in (one, two)]
    assert decisions[0] == decisions[1] and bool(decisions[0]) == (name == "edgc")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert summaries[0].keys() == summaries[1].keys()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("diloco", {"driver": "rehearsal", "strategy": {"name": "diloco", "every": 5}}),
        (
            "muon",
            {
                "train": {
                    "optimizer": "muon",
                    "matrix_lr": 0.02,
                    "final": {"evaluations": 6, "every": 3, "batches": 1},
                }
            },
        ),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_it_never_stopped(launcher: Launcher, name: str, sections: Any) -> None:
    train = {"iterations": 20, "checkpoint_interval": 3, **sections.get("train", {})}
    values = replicas(f"{name}_whole", **{**sections, "train": train})
    again = {**values, "variant": f"{name}_killed"}
    process = launcher.start(again)
    wait_for_steps(launcher.path(again), 8)
    process.kill()
    process.communicate()
    assert not (launcher.path(again) / "status").exists()
    whole, resumed = launcher.finish_all(values, again)
    assert repeatable(resumed) == repeatable(whole)
    record = yaml.safe_load((resumed / "run.yaml").read_text())
    assert record["provenance"]["resumed_at"][0] >= 6 and record.get("strategy", {}) == sections.get("strategy", {})
    sent = [event["bytes"] for event in read_events(whole / "metrics.jsonl", "step")]
    [start] = read_events(whole / "metrics.jsonl", "start")
    every = 5 if name == "diloco" else 1
    assert sent == [start["bytes_dense"] if step % every == 0 else 0 for step in range(1, 21)]


def test_what_only_the_built_replicas_tell_is_one_line(launcher: Launcher) -> None:
    """SparseLoCo sends in a format of its own."""
    sections = {"strategy": {"name": "sparseloco", "every": 4}, "compression": {"method": "bf16"}}
    values = replicas("refused", driver="rehearsal", **sections)
    code, stderr = launcher.run(values)
    [line] = stderr.splitlines()
    assert code == 2 and line.startswith("error: strategy sparseloco sends in a format of its own"), stderr
    assert not launcher.path(values).exists()
