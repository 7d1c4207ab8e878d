"""The network of limited bandwidth: it is there, it limits, and nothing of it stays."""

from __future__ import annotations

import itertools
import signal
import subprocess

import pytest

from edgc.errors import UserError
from experiments.bench import network, testbed
from experiments.bench.collectives import KINDS, bytes_sent
from experiments.bench.gpt import Size
from experiments.bench.workers import ranks

pytestmark = [pytest.mark.root, pytest.mark.slow]
MEGABIT = 1e6
ENTRIES, FEW = 500_000, 16_000
SIZE = Size(layers=1, hidden=8, heads=1, vocabulary=16, sequence=4, batch=1)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    reason = testbed.missing()
    if reason is not None:
        pytest.skip(reason)


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def test_collectives_take_what_the_limit_says_and_nothing_stays() -> None:
    before = namespaces()
    with testbed.Testbed(2) as net:
        assert len(namespaces() - before) == 3
        with ranks(network.Rank, 2, testbed=net, size=SIZE) as group:
            seconds = {}
            for rate, (kind, entries) in itertools.product(
                (20.0, 100.0, None), itertools.product(KINDS, (ENTRIES, FEW))
            ):
                net.limit(rate)
                runs = [group.ask("collective", kind=kind, entries=entries) for _ in range(3)]
                seconds[rate, kind, entries] = min(max(rank["seconds"] for rank in run) for run in runs)
                for rank in (rank for run in runs for rank in run):
                    # What is counted, and headers and acknowledgements.
                    assert 1 < rank["wire"] / bytes_sent(kind, entries, 2) < 1.2
            for kind in KINDS:
                for rate in (20.0, 100.0):
                    expected = 8 * bytes_sent(kind, ENTRIES, 2) / (rate * MEGABIT)
                    # Little passes freely; a busy machine may take longer, but not several times.
                    assert 0.95 * expected < seconds[rate, kind, ENTRIES] < 4 * expected
                assert seconds[20.0, kind, FEW] > 0.6 * 8 * bytes_sent(kind, FEW, 2) / (20 * MEGABIT)
                assert seconds[None, kind, ENTRIES] < seconds[20.0, kind, ENTRIES]
    assert namespaces() == before


def test_a_failure_inside_leaves_nothing() -> None:
    before, handler = namespaces(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"inside"), testbed.Testbed(1):
        raise RuntimeError("inside")
    assert namespaces() == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_what_a_killed_process_left_is_removed() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    name = f"edgc-{process.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with testbed.Testbed(1) as one, testbed.Testbed(1) as other:
        assert name not in namespaces()
        assert {one.host(0), other.host(0)} <= namespaces()


def test_a_limit_that_the_kernel_refuses_is_one_line() -> None:
    with testbed.Testbed(1) as net, pytest.raises(UserError, match=r"`tc .*` failed"):
        net.limit(0)


def test_bytes_counted_by_a_training_step_are_those_on_the_wire() -> None:
    size = Size(layers=2, hidden=64, heads=2, vocabulary=256, sequence=16, batch=1)
    low = ({**method, "rank": 4} for method in network.METHODS.values() if method.get("rank", 4) <= 32)
    wanted = {f"{index}": method for index, method in enumerate(low)}
    with testbed.Testbed(2) as net, ranks(network.Rank, 2, testbed=net, size=size) as group:
        for name, settings in wanted.items():
            group.ask("prepare", name=name, options=settings)
            for rank in group.ask("step", name=name):
                # Besides: headers, acknowledgements, the handshake of each message, two barriers.
                assert rank["bytes"] <= rank["wire"] <= 1.15 * rank["bytes"] + 12_000, name
