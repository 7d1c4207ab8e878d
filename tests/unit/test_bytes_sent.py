"""Bytes against W: what replicas send is what the formulas say, which the committed table is made of."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest

from edgc.config import EDGCConfig, Example
from experiments.common.files import KEPT
from experiments.simulation import bytes_sent
from paper_figures.bytes_sent import APART, spread
from tests import examples
from tests.strategy_cases import EXAMPLES

KEPT_TABLE = pd.read_csv(KEPT / "rehearsal" / "bytes_sent.csv")


@pytest.mark.parametrize("name", examples.FOUND)
def test_what_a_method_sends_is_what_its_formula_says(name: str) -> None:
    config, (_, example) = examples.config_of(name), examples.FOUND[name]
    tensors = bytes_sent.small()
    way = bytes_sent.way_of(config, example, tensors)
    for world in bytes_sent.COUNTED:
        counted = sum(bytes_sent.count_method(config, tensors, world).values())
        assert counted == pytest.approx(bytes_sent.method_bytes(config, example, tensors, world, way), rel=1e-12)


# Those with short rounds are counted by test_strategies.py: here what is added, embeddings and rounds of other lengths.
@pytest.mark.parametrize("name", ["dion", "diloco_powersgd", "sparseloco", "shared_mask_every"])
def test_what_a_strategy_sends_is_what_its_formula_says(name: str) -> None:
    kind, example = EXAMPLES[name]
    settings = bytes_sent.default_rounds(kind, example)
    assert settings.period == kind().period
    for world in (2, 4):
        counted = bytes_sent.count_strategy(settings, example, world)
        formula = bytes_sent.strategy_bytes(settings, example, bytes_sent.small(), world)
        assert counted == pytest.approx(formula, rel=1e-12)


def test_a_wrong_formula_is_found() -> None:
    tensors = bytes_sent.small()
    config, wrong = EDGCConfig.from_dict({"method": "topk", "density": 0.05}), Example(lambda m, n: 8 * m * n * 0.06)
    way = bytes_sent.way_of(config, wrong, tensors)
    counted = sum(bytes_sent.count_method(config, tensors, 4).values())
    assert bytes_sent.method_bytes(config, wrong, tensors, 4, way) > 1.1 * counted


def test_the_committed_table_has_every_example_and_is_what_the_formulas_say() -> None:
    rows = KEPT_TABLE.set_index(["example", "replicas"])
    assert set(KEPT_TABLE["example"]) == {*examples.FOUND, *EXAMPLES}, "make bytes"
    assert set(KEPT_TABLE["replicas"]) == set(bytes_sent.WORLDS)
    counted = KEPT_TABLE.dropna(subset="counted")
    assert set(counted["replicas"]) == set(bytes_sent.COUNTED) and len(counted) == 3 * len(KEPT_TABLE) / 8
    assert counted["counted"].to_numpy() == pytest.approx(counted["small"].to_numpy(), rel=1e-12)
    many = bytes_sent.gpt2()
    for name, (kind, example) in EXAMPLES.items():
        settings = bytes_sent.default_rounds(kind, example)
        for world in bytes_sent.WORLDS:
            formula = bytes_sent.strategy_bytes(settings, example, many, world)
            assert rows.loc[(name, world), "bytes"] == pytest.approx(formula), "make bytes"
    for name, (_, example) in examples.FOUND.items():
        ring = bytes_sent.method_bytes(examples.config_of(name), example, many, 2, bytes_sent.Way(0, name == "bf16"))
        assert rows.loc[(name, 2), "bytes"] == pytest.approx(ring), "make bytes"


def test_shares_of_gpt2_are_those_of_the_closed_forms() -> None:
    share = KEPT_TABLE.set_index(["example", "replicas"])["share"]
    entries = sum(math.prod(t.shape) for t in bytes_sent.gpt2())
    matrices = sum(math.prod(t.shape) for t in bytes_sent.gpt2() if len(t.shape) == 2)
    assert entries == pytest.approx(124.4e6, rel=1e-3)
    for world in bytes_sent.WORLDS:
        assert share["none", world] == pytest.approx(1)
        assert share["noloco", world] == pytest.approx(2 / 50 * world / (2 * (world - 1)))
        # 8 bytes for 5 % of the matrices' entries, to all others; vectors as they are.
        topk = (world / 2 * 0.05 * 2 * matrices + entries - matrices) / entries
        assert share["topk", world] == pytest.approx(topk, rel=1e-3)
    assert share["sparseloco", 256] == pytest.approx(0.029, rel=0.02)  # 64 of 4096 entries at 14 bits, every 30 steps
    assert share["demo", 2] == pytest.approx(32 * 6 / (4 * 64**2), rel=0.08)


def test_names_in_the_figure_are_moved_apart_and_stay_in_order() -> None:
    heights = [0.0, 0.01, 0.02, 0.5, 0.51, 1.0]
    moved = spread(heights)
    assert all(b - a >= APART - 1e-9 for a, b in itertools.pairwise(moved))
    assert sum(moved[:3]) == pytest.approx(sum(heights[:3])) and moved[-1] == 1.0
