"""The placement of parameters against Megatron's own models, hand formulas and the compressor that sends the bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.simulation import placement
from experiments.simulation.placement import GPTShape, allocated_parameters, build, study_shape
from experiments.spec import matrix
from experiments.spec.settings import padded_vocabulary
from tests.low_rank import power_sgd

PAPER_STUDIES = ("gpt2_345m", "gpt2_2p5b_v100", "gpt2_12p1b_h100")
REFERENCE = Path(__file__).with_name("megatron_placement_reference.py")


def small(**changes: int | bool) -> GPTShape:
    values = {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32, "vocab_size": 500, "pipeline": 2}
    return GPTShape(**(values | changes))  # type: ignore[arg-type]


def test_names_order_and_shapes_equal_the_models_that_megatron_builds() -> None:
    pytest.importorskip("megatron.core")
    shapes = [study_shape(study) for study in PAPER_STUDIES]
    shapes += [small(), small(tensor=2, data=2), small(pipeline=1), small(pipeline=1, tied=False)]
    request = json.dumps([asdict(shape) | {"padded_vocab": shape.padded_vocab} for shape in shapes])
    done = subprocess.run([sys.executable, str(REFERENCE)], input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for shape, reference in zip(shapes, json.loads(done.stdout), strict=True):
        ours = [[[t.name, list(t.shape)] for t in stage.tensors] for stage in build(shape)]
        assert ours == reference, shape


@pytest.mark.parametrize(
    ("study", "unique", "allocated", "published"),
    [
        ("gpt2_345m", 354_823_168, 406_644_736, None),
        ("gpt2_2p5b_v100", 2_400_074_880, 2_498_223_360, 2.5e9),
        ("gpt2_12p1b_h100", 11_902_030_336, 12_085_240_832, 12.1e9),
    ],
)
def test_parameter_totals(study: str, unique: int, allocated: int, published: float | None) -> None:
    shape = study_shape(study)
    assert shape.unique_parameters == unique
    assert allocated_parameters(shape) == allocated
    # The names of the paper's models count the embedding of the first stage and its copy on the last one.
    if published is not None:
        assert allocated == pytest.approx(published, rel=0.002)


def test_padding_is_megatrons() -> None:
    assert padded_vocabulary(50257, 1) == 50304
    assert padded_vocabulary(50257, 2) == 50432
    assert padded_vocabulary(50257, 4) == 50688
    assert padded_vocabulary(50688, 4) == 50688


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
    assert sum(first.memory().values()) == 16 * first.parameters
    assert first.memory(rank)["error_feedback"] == 4 * (first.parameters - biases_and_norms)
    assert first.memory(rank)["factors"] == 4 * rank * (p + q)


@pytest.mark.parametrize("rank", [1, 4, 20, 24, 40, 64])
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
    virtual=st.sampled_from([1, 2]),
    per_chunk=st.integers(1, 3),
    vocab=st.integers(1, 3000),
    tied=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_stages_add_up_to_the_model(
    tensor: int, pipeline: int, virtual: int, per_chunk: int, vocab: int, tied: bool
) -> None:
    shape = small(
        layers=pipeline * virtual * per_chunk,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        vocab_size=vocab,
        tied=tied,
    )
    stages = build(shape)
    covered = sorted(layer for s in stages for first, end in s.layer_ranges for layer in range(first, end))
    assert covered == list(range(shape.layers))
    names = [(s.stage, t.name) for s in stages for t in s.tensors]
    assert len(set(names)) == len(names)
    copies = 1 if tied and pipeline * virtual == 1 else 2
    extra = copies * shape.padded_vocab - (1 if tied else 2) * vocab
    assert allocated_parameters(shape) == shape.unique_parameters + extra * shape.hidden
    sharded = sum(t.numel for s in stages for t in s.tensors if t.shape != t.full_shape)
    assert tensor == 1 or tensor * sharded == sum(
        prod(t.full_shape) for s in stages for t in s.tensors if t.shape != t.full_shape
    )


@given(low=st.integers(1, 200), more=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_bytes_grow_with_the_rank_and_never_exceed_dense(low: int, more: int) -> None:
    for stage in build(small(tensor=2)):
        fewer, payload = sum(stage.powersgd_payload(low)), sum(stage.powersgd_payload(low + more))
        assert fewer <= payload <= sum(stage.dense_payload())
        assert payload <= sum(stage.powersgd_payload(low + more, always=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 5}, "model.layers = 5 is not divisible by parallel.pipeline = 2"),
        ({"virtual": 4}, "parallel.virtual_pipeline = 8"),
        ({"tensor": 3}, "model.heads = 4 is not divisible by parallel.tensor = 3"),
        ({"heads": 5}, "model.hidden = 64 is not divisible by model.heads = 5"),
        ({"ffn_hidden": 130, "tensor": 4}, "model.ffn_hidden = 130 is not divisible by parallel.tensor = 4"),
        ({"data": 0}, "data = 0"),
    ],
)
def test_what_cannot_be_split_is_a_user_error(changes: dict[str, int], named: str) -> None:
    with pytest.raises(UserError) as error:
        small(**changes, where="some.yaml")  # type: ignore[arg-type]
    assert named in str(error.value)
    assert "some.yaml" in str(error.value)


def test_rank_below_one_is_a_user_error() -> None:
    with pytest.raises(UserError, match="rank = 0"):
        build(small())[0].powersgd_payload(0)


@pytest.mark.parametrize("study", PAPER_STUDIES)
def test_paper_scale_runs_are_trainable_and_other_scales_have_none(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = matrix.Scale(scale="paper", title="paper", defaults={}, seeds=[1])
    monkeypatch.setattr(matrix, "load_scale", lambda name: scale)
    runs = {run.variant: run for run in matrix.runs(study, "paper")}
    expected = {"none", "int8", "int4", "topk", "randomk", "optimus_cc", "edgc_cqm", "edgc_cqm_int8"}
    expected |= {"powersgd_r16", "powersgd_r32", "powersgd_r64", "powersgd_r64_int8"}
    # A V100 has no bf16.
    assert set(runs) == expected | ({"bf16"} if study != "gpt2_2p5b_v100" else set())
    for run in runs.values():
        assert (run.train.iterations, run.train.lr_decay_iterations) == (230_000, 320_000)
        assert (run.train.lr, run.train.min_lr, run.train.clip_grad) == (1.5e-4, 1e-5, 1.0)
        assert (run.data.source, run.data.vocab_size, run.train.precision) == ("openwebtext", 50257, "fp32")
    edgc = runs["edgc_cqm"].edgc
    assert (edgc.method, edgc.policy, edgc.window, edgc.step_limit) == ("edgc", "cqm", 1000, 8)
    assert runs["powersgd_r32"].edgc.rank == 32
    monkeypatch.undo()
    assert matrix.runs(study, "ci") == []


@pytest.mark.parametrize(
    ("study", "sizes"),
    [
        ("gpt2_345m", (24, 1024, 16, 2, 4, 2, 64)),
        ("gpt2_2p5b_v100", (52, 1920, 24, 4, 4, 2, 64)),
        ("gpt2_12p1b_h100", (76, 3584, 28, 4, 4, 4, 128)),
    ],
)
def test_sizes_are_those_of_the_authors_scripts(study: str, sizes: tuple[int, ...]) -> None:
    run = placement.study_run(study)
    model, parallel = run.model, run.parallel
    found = (model.layers, model.hidden, model.heads, parallel.tensor, parallel.pipeline, parallel.data)
    assert (*found, run.train.global_batch) == sizes
    assert (run.train.micro_batch, model.sequence_length) == (4, 1024)
