"""The benchmark of engines: what is timed, tables from known times; bad input of all benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

from edgc.compressors.powersgd import FACTOR_BITS
from edgc.errors import UserError
from experiments.bench import engine, testbed
from experiments.bench.__main__ import app
from experiments.bench.engines import Engine, Ours, TorchHook, entries, layer_shapes, make
from experiments.bench.workers import Group, Worker, WorkerError
from paper_figures import bench
from tests.unit.bench_child import Child
from tests.workers import run_workers

CPU = torch.device("cpu")
SHAPES, RANK = layer_shapes(1, 32), 4
Trained = tuple[torch.Tensor, list[float], int]


def trained(variant: Engine, steps: int) -> Trained:
    """The buffer after the last step, the relative errors of all steps, and the bytes of the last."""
    gradients = make(SHAPES, 2, seed=3, dtype=torch.float32, device=CPU)
    errors = []
    for step in range(steps):
        buffer = gradients[step % 2].clone()
        feedback = variant.errors() if step else torch.zeros(entries(SHAPES))
        expected = buffer + (0 if feedback is None else feedback)
        parts = variant.step(buffer)
        errors.append(float((expected - buffer).norm() / expected.norm()))
        assert min(parts.compress.seconds, parts.communicate.seconds, parts.decompress.seconds) >= 0
        # What was not sent is the new error; int4 and bf16 factors round on the way.
        remainder = variant.errors()
        assert remainder is not None
        assert torch.allclose(buffer + remainder, expected, atol=0.05 * float(expected.abs().max()))
    return buffer, errors, parts.bytes


def two_real_ranks() -> dict[str, Trained]:
    """Every engine with gloo, the gradients of both ranks being equal."""
    group = dist.group.WORLD
    engines = {dtype: trained(Ours(SHAPES, RANK, group, dtype), 4) for dtype in FACTOR_BITS}
    return {**engines, "torch": trained(TorchHook(SHAPES, RANK, group, torch.empty(0)), 4)}


def test_an_engine_alone_does_what_it_does_as_one_of_two_ranks_and_all_reconstruct_equally_well() -> None:
    real, _ = run_workers(2, two_real_ranks)
    torch_buffer, torch_errors, _ = trained(TorchHook(SHAPES, RANK, None, torch.empty(0)), 4)
    assert torch.allclose(torch_buffer, real["torch"][0], atol=1e-4 * float(torch_buffer.abs().max()))
    for dtype in FACTOR_BITS:
        buffer, errors, sent = trained(Ours(SHAPES, RANK, None, dtype), 4)
        assert torch.allclose(buffer, real[dtype][0], atol=1e-2 * float(buffer.abs().max())), dtype
        assert errors == pytest.approx(real[dtype][1], rel=1e-2), dtype
        assert sent == real[dtype][2] > 0, dtype
        assert errors[-1] < torch_errors[-1] * 1.02, dtype
        if dtype == "fp32":  # the same first Q: the same algorithm in another order of sums
            assert errors == pytest.approx(torch_errors, rel=1e-5)
    factors = RANK * sum(rows + columns for rows, columns in SHAPES)
    assert real["fp32"][2] == real["torch"][2] == 4 * factors
    assert real["int4"][2] < real["int8"][2] < real["bf16"][2] < real["fp32"][2]


@pytest.fixture
def children() -> Iterator[Group]:
    with Group([Worker(Child, {}) for _ in range(2)]) as group:
        yield group


def test_answers_come_in_order_and_failures_are_one_line(children: Group) -> None:
    assert children.ask("echo", value=[1, "ä"]) == [[1, "ä"]] * 2
    with pytest.raises(WorkerError, match=r"^ValueError: no good$"):
        children.ask("fail", message="no\ngood")
    assert children.ask("echo", value=2) == [2, 2]
    for method, argument in (("die", {"message": "last words"}), ("echo", {"value": 1})):
        with pytest.raises(WorkerError, match=r"^last words$"):
            children.ask(method, **argument)


def test_a_worker_that_hangs_is_given_up() -> None:
    with pytest.raises(WorkerError, match=r"no answer within 0.2 s"), Group([Worker(Child, {})]) as group:
        group.ask("sleep", within=0.2, seconds=600)


def test_ratios_are_taken_within_rounds() -> None:
    """Torch takes 6, 4 and 9 seconds, ours 2, 2 and 3."""
    rows: list[dict[str, Any]] = []

    def add(variant: str, seconds: list[float], allocator: str = "default", status: str = "ok") -> None:
        about = {"device": "cpu", "gradient_dtype": "fp32", "rank": 4, "threads": 1, "network": "none"}
        about |= {"allocator": allocator, "variant": variant, "status": status, "relative_error": 0.5, "bytes": 7}
        times = [{"round": index} | dict.fromkeys(engine.PARTS, value) for index, value in enumerate(seconds)]
        rows.extend(about | row for row in times or [{"round": 0}])

    add("torch", [6.0, 4.0, 9.0])
    add("fp32", [2.0, 2.0, 3.0])
    add("torch", [3.0, 3.0, 3.0], "thp")
    add("int4", [], status="RuntimeError: no such unit")
    [table] = engine.tables(engine.Plan(), pd.DataFrame(rows)).values()
    table = table.set_index(["allocator", "engine", "factor_dtype"])
    ours = table.loc[("default", "edgc", "fp32")]
    assert ours["cpu_ms"] == 2000 and ours["repeats"] == 3
    assert ours["speedup_cpu"] == 3  # of 3, 2 and 3; the ratio of the medians is 3 as well
    assert ours["speedup_cpu_q1"] == 2.5
    assert ours["speedup_over_thp_cpu"] == 1.5
    failed = table.loc[("default", "edgc", "int4")]
    assert failed["status"] == "RuntimeError: no such unit" and pd.isna(failed["cpu_ms"])


TINY = ["--layers", "1", "--hidden", "64", "--ranks", "4", "--threads", "1", "--repeats", "2"]
TINY += ["--allocators", "default,thp", "--device", "cpu"]


def test_engine_benchmark_writes_every_engine_in_every_setting(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["engine", *TINY, "--results", str(tmp_path / "bench")])
    assert done.exit_code == 0, done.output
    [folder] = (tmp_path / "bench").iterdir()
    assert done.stdout.splitlines() == [str(folder)]
    table = pd.read_csv(folder / "engine.csv", keep_default_na=False, na_values=[""])
    [reference] = Path("results/reference/bench").glob("*/engine.csv")
    assert set(table) < set(pd.read_csv(reference, nrows=1))
    ok = table[table["status"] == "ok"]
    alone = ok[(ok["network"] == "none") & (ok["allocator"] == "default")]
    assert list(alone["engine"]) == ["copy", "torch", "edgc", "edgc", "edgc", "edgc"]
    assert list(alone["factor_dtype"].dropna()) == ["fp32", "bf16", "int8", "int4"]
    assert set(ok.loc[ok["network"] == "gloo", "engine"]) == {"copy", "torch", "edgc"}
    assert set(ok.loc[ok["allocator"] == "thp", "engine"]) == {"torch", "edgc"}
    assert (ok[["cpu_ms", "wall_ms"]] > 0).all(axis=None)
    quantised = ok["factor_dtype"].isin(["int8", "int4"])
    assert (ok.loc[quantised, "pack_ms"] > 0).all() and (ok.loc[~quantised, "pack_ms"] == 0).all()
    # The error of a rank is that of torch's hook, and a copy has none.
    for key, part in ok[ok["engine"] != "copy"].groupby("network"):
        theirs = part.loc[part["engine"] == "torch", "relative_error"].iloc[0]
        assert (part["relative_error"] < 1.1 * theirs).all(), key
    assert (ok.loc[ok["engine"] == "copy", "relative_error"] < 1e-6).all()
    assert (ok["repeats"] == 2).all()
    record = json.loads((folder / "engine.json").read_text())
    assert record["settings"]["hidden"] == 64 and record["machine"]["slug"] == folder.name
    assert (table["machine"] == record["machine"]["name"]).all()
    assert "n = 2" in texts(bench.draw(folder))


def texts(fig: Figure) -> str:
    """All words of a figure, which has labelled axes with data in every panel."""
    try:
        fig.canvas.draw()
        assert all(ax.get_xlabel() and (ax.lines or ax.containers) for ax in fig.axes)
        return " ".join(text.get_text() for text in fig.findobj(Text))
    finally:
        plt.close(fig)


def test_layers_of_a_model_are_as_many_as_fit() -> None:
    layer = 12 * 1920 * 1920 * engine.BYTES_PER_ENTRY
    assert engine.layers_that_fit("gpt2-2.5b-stage", 20 * layer) == 13
    assert engine.layers_that_fit("gpt2-2.5b-stage", int(3.4 * layer)) == 3
    with pytest.raises(UserError, match=r"--model gpt2-2\.5b-stage does not fit; it needs 3\.3 GiB"):
        engine.layers_that_fit("gpt2-2.5b-stage", layer // 2)
    plan = engine.Plan(**engine.MODELS["gpt2-124m"])
    biases_and_norms = 12 * (9 + 4) * 768 + 2 * 768
    assert sum(m * n for m, n in plan.shapes) + biases_and_norms == 124_439_808  # GPT-2 as published


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("engine --ranks 8,x", "--ranks 8,x is not valid"),
        ("engine --hidden 64 --ranks 32", "rank 32"),
        ("engine --repeats few", "--repeats few is not valid"),
        ("engine --device tpu", "--device tpu is not valid; use some of auto, cpu, cuda"),
        ("engine --allocators huge", "--allocators huge is not valid"),
        ("engine --model gpt3", "--model gpt3 is not valid"),
        ("step --variants ddp,gzip", "--variants ddp,gzip is not valid"),
        ("step --layers 0", "--layers 0 is not valid"),
        ("network --rates 100,20000", "--rates 100,20000 is not valid"),
        ("steps --workers 1", "--workers 1 is not valid"),
        ("race --methods int3", "--methods int3 is not valid"),
        ("race --seeds x", "--seeds x is not valid"),
        ("predict results/none", "no measured steps"),
        ("keep", "there are no results of a benchmark"),
    ],
)
def test_bad_input_is_one_line(arguments: str, words: str, tmp_path: Path) -> None:
    where = [] if arguments.startswith("predict") else ["--results", str(tmp_path / "bench")]
    done = CliRunner().invoke(app, [*arguments.split(), *where])
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [("os.geteuid", lambda: 1000, "need root"), ("shutil.which", lambda _: None, "`ip` is missing")],
)
def test_without_a_testbed_the_benchmark_says_why_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attribute: str, value: object, words: str
) -> None:
    monkeypatch.setattr(f"experiments.bench.testbed.{attribute}", value)
    reason = testbed.missing()
    assert reason is not None and words in reason
    done = CliRunner().invoke(app, ["network", "--results", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr == f"skipped: {reason}\n"
