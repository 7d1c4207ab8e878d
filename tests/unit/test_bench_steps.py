"""The predictions of training steps, and the program that compares them with measurements."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.bench import network_worker, steps, testbed
from experiments.bench.__main__ import REFERENCE, app
from experiments.bench.children import ranks
from experiments.bench.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Sent
from experiments.bench.gpt import Size
from experiments.bench.step_model import Compute, Link, Messages, overhead_of, predict
from paper_figures import BENCHMARKS, bench_steps

COMPUTE = Compute(forward=1.0, backward=2.0, rest=0.25, complete=(0.25, 1.0))
LINKS = {
    ALL_REDUCE: Link(latency=0.1, bandwidth=10.0),
    ALL_TO_ALL: Link(latency=0.2, bandwidth=20.0),
    ALL_GATHER: Link(latency=0.0, bandwidth=5.0),
}
seconds = st.floats(0.01, 10.0)


@st.composite
def computes(draw: st.DrawFn) -> Compute:
    complete = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)))
    return Compute(forward=draw(seconds), backward=draw(seconds), rest=draw(seconds), complete=tuple(complete))


def reduced(*buckets: tuple[float, ...]) -> Messages:
    """All-reduces."""
    return tuple(tuple((ALL_REDUCE, sent) for sent in bucket) for bucket in buckets)


@given(st.floats(0, 1), st.floats(1e3, 1e9))
def test_a_link_is_found_from_its_own_times(latency: float, bandwidth: float) -> None:
    link = Link(latency=latency, bandwidth=bandwidth)
    probes = [(sent, latency + sent / bandwidth) for sent in (1e5, 1e6, 1e7)]
    found = Link.fit(probes)
    for sent, expected in probes:
        message = found.message(sent)
        assert message.latency + message.seconds == pytest.approx(expected, rel=1e-6)
    assert found.latency == pytest.approx(link.latency, abs=1e-6 * probes[-1][1])


def test_a_link_never_has_a_negative_latency() -> None:
    found = Link.fit([(1e6, 0.5), (2e6, 2.0), (4e6, 4.4)])
    assert found.latency == 0
    assert 1e-6 / 2 < 1 / found.bandwidth < 1.1e-6


def test_steps_counted_by_hand() -> None:
    # 10 bytes after a quarter of backward (1.5 s) take 1.1 s, until 2.6; 5 bytes after all of it (3 s) 0.6 s.
    assert predict(COMPUTE, reduced((10.0,), (5.0,)), LINKS) == pytest.approx(3.6 + 0.25)
    # 40 bytes take until 1.5 + 4.1 = 5.6, and the link is not free before.
    assert predict(COMPUTE, reduced((40.0,), (5.0,)), LINKS) == pytest.approx(6.2 + 0.25)
    # Two messages of a bucket, and 1.2 s of overhead: a quarter of it in the first bucket, 0.1 s before, between and
    # after its messages, and 0.3 s each in the second. Backward ends at 3 + 0.2 + 0.6; the second bucket's messages
    # begin at 3 + 0.2 + 0.3 and take 0.2 + 0.3 + 0.2, until 4.2; 0.1 + 0.3 come after all.
    assert predict(COMPUTE, reduced((2.0, 2.0), (1.0, 1.0)), LINKS, 1.2) == pytest.approx(4.2 + 0.4 + 0.25)
    # All of it before, where nothing is sent.
    assert predict(COMPUTE, ((), ()), LINKS, 0.4) == pytest.approx(3.0 + 0.4 + 0.25)
    # An exchange of 0.7 s and a gathering of 0.8 s.
    sent = ((), ((ALL_TO_ALL, 10.0), (ALL_GATHER, 4.0)))
    assert predict(COMPUTE, sent, LINKS) == pytest.approx(3.0 + 0.7 + 0.8 + 0.25)
    assert predict(COMPUTE, ((), ()), LINKS) == 3.25
    with pytest.raises(ValueError, match="1 buckets are sent, but 2 become complete"):
        predict(COMPUTE, reduced((1.0,)), LINKS)


@given(computes(), st.lists(st.floats(0, 1e3), min_size=5, max_size=5), seconds, st.floats(0, 100))
def test_the_overhead_explains_the_step_that_it_was_taken_from(
    compute: Compute, sent: list[float], latency: float, more: float
) -> None:
    messages = reduced(*((size,) for size in sent[: len(compute.complete)]))
    links = {ALL_REDUCE: Link(latency=latency, bandwidth=100.0)}
    alone = predict(compute, messages, links)
    extra = overhead_of(compute, messages, links, alone + more)
    assert extra >= more - 1e-9 * alone
    assert alone <= predict(compute, messages, links, extra) * (1 + 1e-9)
    assert overhead_of(compute, messages, links, 0.0) == 0
    # Where nothing is sent, all of it is found again.
    nothing: Messages = tuple(() for _ in messages)
    step = compute.forward + compute.backward + compute.rest + more
    assert predict(compute, nothing, links, overhead_of(compute, nothing, links, step)) == pytest.approx(step)


@settings(deadline=None, max_examples=20)
@given(computes(), st.floats(0.5, 2.0))
def test_the_table_compares_with_the_median_of_what_was_measured(compute: Compute, factor: float) -> None:
    table = steps.table(_measured(compute, factor)).set_index(["mbit_per_s", "method"])
    assert len(table) == 2 * len(steps.methods())
    assert set(table[table["used"] == "calibration"].index) == {
        *((0.0, name) for name in steps.methods()),
        (100.0, "compute"),
    }
    assert table.loc[(100.0, "compute"), "error"] == pytest.approx(0, abs=1e-9)
    for name in set(steps.methods()) - {"compute"}:
        row = table.loc[(100.0, name)]
        assert row["error"] == pytest.approx(1 / factor - 1, rel=1e-6, abs=1e-6)
    summary = steps.summary(table.reset_index())
    assert summary["configurations"] == len(steps.methods()) - 1
    assert summary["worst_error"] == pytest.approx(abs(1 / factor - 1), rel=1e-6, abs=1e-6)


def _measured(compute: Compute, factor: float) -> steps.Measured:
    """Steps as the model has them, those at the limit ``factor`` times as long; a round that is out of the way."""
    links = {0.0: Link(latency=0.0, bandwidth=1e9), 100.0: Link(latency=0.01, bandwidth=1e6)}
    kinds = dict(zip(steps.methods(), itertools.cycle(LINKS), strict=False))
    sent: dict[str, list[list[Sent]]] = {
        name: [[(kinds[name], 1e5)] for _ in compute.complete] for name in steps.methods()
    }
    sent["compute"] = [[] for _ in compute.complete]
    rounds, probes = [], []
    for rate, link in links.items():
        # Collectives of the three kinds take once, twice and three times as long.
        of_kind = {
            kind: Link(latency=times * link.latency, bandwidth=link.bandwidth / times)
            for times, kind in enumerate(LINKS, 1)
        }
        for size, kind in itertools.product((1e5, 1e6), LINKS):
            seconds = of_kind[kind].seconds(size)
            probes.append({"workers": 2, "mbit_per_s": rate, "kind": kind, "bytes": size, "seconds": seconds})
        for name in steps.methods():
            own = name == "compute"
            messages = tuple(map(tuple, sent[name]))
            step = predict(compute, messages, of_kind) * (1 if own or not rate else factor)
            for index, disturbed in enumerate((1.0, 1.0, 5.0)):
                complete = [compute.forward + share * compute.backward for share in compute.complete]
                rounds.append(
                    {"workers": 2, "mbit_per_s": rate, "method": name, "round": index}
                    | {"seconds": step * disturbed, "forward": compute.forward}
                    | {"backward": compute.forward + compute.backward, "step": step}
                    | {"complete": " ".join(map(repr, complete)) if own else ""}
                )
    return steps.Measured(pd.DataFrame(rounds), pd.DataFrame(probes), {2: sent})


def test_the_program_writes_tables_and_the_figure_shows_every_validated_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _measured(COMPUTE, 1.2)
    monkeypatch.setattr(testbed, "missing", lambda **_: None)
    monkeypatch.setattr(steps, "measure", lambda plan, advance: found)
    arguments = ["steps", "--workers", "2", "--rates", "100", "--repeats", "3", "--results", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    [folder] = tmp_path.iterdir()
    assert done.stdout.splitlines() == [str(folder)]
    described = json.loads((folder / "steps.json").read_text())
    assert described["summary"]["median_error"] == pytest.approx(1 - 1 / 1.2)
    assert described["sent"]["2"] == json.loads(json.dumps(found.sent[2]))
    assert len(pd.read_csv(folder / "steps_rounds.csv")) == len(found.rounds)
    fig = bench_steps.draw(folder)
    points = sum(len(line.get_xdata()) for ax in fig.axes for line in ax.lines if line.get_gid() == "step")
    assert points == len(steps.methods()) - 1
    low = (pd.read_csv(folder / "steps.csv").query("used == 'validation'")["error"] < 0).mean()
    title = " ".join(fig.legends[0].get_title().get_text().split())
    assert f"too low in {100 * low:.0f} % of the {points} steps" in title
    assert "bench_steps" in BENCHMARKS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1"], "--workers 1 is not valid"),
        (["--rates", "0"], "--rates 0 is not valid"),
        (["--repeats", "0"], "--repeats 0 is not valid"),
        (["--delay", "-1"], "--delay -1 is not valid"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["steps", *arguments, "--results", str(tmp_path / "bench")])
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "bench").exists()


def test_messages_of_real_workers_are_what_the_methods_count(tmp_path: Path) -> None:
    """Two workers without a testbed: what is noted message by message is what the engine says that it sent."""
    size = Size(layers=2, hidden=32, heads=2, vocabulary=64, sequence=16, batch=2)
    with ranks(network_worker.__name__, 2, size=size) as group:
        for name, options in steps.methods().items():
            if options["hook"] == "edgc":
                options = options | {"rank": 4} if "rank" in options else options
                group.ask({"do": "prepare", "name": name, "settings": options})
                first, second = (group.ask({"do": "messages", "name": name}) for _ in range(2))
                counted = group.ask({"do": "counted", "name": name})
                for rank in range(2):
                    assert first[rank] == second[rank]
                    sent = [(kind, bytes_) for bucket in first[rank] for kind, bytes_ in bucket]
                    assert sum(bytes_ for _, bytes_ in sent) == counted[rank] > 0, name
                    assert all(bytes_ > 0 for _, bytes_ in sent)
                    # What is quantised is exchanged, summed by its owner, and gathered.
                    small = options.get("factor_dtype", "fp32") != "fp32" or options.get("method") == "quantize"
                    assert ({ALL_TO_ALL, ALL_GATHER} <= {kind for kind, _ in sent}) == small, name
                if options.get("method") is None:
                    assert all(len(bucket) >= 2 for bucket in first[0]), "P and Q"


def test_predictions_that_are_kept_follow_from_the_rounds_beside_them(tmp_path: Path) -> None:
    """After a change of the model: `python -m experiments.bench predict results/reference/bench/MACHINE`."""
    kept = [path.parent for path in REFERENCE.glob("*/steps.json")]
    assert kept
    for folder in kept:
        own = tmp_path / folder.name
        own.mkdir()
        for path in (path for name in ("steps", "pipeline") for path in folder.glob(f"{name}*.*")):
            shutil.copy(path, own)
        done = CliRunner().invoke(app, ["predict", str(own)])
        assert done.exit_code == 0, done.output
        for path in map(Path, done.stdout.split()):
            assert path.read_text() == (folder / path.name).read_text(), path
    assert CliRunner().invoke(app, ["predict", str(tmp_path)]).exit_code == 2
