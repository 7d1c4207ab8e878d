"""What a stage's entropy is of, who waits for it, what its noise is, and what CQM makes of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgc.compressors import Channel, Gradient
from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.policies.base import History, Means, WindowEnd
from edgc.control.policies.cqm import CQM, CQMConfig
from edgc.control.rank_model import StageModel, next_rank
from edgc.engine import Engine
from edgc.entropy.estimators import estimate
from edgc.entropy.meter import EntropyMeter, embeddings
from edgc.errors import UserError
from edgc.measurement.report import NoisyMean
from edgc.runtime.device import masked_path
from edgc.sections import ESTIMATORS, EntropyConfig
from tests.host_reads import HostRead, NoHostReads

SHAPES = {"words": (96, 64), "layer": (64, 128)}
MODEL = StageModel([(256, 256), (256, 1024)])


def gradients(seed: int = 0, words: float = 8.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(seed)
    scales = {"words": words, "layer": 1.0}
    return [Gradient(name, scales[name] * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def config(**settings: Any) -> CQMConfig:
    entropy = {"iteration_rate": 1.0, "entry_rate": 1.0} | settings.pop("entropy", {})
    given = {"window": 4, "r_max": 16, "r_min": 4, "min_compression_elements": 64, "entropy": entropy}
    made = EDGCConfig.from_dict({"method": "edgc", "policy": "cqm", **given, **settings})
    assert isinstance(made, CQMConfig)
    return made


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.words.weight


def named(model: nn.Module) -> set[str]:
    found = embeddings(model)
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in found}


def test_embeddings_are_found_by_module_by_mark_and_by_what_the_model_says() -> None:
    assert named(Language(tied=False)) == {"words.weight", "places.weight"}
    assert named(Language(tied=True)) == {"words.weight", "places.weight", "head.weight"}
    marked = Language(tied=False)
    marked.head.weight.is_embedding_or_output_parameter = True  # as Megatron does
    assert named(marked) == {"words.weight", "places.weight", "head.weight"}


def test_embeddings_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, tie_word_embeddings=False))
    assert named(model) == {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}


@pytest.mark.parametrize("parameters", ["layers", "all"])
def test_what_counts_and_what_is_recorded_beside_it(parameters: str) -> None:
    meter = EntropyMeter(config(entropy={"parameters": parameters}, record_full_entropy=True), ["words"])
    given = gradients()
    meter.add(1, given)
    found = meter.close()
    words, layer = (estimate(gradient.tensor, "histogram") for gradient in given)
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    whole = (sizes[0] * words + sizes[1] * layer) / sum(sizes)
    assert (found.layers, found.embeddings) == pytest.approx((layer, words))
    assert found.embedding_share == pytest.approx(sizes[0] / sum(sizes))
    assert found.sampled == found.full == pytest.approx(layer if parameters == "layers" else whole)
    assert abs(words - layer) > 2, "or the two would be the same"


def test_a_stage_of_embeddings_alone_has_their_entropy() -> None:
    meter = EntropyMeter(config(), SHAPES)
    given = gradients()
    meter.add(1, given)
    found = meter.close()
    assert found.sampled == found.embeddings and math.isnan(found.layers)
    assert found.embedding_share == 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_entropy_is_that_of_the_gradient_without_its_loss_scale(estimator: str) -> None:
    found = []
    for scale in (1.0, 2.0**12):
        meter = EntropyMeter(config(entropy={"estimator": estimator}))
        meter.scale = scale
        meter.add(1, [Gradient(given.name, scale * given.tensor) for given in gradients()])
        found.append(meter.close().sampled)
    assert math.isfinite(found[0]) and found[1] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "sampling"), [("histogram", "diagonal"), ("gaussian", "strided"), ("histogram", "random")]
)
def test_nobody_waits_while_the_gradients_come_in_where_the_host_looks_at_no_value(
    estimator: str, sampling: str
) -> None:
    entropy = {"estimator": estimator, "sampling": sampling, "entry_rate": 0.25}
    for masked in (True, False):
        meter = EntropyMeter(config(entropy=entropy, record_full_entropy=True), ["words"])
        with masked_path(masked), nullcontext() if masked else pytest.raises(HostRead), NoHostReads():
            meter.add(1, gradients())


@pytest.mark.parametrize("source", ["local", "reduced"])
def test_entropy_of_what_a_reduction_is_given_or_leaves(source: str) -> None:
    class Doubled(Channel):
        def mean_(self, tensor: torch.Tensor) -> None:
            tensor.mul_(2)

    settings, meter = config(entropy={"source": source}), EntropyMeter(config())
    engine = Engine(settings, stage=0, stages=[[*SHAPES.values()]], iterations=16, open_channel=Doubled)
    engine.reduce(gradients(), None)
    engine.end_iteration()
    meter.add(1, gradients())
    assert engine.last is not None
    doubled = math.log(2) if source == "reduced" else 0  # what twice the entries add
    assert engine.last.entropy == pytest.approx(meter.close().sampled + doubled)


def test_the_decision_says_how_much_each_kind_has() -> None:
    settings = config(entropy={"parameters": "layers"})
    engine = Engine(settings, stage=0, stages=[[*SHAPES.values()]], iterations=16, embeddings=["words"])
    for iteration in range(1, 5):
        engine.reduce(gradients(iteration), None)
        engine.end_iteration()
    made = engine.decision
    assert made is not None
    assert made.entropy == made.entropy_layers
    assert made.entropy_embeddings[0] - made.entropy_layers[0] == pytest.approx(math.log(8), abs=0.05)
    assert made.embedding_share == (pytest.approx(6144 / 14336),)
    assert 0 < made.entropy_error[0] < 0.05


def test_the_error_of_a_mean_is_that_of_its_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    means, errors = [], []
    for _ in range(2000):
        mean = NoisyMean()
        for value in torch.randn(10, generator=generator).tolist():
            mean.add(value)
        means.append(mean.value)
        errors.append(mean.error**2)
    assert torch.tensor(errors).mean().sqrt().item() == pytest.approx(torch.tensor(means).std().item(), rel=0.05)


def test_cqm_keeps_the_error_of_what_the_entropy_is_of() -> None:
    shapes = [(96, 64), (256, 256), (256, 1024)]
    for parameters, model in (("layers", MODEL), ("all", StageModel(shapes))):
        settings = config(entropy={"parameters": parameters}, r_max=32, step_limit=100, warmup_fraction=0.0, window=2)
        controller = make_controller(settings, [shapes], 1000, embeddings=[(96, 64)])
        policy = controller._policy  # type: ignore[attr-defined]
        end = WindowEnd(10, (32,), 4, 32, History(reference=(32, -2.0, 0.0)))
        assert policy.target(-2.02, end).target == next_rank(model, 32, -2.0, -2.02)


def at(entropy: float, error: float, history: History) -> WindowEnd:
    history.entropy = Means(previous=history.entropy.now, now=entropy, error=error)
    return WindowEnd(10, (64,), 4, 64, history)


def test_a_decision_says_what_it_would_have_been_within_the_noise() -> None:
    policy, history = CQM(CQMConfig(), MODEL, 1, 100), History(reference=(64, -2.0, 0.03))
    found = policy.target(-2.05, at(-2.05, 0.04, history))
    assert found.low == pytest.approx(next_rank(MODEL, 64, -2.0, -2.10))
    assert found.high == pytest.approx(next_rank(MODEL, 64, -2.0, -2.00))
    assert found.low is not None and found.target is not None and found.high is not None
    assert found.low < found.target < found.high
    assert "standard error of 0.0500" in found.reason
    # As the docstring of CQMConfig says of the paper's largest model.
    hidden, tensor = 3584, 4
    layers = [(3 * hidden // tensor, hidden), (hidden, hidden // tensor), (hidden, hidden), (hidden, hidden)]
    assert 12 < next_rank(StageModel(layers), 64, -2.0, -2.03) < 16


@given(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=30), st.floats(0.001, 0.05))
def test_hysteresis_holds_the_rank_within_the_noise_and_lets_go_outside(changes: list[float], noise: float) -> None:
    policy, history = CQM(CQMConfig(hysteresis=2.0), MODEL, 1, 100), History(reference=(64, -2.0, 0.0))
    moved_at, of_move = -2.0, 0.0
    for change in changes:
        found = policy.target(-2.0 + change, at(-2.0 + change, noise, history))
        within = abs(-2.0 + change - moved_at) <= 2 * math.hypot(noise, of_move)
        assert (found.target is None) == within
        if not within:
            moved_at, of_move = -2.0 + change, noise
        again = CQM(CQMConfig(hysteresis=2.0), MODEL, 1, 100)
        again.load_state_dict(policy.state_dict())
        assert again.state_dict() == policy.state_dict()


@pytest.mark.parametrize("settings", [{"parameters": "words"}, {"entry_rate": 1.5}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        EntropyConfig(**settings)
