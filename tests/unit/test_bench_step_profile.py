"""The profile of a training step: kernels from known events, the table from known times, and the program."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch.autograd import DeviceType
from typer.testing import CliRunner

from edgc.config import EDGCConfig
from experiments.bench import gpt, step_profile
from experiments.bench.__main__ import app
from experiments.bench.kernels import device_time, kernels
from experiments.bench.step_profile import AGAIN, DDP, LARGE, OURS, TORCH, Plan

SIZE = ["--layers", "1", "--hidden", "32", "--heads", "2", "--vocabulary", "64", "--sequence", "16", "--batch", "2"]


def test_the_time_of_a_kernel_is_counted_once() -> None:
    rows = (
        ("aten::mm", DeviceType.CPU, 30.0, 500.0, False),  # told once more with what launched it
        ("gemm", DeviceType.CUDA, 0.0, 500.0, False),
        ("Memcpy DtoD", DeviceType.CUDA, 0.0, 20.0, False),
        ("a range of the user's", DeviceType.CUDA, 0.0, 520.0, True),
    )
    names = ("key", "device_type", "self_cpu_time_total", "self_device_time_total", "is_user_annotation")
    events = [SimpleNamespace(count=2, **dict(zip(names, row, strict=True))) for row in rows]
    assert device_time(events, True) == {"kernel_ms": 0.52, "kernel_calls": 4}
    assert device_time(events, False) == {"kernel_ms": 0.03, "kernel_calls": 2}


def test_kernels_of_one_step_are_means_without_what_comes_before(tmp_path: Path) -> None:
    a, trace = torch.randn(64, 64), tmp_path / "trace.json.gz"
    alone, twice = (kernels(step, a.device, steps=3) for step in (lambda: a @ a, lambda: (a @ a) @ a))
    assert 0 < twice["kernel_calls"] == 2 * alone["kernel_calls"]
    assert kernels(lambda: (a @ a) @ a, a.device, before=lambda: torch.tanh(a), trace=trace).keys() == twice.keys()
    assert trace.read_bytes()[:2] == b"\x1f\x8b"


def test_the_model_is_gpt2() -> None:
    with torch.device("meta"):
        model = gpt.GPT(Plan())
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_every_variant_of_ours_has_settings_that_are_valid() -> None:
    for name in OURS:
        options = step_profile.options(name, 32)
        assert options.pop("hook") == "edgc"
        config = EDGCConfig.from_dict(options)
        assert (config.to_dict().get("rank") == 32) == (config.method == "powersgd")
    for name, (method, bucket_mb) in LARGE.items():  # they change the buckets alone
        assert bucket_mb > step_profile.BUCKET_MB
        assert step_profile.options(name, 32) == step_profile.options(method, 32) | {"bucket_mb": bucket_mb}


def test_the_table_has_the_difference_to_plain_ddp_and_keeps_failures() -> None:
    large = f"{TORCH} 100 MB"
    plan = Plan(variants=(DDP, TORCH, "powersgd int8", large, AGAIN), rank=16)
    data: list[dict[str, Any]] = []
    for variant in plan.variants:
        seconds = {DDP: 1.0, "powersgd int8": 1.5, AGAIN: 1.1}.get(variant)
        if seconds is None:
            data.append({"variant": variant, "status": "OutOfMemoryError: no"})
            continue
        times = {"step": seconds, "host": seconds}
        steps = [times, {**times, "step": seconds + 0.2}, {**times, "step": seconds + 0.1}]
        facts = {"status": "ok", "peak_memory_mib": 100 * seconds, "kernel_ms": 500.0, "bytes": 7}
        data.append({"variant": variant, **facts, "times": steps})
    tables = step_profile.tables(plan, data)
    table = tables["step_profile"].set_index("variant")
    assert table.loc[TORCH, "status"] == "OutOfMemoryError: no" and pd.isna(table.loc[TORCH, "step_ms"])
    assert list(table["bucket_mb"]) == [25, 25, 25, 100, 25] and table.loc[large, "rank"] == 16
    ours = table.loc["powersgd int8"]
    assert ours["step_ms"] == pytest.approx(1600) and ours["rank"] == 16
    assert ours["over_ddp_step_ms"] == pytest.approx(500)
    assert ours["over_ddp_peak_memory_mib"] == pytest.approx(50)
    assert table.loc[AGAIN, "over_ddp_step_ms"] == pytest.approx(100)
    assert ours["over_ddp_kernel_ms"] == 0


@pytest.mark.slow
def test_the_program_trains_every_kind_of_variant_and_keeps_no_trace(tmp_path: Path) -> None:
    variants = (DDP, "torch 100 MB", "powersgd int8")
    arguments = [*SIZE, "--rank", "2", "--steps", "2", "--device", "cpu", "--variants", ",".join(variants)]
    done = CliRunner().invoke(app, ["step", *arguments, "--results", str(tmp_path / "bench")])
    assert done.exit_code == 0, done.output
    [folder] = (tmp_path / "bench").iterdir()
    assert done.stdout.splitlines() == [str(folder)]
    table = pd.read_csv(folder / "step_profile.csv").set_index("variant")
    assert list(table.index) == list(variants) and (table["status"] == "ok").all()
    [reference] = Path("results/reference/bench").glob("*/step_profile.csv")
    assert set(table) < set(pd.read_csv(reference, nrows=1))
    assert (table[["step_ms", "host_ms", "kernel_ms", "peak_memory_mib"]] > 0).all(axis=None)
    ours = table.loc["powersgd int8"]
    assert (ours[["compress_ms", "decompress_ms", "bytes"]] > 0).all()
    assert 1e-4 < ours["relative_error"] < 0.999, "nothing was compressed"
    # Nothing was lost on the way: with error feedback all train alike at first.
    assert table["loss"].max() < table["loss"].min() * 1.02
    assert (table["steps"] == 2).all()
    record = json.loads((folder / "step_profile.json").read_text())
    assert record["settings"]["hidden"] == 32
    assert {"torch", "python"} <= record["machine"]["versions"].keys() and record["machine"]["git"]
    assert len(list(folder.glob("step_trace_*.json.gz"))) == len(variants)
    done = CliRunner().invoke(app, ["keep", "--results", str(folder.parent), "--reference", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "kept" / folder.name).iterdir()}
    assert names == {"step_profile.csv", "step_profile.json"}


class Broken:
    """A worker that cannot start."""


def test_a_variant_that_fails_is_a_row_and_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "Training", Broken)
    arguments = ["step", *SIZE, "--variants", DDP, "--device", "cpu", "--results", str(tmp_path / "bench")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    [folder] = (tmp_path / "bench").iterdir()
    assert "object has no attribute 'start'" in pd.read_csv(folder / "step_profile.csv")["status"].iloc[0]
