"""edgc.doctor: the arithmetic, bad input, and real runs on tiny matrices, alone and as part of a job."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgc import doctor
from edgc.doctor import Cost, Link, break_even

ROOT = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------- arithmetic


def test_a_link_is_what_its_smallest_and_largest_message_say() -> None:
    true = Link(1e-4, 1e8)
    found = Link.through([(size, true.seconds(Cost(0.0, size, 1))) for size in (65536, 4096, 2**24)])
    assert (found.latency, found.bandwidth) == pytest.approx((1e-4, 1e8))
    assert Link.through([(1e3, 1e-6), (1e6, 2e-3)]).latency == 0.0
    assert Link.through([(1e3, 2e-3), (1e6, 1e-3)]) == Link(2e-3, math.inf)


@given(
    dense=st.builds(Cost, st.floats(0, 1), st.floats(0, 1e9), st.integers(1, 3)),
    compressed=st.builds(Cost, st.floats(0, 1), st.floats(0, 1e9), st.integers(1, 3)),
    latency=st.floats(0, 1e-2),
    bandwidth=st.floats(1e3, 1e12),
)
def test_break_even_divides_the_bandwidths(dense: Cost, compressed: Cost, latency: float, bandwidth: float) -> None:
    below = break_even(dense, compressed, latency)
    fixed = [cost.seconds + cost.rounds * latency for cost in (dense, compressed)]
    if dense.bytes <= compressed.bytes and fixed[1] < fixed[0]:
        assert below == 0  # sends no less and saves other time: not what compression does
        return
    link = Link(latency, bandwidth)
    gain = link.seconds(dense) - link.seconds(compressed)
    slack = 1e-9 * (link.seconds(dense) + link.seconds(compressed))
    if bandwidth < below * (1 - 1e-9):
        assert gain >= -slack
    if bandwidth > below * (1 + 1e-9):
        assert gain <= slack


MACHINE = {"world": 2, "backend": "gloo", "device": "cpu", "threads": 1, "shapes": [[1000, 1000]]}
POINTS = [(size, 1e-3 + size / 1.25e9) for size in (1e4, 1e6, 1e8)]  # 1 ms, 10 Gbit/s


KEYS = ("method", "seconds_compress", "seconds_decompress", "bytes", "rounds")
ROWS: list[dict[str, Any]] = [
    {"rank": None, "seconds_measured": 0.5, **dict(zip(KEYS, values, strict=True))}
    for values in (
        ("dense", 0.0, 0.0, 1e8, 1),
        ("rank 8", 0.02, 0.01, 1e7, 2),
        ("rank 64", 1.0, 0.6, 5e7, 2),
        ("rank 900", 0.0, 0.1, 1e8, 1),
    )
]


def test_assess_calculates_at_the_assumed_or_measured_network() -> None:
    report = doctor.assess(MACHINE, POINTS, ROWS, 1.25e8, 0.0)
    dense, low, high, none = report["methods"]
    assert dense["seconds_calculated"] == pytest.approx(0.8)
    assert dense["of_dense"] == 1.0
    assert dense["pays_below_gbit"] is None
    assert low["seconds_calculated"] == pytest.approx(0.03 + 0.08)
    assert low["of_dense"] == pytest.approx(0.1375)
    assert low["pays_below_gbit"] == pytest.approx(8 * 9e7 / 0.03 / 1e9)
    assert high["pays_below_gbit"] == pytest.approx(8 * 5e7 / 1.6 / 1e9)
    assert none["pays_below_gbit"] == 0
    assert report["verdicts"] == [
        "at 1 Gbit/s rank 8 would take 0.14x of dense; pays below 24 Gbit/s",
        "at 1 Gbit/s rank 64 would take 2.50x of dense; pays below 0.25 Gbit/s",
        "at 1 Gbit/s rank 900 would take 1.12x of dense; pays at no bandwidth",
        "compression would pay at 1 Gbit/s: fastest is rank 8, 0.14x of dense",
    ]
    table = [line.split() for line in doctor.text(report, local=False).splitlines()]
    assert [line[-1] for line in table if line[:1] == ["rank"]] == ["24", "0.25", "never"]
    assert report["network"]["bandwidth_source"] == report["network"]["latency_source"] == "assumed"
    assert report["network"]["measured_bandwidth_gbit"] == pytest.approx(10)
    measured = doctor.assess(MACHINE, POINTS, ROWS)
    assert measured["network"]["bandwidth_source"] == measured["network"]["latency_source"] == "measured"
    assert measured["methods"][1]["seconds_calculated"] == pytest.approx(0.03 + 2e-3 + 8e-3)
    half = doctor.assess(MACHINE, POINTS, ROWS, 1.25e10)
    assert half["network"]["latency_source"] == "measured"
    assert half["verdicts"][-1] == "compression would not pay at 100 Gbit/s"


def test_what_saves_no_bytes_is_not_advised_and_what_always_pays_is_told_in_json() -> None:
    slow, equal, quick = (
        dict(zip(KEYS, values, strict=True))
        for values in (("dense", 0.0, 7e-4, 1e4, 1), ("rank 128", 0.0, 6e-4, 1e4, 1), ("bf16", 0.0, 6e-4, 5e3, 1))
    )
    common = {"rank": None, "seconds_measured": 1e-3}
    rows = [{**common, **row} for row in (slow, equal, quick)]
    alone = doctor.assess(MACHINE, POINTS, rows[:2], 1.25e9, 0.0)
    assert alone["verdicts"][0].endswith("pays at no bandwidth")
    assert alone["verdicts"][1] == "compression would not pay at 10 Gbit/s"
    told = json.loads(doctor.as_json(doctor.assess(MACHINE, POINTS, rows, 1.25e9, 0.0)))
    assert [row["pays_below_gbit"] for row in told["methods"]] == [None, 0, "inf"]
    assert "fastest is bf16" in told["verdicts"][-1]


# --------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--shapes 12", "--shapes"),
        ("--shapes 0x4", "--shapes"),
        ("--rank 8 0", "--rank"),
        ("--hidden -1", "--hidden"),
        ("--repeats 0", "--repeats"),
        ("--bandwidth 0", "--bandwidth"),
        ("--bandwidth inf", "--bandwidth"),
        ("--latency -1", "--latency"),
        ("--factor-dtype int3", "--factor-dtype"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert ";" in captured.err, "no fix is named"


def test_half_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    for key in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    assert doctor.main([]) == 2
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert doctor.main([]) == 2
    assert "nobody to send to" in capsys.readouterr().err
    for key in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        with monkeypatch.context() as changed:
            changed.setenv(key, "two")
            assert doctor.main([]) == 2
        assert f"{key} = 'two'" in capsys.readouterr().err


TINY = ["--shapes", "96x64", "64x128", "--rank", "4", "8", "60", "--repeats", "2"]


def reported(ranks: int | None, *arguments: str) -> dict[str, Any]:
    """The report of a run by itself (None), or as a job of so many ranks, of which only the first one speaks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_WORLD_SIZE")}
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    own = [{}] if ranks is None else [{**job, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    command = [sys.executable, "-m", "edgc.doctor", *TINY, *arguments, "--json"]
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env={**environment, **variables}, **options) for variables in own]
    outputs = [process.communicate() for process in processes]
    assert not any(process.returncode for process in processes), outputs
    assert not any(printed for printed, _ in outputs[1:])
    report: dict[str, Any] = json.loads(outputs[0][0])
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments", "widths"),
    [
        (None, ("--bandwidth", "0.001", "--latency", "7"), {"": 4, " int8": 33 / 32}),
        (2, ("--factor-dtype", "bf16"), {" bf16": 2}),
    ],
    ids=["alone", "in a job"],
)
def test_the_numbers_of_a_real_run_hang_together(
    ranks: int | None, arguments: tuple[str, ...], widths: dict[str, float]
) -> None:
    """No time is compared with anything but itself; ``widths``: bytes of an entry of the factors by rows' endings."""
    report = reported(ranks, *arguments)
    assert report["world"] == 2
    assert report["shapes"] == [[96, 64], [64, 128]]
    network, entries = report["network"], 96 * 64 + 64 * 128
    if ranks is None:
        assert network["bandwidth_gbit"] == pytest.approx(0.001) and network["latency_seconds"] == pytest.approx(7e-6)
    assert network["bandwidth_source"] == ("assumed" if ranks is None else "measured")
    methods = {item["method"]: item for item in report["methods"]}
    # Between two ranks a ring all-reduce sends a message once.
    expected: dict[str, tuple[float, int | None]] = {"dense": (4 * entries, 1), "bf16": (2 * entries, 1)}
    for ending, width in widths.items():
        expected |= {f"rank {rank}{ending}": (width * rank * (160 + 192), 2 if width >= 2 else 4) for rank in (4, 8)}
        # In fp32 the factors would be larger than the matrices, which are then sent dense.
        expected[f"rank 60{ending}"] = (4 * entries, 1) if width == 4 else (width * 60 * (160 + 192), None)
    expected |= {"quantize 8": ((1 + 1 / 32) * entries, None), "quantize 4": ((1 / 2 + 1 / 32) * entries, None)}
    expected["topk 0.01"] = (8 * sum(round(0.01 * m * n) for m, n in report["shapes"]), None)
    assert list(methods) == list(expected)
    for name, (size, known) in expected.items():
        item = methods[name]
        rounds = item["rounds"] if known is None else known
        # The last block of a factor may be half full; its scale is sent whole.
        assert item["bytes"] == pytest.approx(size, rel=0.1 if "int8" in name else 1e-9), name
        assert item["rounds"] == rounds >= 1, name
        own = item["seconds_compress"] + item["seconds_decompress"]
        assert 0 < own <= item["seconds_measured"]
        # On a busy machine larger messages may not take longer: without a bound, which JSON cannot say.
        bandwidth = math.inf if network["bandwidth_gbit"] is None else network["bandwidth_gbit"] * 1e9 / 8
        seconds = own + rounds * network["latency_seconds"] + item["bytes"] / bandwidth
        assert item["seconds_calculated"] == pytest.approx(seconds)
        assert item["of_dense"] == pytest.approx(seconds / methods["dense"]["seconds_calculated"])
    assert methods[f"rank 8{next(iter(widths))}"]["rank"] == 8
    assert len(report["verdicts"]) == len(methods)
    assert all(size > 0 and seconds > 0 for size, seconds in network["points"])
