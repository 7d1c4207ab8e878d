"""A run that is interrupted, and whose last checkpoints are torn, ends as if that had never been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pandas as pd
import pytest
import yaml

from edgc.checkpoints import manifest
from experiments.common.source import training_code
from tests.integration.launching import (
    ENDS_WITHIN_SECONDS,
    INTERVAL,
    ITERATIONS,
    Launcher,
    group_of,
    launcher,
    outcome,
    prepared,
    run_of,
    runs,
    wait_for_steps,
)

__all__ = ["launcher", "prepared"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.mark.costly
def test_an_interrupted_run_ends_as_if_it_had_never_been(launcher: Launcher) -> None:
    quiet, killed = launcher.finish(run_of("quiet", checkpoint_interval=0)), run_of("killed")
    folder = launcher.path(killed)
    checkpoints = folder / ".checkpoints"

    # Ctrl-C in an iteration, with two checkpoints behind it.
    process = launcher.start(killed, new_session=True)
    wait_for_steps(folder, 2 * INTERVAL + 2)
    members = group_of(process.pid)
    assert len(members) >= 4, "the launcher, its fork server, two ranks"
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    while left := [pid for pid in members if runs(pid)]:
        assert time.monotonic() - begun < ENDS_WITHIN_SECONDS, f"left: {left}"
        time.sleep(0.05)
    assert process.returncode == 130
    behind = max(checkpoints.glob("iter_*"))
    lines = [line for line in stderr.splitlines() if not line.startswith("iteration ")]
    assert lines == [f"interrupted: launch/killed-s1; the next launch goes on from {behind.name}"], stderr
    manifest.check(behind, manifest.read(behind))
    assert sorted(path.name for path in folder.iterdir()) == [".checkpoints"], "nothing else is kept"

    # Other settings are refused, and nothing is lost by that; but not of a run that starts anew.
    short = run_of("killed", iterations=6)
    line = launcher.refusal(short)
    assert line.startswith(f"error: train.iterations = 6, but the run's checkpoint has {ITERATIONS} (in ")
    assert "--fresh" in line and [path.name for path in folder.iterdir()] == [".checkpoints"]
    fresh = run_of("fresh", iterations=6)
    shutil.copytree(folder, launcher.path(fresh))
    code, stderr = launcher.run(fresh, "--fresh")
    assert code == 0, stderr
    assert json.loads((launcher.path(fresh) / "summary.json").read_text())["iterations"] == 6
    assert "resumed_at" not in yaml.safe_load((launcher.path(fresh) / "run.yaml").read_text())["provenance"]

    # What a kill in the middle of writing one leaves is no checkpoint: its manifest is not there.
    partial = checkpoints / f".iter_{ITERATIONS:07d}.partial"
    shutil.copytree(behind, partial, ignore=shutil.ignore_patterns(manifest.NAME))

    # The newest is damaged, so the one before it is used.
    older, newest = sorted(checkpoints.glob("iter_*"))
    (newest / ".metadata").write_bytes((newest / ".metadata").read_bytes()[:-1])
    code, stderr = launcher.run(killed)
    assert code == 0, stderr
    assert "Warning" not in stderr, "what torch says of Megatron's checkpoints is nothing to the user"
    reports = [line for line in stderr.splitlines() if "is damaged (file .metadata has " in line]
    assert len(reports) == 1 and reports[0].endswith(f"going on from {older.name}"), stderr

    expected, found = outcome(quiet), outcome(folder)
    for table in ("tensors", "spectra"):
        pd.testing.assert_frame_equal(found.pop(table), expected.pop(table), check_exact=True)
    assert found == expected
    ranks = [stage["rank"] for event in found["events"] if event["event"] == "step" for stage in event["stages"]]
    assert {4, 8} & {*ranks}, "nothing was compressed"
    record = yaml.safe_load((folder / "run.yaml").read_text())
    assert record["provenance"]["resumed_at"][-1] == int(older.name[5:])
    assert record["provenance"]["code"] == training_code()
    assert not checkpoints.exists(), "a run that has ended keeps no state to go on from"
