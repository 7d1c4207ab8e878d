"""DDP and Megatron-Core on the device, two ranks that share it, against the same training on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import adapters
from tests.gpu.adapters import DDP, GATHERED, MEGATRON_RUNS, MEGATRON_STEPS, POISONED, RESUMED, STEPS, TIMED
from tests.workers import run_workers

# One group: what all tests share takes long to make, and `make gpu` runs six processes.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("adapters")]

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
LIMIT = 480.0
SILENT = ("-X", "faulthandler", "-W", "ignore")  # but for what it dies of
Ranks = list[dict[str, Any]]
PARTS = list(adapters.PARTS)
# Of the losses, relative: rounding of factors or of gradients may fall to the other side on another device.
CLOSE = {"none": 1e-4, "bf16": 2e-3}
ROUNDED = 0.05


def launched(folder: Path, environment: dict[str, str]) -> Ranks:
    """The results of all ranks; what they wrote to stderr where one failed."""
    folder.mkdir()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            command = [sys.executable, *SILENT, "-m", "tests.gpu.adapters"]
            command += [str(folder), str(rank), str(WORLD), json.dumps(PARTS)]
            errors = stack.enter_context((folder / f"{rank}.err").open("w"))
            options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": errors, "cwd": ROOT}
            ranks.append(subprocess.Popen(command, env={**variables, **environment}, **options))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        for process in ranks:
            process.wait(timeout=LIMIT)
    said = "\n".join((folder / f"{rank}.err").read_text()[-3000:] for rank in range(WORLD))
    codes = [process.returncode for process in ranks]
    assert codes == [0] * WORLD, f"exit codes {codes}\n{said}"
    return [torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=False) for rank in range(WORLD)]


def trained(folder: Path, *, on_device: bool) -> Ranks:
    """The results of all ranks: on a GPU if there is one, else on the CPU's masked path; or as a CPU decides."""
    if torch.cuda.is_available():
        return launched(folder, {} if on_device else {"CUDA_VISIBLE_DEVICES": ""})
    return run_workers(WORLD, adapters.run_parts, PARTS, on_device)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return trained(tmp_path_factory.mktemp("adapters") / "device", on_device=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return trained(tmp_path_factory.mktemp("adapters") / "cpu", on_device=False)


def test_the_masked_path_is_what_was_run(ranks: Ranks, reference: Ranks) -> None:
    assert {rank["device"] for rank in ranks} == {"cuda" if torch.cuda.is_available() else "cpu"}
    assert not any(rank["host decides"] for rank in ranks)
    assert all(rank["device"] == "cpu" and rank["host decides"] for rank in reference)


def replicas_learn(results: Ranks) -> None:
    assert all(len(result["losses"]) == STEPS for result in results)
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    assert sum(result["losses"][-1] for result in results) < 0.98 * sum(result["losses"][0] for result in results)


@pytest.mark.parametrize("name", DDP)
def test_ddp_trains_as_on_the_cpu(name: str, ranks: Ranks, reference: Ranks) -> None:
    mine, theirs = ([rank["ddp"][name] for rank in of] for of in (ranks, reference))
    for rank, other in zip(mine, theirs, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=CLOSE.get(name, ROUNDED))
        assert rank["bytes"] == other["bytes"]
        assert rank["ranks"] == other["ranks"]
        assert rank["skipped"] == 0
    replicas_learn(mine)
    if name in RESUMED:
        assert all(rank["resumed equal"] and rank["state equal"] for rank in mine)


@pytest.mark.parametrize("name", GATHERED)
def test_ddp_trains_so_where_buckets_are_gathered(name: str, ranks: Ranks, reference: Ranks) -> None:
    mine, theirs = ([rank["gathered"][name] for rank in of] for of in (ranks, reference))
    for rank, other in zip(mine, theirs, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=ROUNDED)
        assert rank["ranks"] == other["ranks"] and rank["skipped"] == 0
        assert rank["resumed equal"] and rank["state equal"]
    replicas_learn(mine)


def test_buckets_are_gathered_on_a_gpu_alone(ranks: Ranks, reference: Ranks) -> None:
    for results, reductions in ((ranks, 3), (reference, 5)):
        found = [(rank["gathered"]["buckets"], rank["gathered"]["reductions"]) for rank in results]
        assert found == [(5, reductions)] * WORLD


def test_the_ranks_of_edgc_change_on_the_way(ranks: Ranks) -> None:
    given = ranks[0]["ddp"]["edgc"]["ranks"]
    assert None in given and len(set(given)) > 2, given


@pytest.mark.parametrize("name", TIMED)
def test_reductions_that_are_timed_beside_the_training_leave_it_alone(name: str, ranks: Ranks) -> None:
    """The search of r_max, which method edgc begins with unless r_max is given, and the cost gate."""
    replicas_learn([rank["ddp"][name] for rank in ranks])
    assert ranks[0]["ddp"][name]["ranks"] == ranks[1]["ddp"][name]["ranks"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_step_that_is_not_finite_is_as_if_it_had_never_been(name: str, ranks: Ranks, reference: Ranks) -> None:
    mine, theirs = ([rank["ddp"][f"{name}, poisoned"] for rank in of] for of in (ranks, reference))
    for rank, other in zip(mine, theirs, strict=True):
        assert rank["step skipped"]
        assert rank["skipped"] == other["skipped"]
        # While edgc warms up nothing is kept, and nobody looks.
        if rank["ranks"][POISONED] is not None:
            assert rank["state kept"] and rank["skipped"] > 0
        assert rank["losses"] == pytest.approx(other["losses"], rel=ROUNDED)
    assert torch.equal(mine[0]["weights"], mine[1]["weights"])


@pytest.mark.parametrize("name", ["none", "powersgd fp32", "quantize"])
def test_one_rank_by_itself_does_all_its_work(name: str, ranks: Ranks, reference: Ranks) -> None:
    for rank, other in zip(ranks, reference, strict=True):
        mine, theirs = rank["alone"][name], other["alone"][name]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=CLOSE.get(name, ROUNDED))
        assert mine["losses"][-1] < mine["losses"][0]
        assert mine["bytes"] == theirs["bytes"]
        if name != "none":
            assert 0 < mine["bytes"][-1] < 0.8 * rank["alone"]["none"]["bytes"][-1]


@pytest.mark.parametrize("name", MEGATRON_RUNS)
def test_megatron_trains_as_on_the_cpu(name: str, ranks: Ranks, reference: Ranks) -> None:
    mine, theirs = ([rank["megatron"][name] for rank in of] for of in (ranks, reference))
    for rank, other in zip(mine, theirs, strict=True):
        assert len(rank["losses"]) == MEGATRON_STEPS
        assert rank["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert rank["bytes"] == other["bytes"] > 0
        assert [d["ranks"] for d in rank["decisions"]] == [d["ranks"] for d in other["decisions"]]
    assert torch.equal(mine[0]["weights"], mine[1]["weights"])
    assert mine[0]["losses"][-1] < mine[0]["losses"][0]


def test_megatron_skips_a_step_that_is_not_finite(ranks: Ranks) -> None:
    results = [rank["megatron"]["powersgd, poisoned"] for rank in ranks]
    assert all(result["kept"] == [True] and result["skipped"] == 1 for result in results)
    assert torch.equal(results[0]["weights"], results[1]["weights"])
