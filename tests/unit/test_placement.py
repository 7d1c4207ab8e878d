"""Parameters of stages: hand formulas, published values and the compressor that sends the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.simulation import placement
from experiments.simulation.placement import (
    GPTShape,
    build,
    groups_sharing_a_node,
    shape_of,
)
from tests.low_rank import power_sgd


def small(**changes: int | bool) -> GPTShape:
    values = {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32, "vocab_size": 500, "pipeline": 2}
    return GPTShape(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("study", "unique", "allocated", "published"),
    [
        ("gpt2_345m", 354_823_168, 406_644_736, None),
        ("gpt2_2p5b_v100", 2_400_074_880, 2_498_223_360, 2.5e9),
        ("gpt2_12p1b_h100", 11_902_030_336, 12_085_240_832, 12.1e9),
    ],
)
def test_parameter_totals(study: str, unique: int, allocated: int, published: float | None) -> None:
    shape = shape_of(placement.study_run(study))
    assert shape.unique_parameters == unique
    assert shape.allocated_parameters == allocated
    # The names of the paper's models count the embedding of the first stage and its copy on the last one.
    if published is not None:
        assert allocated == pytest.approx(published, rel=0.002)


def test_one_stage_by_hand() -> None:
    # hidden 64, ffn 256, TP2: proj 64x32, qkv 96x64, fc1 128x64, fc2 64x128, 2 layers; vocabulary 512/2 x 64.
    first, last = build(small(tensor=2))
    biases_and_norms = 2 * (4 * 64 + 64 + 96 + 128 + 64)
    matrices = 2 * (64 * 32 + 96 * 64 + 128 * 64 + 64 * 128)
    assert first.parameters == matrices + biases_and_norms + 256 * 64 + 32 * 64
    assert last.parameters == matrices + biases_and_norms + 256 * 64 + 2 * 64
    assert (first.layers, last.layers) == ("0-1", "2-3")
    assert first.matrices[:2] == ((256, 64), (32, 64))
    assert first.dense_rest == biases_and_norms
    assert first.dense_payload() == (4 * first.parameters,)
    rank = 4
    p = 256 + 32 + 2 * (64 + 96 + 128 + 64)
    q = 64 + 64 + 2 * (32 + 64 + 64 + 128)
    assert first.powersgd_payload(rank) == (4 * (rank * p + biases_and_norms), 4 * rank * q)


@pytest.mark.parametrize("rank", [1, 20, 24, 64])
def test_bytes_equal_what_the_compressor_sends(rank: int) -> None:
    torch = pytest.importorskip("torch")
    from edgc.compressors.base import Channel, Gradient

    class Counting(Channel):
        def mean_(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            self.bytes += tensor.numel() * tensor.element_size()
            return tensor

    stage = build(small(tensor=2))[0]
    generator = torch.Generator().manual_seed(0)
    gradients = [Gradient(t.name, torch.randn(t.shape, generator=generator)) for t in stage.tensors]
    compressor = power_sgd(min_elements=EDGCConfig().min_compression_elements)
    sent = compressor.reduce(gradients, Counting(None), rank).bytes
    assert sent == sum(stage.powersgd_payload(rank))


@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    per_chunk=st.integers(1, 3),
    vocab=st.integers(1, 3000),
    tied=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_stages_add_up_to_the_model(tensor: int, pipeline: int, per_chunk: int, vocab: int, tied: bool) -> None:
    shape = small(
        layers=pipeline * per_chunk,
        tensor=tensor,
        pipeline=pipeline,
        vocab_size=vocab,
        tied=tied,
    )
    stages = build(shape)
    covered = [layer for s in stages for layer in s.layer_range]
    assert covered == list(range(shape.layers))
    names = [(s.stage, t.name) for s in stages for t in s.tensors]
    assert len(set(names)) == len(names)
    copies = 1 if tied and pipeline == 1 else 2
    extra = copies * shape.padded_vocab - (1 if tied else 2) * vocab
    assert shape.allocated_parameters == shape.unique_parameters + extra * shape.hidden
    # With one tensor-parallel rank nothing is sharded.
    whole = build(replace(shape, tensor=1, vocab_size=shape.padded_vocab))
    if shape.padded_vocab % 128 == 0:
        assert sum(stage.parameters for stage in whole) == shape.allocated_parameters


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 5}, "model.layers = 5 is not divisible by parallel.pipeline = 2"),
        ({"tensor": 3}, "model.heads = 4 is not divisible by parallel.tensor = 3"),
        ({"heads": 5}, "model.hidden = 64 is not divisible by model.heads = 5"),
        ({"ffn_hidden": 130, "tensor": 4}, "model.ffn_hidden = 130 is not divisible by parallel.tensor = 4"),
    ],
)
def test_what_cannot_be_split_is_a_user_error(changes: dict[str, int], named: str) -> None:
    with pytest.raises(UserError) as error:
        small(**changes, where="some.yaml")  # type: ignore[arg-type]
    assert named in str(error.value)
    assert "some.yaml" in str(error.value)


def test_placement_refusals() -> None:
    shape = GPTShape(layers=2, hidden=64, heads=4, sequence_length=32, vocab_size=500, tensor=2, pipeline=2, data=3)
    for nodes, gpus, words in (
        (4, 2, r"nodes \* gpus_per_node = 8, but tensor \* pipeline \* data = 12"),
        (4, 3, "gpus_per_node = 3 does not hold one tensor-parallel group"),
        (3, 4, "replicas on different nodes"),
    ):
        with pytest.raises(UserError, match=words):
            groups_sharing_a_node(shape, nodes, gpus)
    # one replica: a node may hold several stages, and nothing is reduced
    assert groups_sharing_a_node(replace(shape, data=1), 1, 4) == 4
