"""Megatron-Core, DP2 x PP2: removing an attachment, traffic between stages, states that do not fit, frozen parts."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from edgc.config import EDGCConfig
from edgc.megatron import attach, cpu_shims
from edgc.runtime.groups import gather_objects
from experiments.spec.settings import RunConfig
from tests.integration.megatron_cases import EDGC, configuration, session_of, steps, train, weights
from tests.workers import Cases, refused, same

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from edgc.megatron import checkpoint
    from experiments.training import build as build_module
    from experiments.training.build import Session

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

POWERSGD: dict[str, Any] = {"method": "powersgd", "rank": 4}
TRAFFIC = {"rank": 4, "epilogue_only": False}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "bucket_elements": 15000}
SHARDED: dict[str, Any] = {**OVERLAP, "distributed_optimizer": True}
FP16: dict[str, Any] = {"precision": "fp16"}
UNTIED = {"tie_embeddings": False}


def end(session: Session) -> None:
    session.attachment.remove()
    parallel_state.destroy_model_parallel()


@case
def removed() -> None:
    """Three iterations with an attachment that compresses nothing and three after it was removed are six of Megatron's
    own."""
    for settings in ({}, OVERLAP, SHARDED, FP16):
        results = []
        for attached in (True, False):
            run = configuration("remove", {"method": "none", "fused_embedding": settings == {}}, train=settings)
            session = session_of(run)
            if not attached:
                session.attachment.remove()
            steps(session, run, 0, 3)
            groups = [g for chunk in session.chunks for g in chunk.bucket_groups]
            session.attachment.remove()
            session.attachment.remove()
            steps(session, run, 3, 6)
            results.append(weights(session))
            parallel_state.destroy_model_parallel()
            assert all(type(group) is _ParamAndGradBucketGroup for group in groups)
            assert not any(name.startswith("edgc") for group in groups for name in vars(group))
            assert "prepare_grads" not in vars(session.optimizer)
        # Fused, the sum of two means is rounded elsewhere than their two steps.
        assert torch.allclose(*results, rtol=1e-5, atol=1e-5) if not settings else torch.equal(*results), settings


@case
def pipeline() -> None:
    """``config.pipeline`` is attach's business, and a loop that does not use its communicator is told so."""
    run = configuration("traffic", {**POWERSGD, "pipeline": TRAFFIC})
    session = session_of(run)
    communicator = session.attachment.pipeline
    assert communicator is not None and communicator is session.pipeline
    steps(session, run, 0, 2)
    sends = parallel_state.get_pipeline_model_parallel_rank() == 1  # with its error feedback in the state
    assert (communicator.traffic.sent_compressed > 0) == sends
    assert list(session.attachment.state_dict()["pipeline"]["errors"]) == (["chunk0"] if sends else [])
    session.pipeline = None  # the loop of somebody who forgot it
    refused(lambda: steps(session, run, 2, 3), "attachment.pipeline", "begin_iteration(num_microbatches)")
    end(session)
    alone = configuration("alone", {**POWERSGD, "pipeline": TRAFFIC}, parallel={"pipeline": 1, "data": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = session_of(alone)
    steps(session, alone, 0, 1)
    end(session)
    messages = [str(item.message) for item in caught if "edgc" in str(item.message)]
    assert len(messages) == (dist.get_rank() == 0) and all("pipeline.rank" in message for message in messages)


@case
def states() -> None:
    """A state that does not fit is refused in one line."""
    run = configuration("state", POWERSGD)
    session = session_of(run)
    steps(session, run, 0, 2)
    attachment = session.attachment
    state = attachment.state_dict()
    place, engine = state["place"], state["engine"]
    other_place = {**place, "pipeline": 1 - place["pipeline"]}
    other_errors = {**engine["compressor"], "errors": {"x": torch.ones(2)}}
    for changed, *names in (
        ({**state, "rank": 1 - state["rank"]}, "this is rank"),
        ({**state, "place": other_place}, "pipeline parallel rank"),
        (None, "NoneType"),
        ({"world": 2, "rank": state["rank"]}, "engine"),
        ({**state, "engine": {key: value for key, value in engine.items() if key != "window"}}, "engine.window"),
        ({**state, "engine": {**engine, "compressor": other_errors}}, "error feedback of x, (2,)"),
    ):
        refused(lambda changed=changed: attachment.load_state_dict(changed), *names)  # type: ignore[misc]
    attachment.load_state_dict(state)
    end(session)
    other = configuration("state", {"method": "powersgd", "rank": 2})
    session = session_of(other)
    refused(lambda: session.attachment.load_state_dict(state), "rank = 4, now 2")
    session.attachment.load_state_dict(state, changed_settings=True)
    steps(session, other, 2, 3)
    assert session.attachment.last is not None and session.attachment.last.rank == 2
    end(session)


@case
def loss_scales() -> None:
    """Error feedback follows the loss scale that a run goes on with, a sixteenth of the saved one, whatever is loaded
    first."""
    # The same weights in all three: their learning rate is next to nothing.
    run = configuration("scale", POWERSGD, train={**FP16, "lr": 1e-12})
    session = session_of(run)
    steps(session, run, 0, 3)
    engine, state = session.attachment.engine, copy.deepcopy(session.attachment.state_dict())
    optimizers = getattr(session.optimizer, "chained_optimizers", [session.optimizer])
    scales = [optimizer.grad_scaler._scale for optimizer in optimizers]
    saved = [scale.clone() for scale in scales]
    norms = {}
    for order in ("as saved", "scale first", "scale last"):
        for scale, before in zip(scales, saved, strict=True):
            scale.copy_(before / (16 if order == "scale first" else 1))
        session.attachment.load_state_dict(state)
        for scale, before in zip(scales, saved, strict=True):
            scale.copy_(before / (1 if order == "as saved" else 16))
        unit = float(session.optimizer.get_loss_scale())
        steps(session, run, 3, 4)
        owed = torch.stack([error.double().norm() for error in engine.compressor.errors.values()]).norm()
        mean = torch.stack([p.main_grad.double().norm() for c in session.chunks for p in c.parameters()]).norm()
        norms[order] = (float(owed) / unit, float(mean))  # the optimizer has taken the scale off the mean
    end(session)
    for order in ("scale first", "scale last"):
        assert norms[order] == pytest.approx(norms["as saved"], rel=1e-6), order


@case
def bits() -> None:
    """Bytes are reckoned in the gradients' own type."""
    for precision in ("fp32", "bf16"):
        session = session_of(configuration("bits", POWERSGD, train={"precision": precision}))
        sizes = {8 * p.main_grad.element_size() for chunk in session.chunks for p in chunk.parameters()}
        assert {session.attachment.engine.monitor.gradient_bits} == sizes
        end(session)


# Which model chunks train nothing, by stage and number of the chunk.
FROZEN: dict[str, tuple[Callable[[int, int], bool], dict[str, dict[str, Any]]]] = {
    "last stage, overlap": (lambda stage, chunk: stage == 1, {"train": OVERLAP}),
    "first stage, overlap, distributed optimizer": (lambda stage, chunk: stage == 0, {"train": SHARDED}),
    "first stage, fp16": (lambda stage, chunk: stage == 0, {"train": FP16}),
    "chunks, overlap": (
        lambda stage, chunk: stage == chunk,
        {"parallel": {"virtual_pipeline": 2}, "model": {"layers": 4}, "train": {"overlap_grad_reduce": True}},
    ),
    "all": (lambda stage, chunk: True, {}),
}
SEARCH = {"r_max": None, "r_min": None, "search_start": 2, "search_repeats": 1, "cost_gate": True, "gate_interval": 4}


@contextlib.contextmanager
def freezing(frozen: Callable[[int, int], bool]) -> Iterator[None]:
    """Models that are built inside have such chunks frozen before they are wrapped."""
    make = build_module.build_model

    def build_frozen(*arguments: Any, vp_stage: int | None = None, **options: Any) -> Any:
        model = make(*arguments, vp_stage=vp_stage, **options)
        if frozen(parallel_state.get_pipeline_model_parallel_rank(), vp_stage or 0):
            model.requires_grad_(False)
        return model

    with mock.patch.object(build_module, "build_model", build_frozen):
        yield


@case
def frozen_parts() -> None:
    """Three iterations of an attachment that compresses nothing are those of Megatron alone."""
    ends = {}
    for name, (frozen, sections) in FROZEN.items():
        sections = {**sections, "model": {**UNTIED, **sections.get("model", {})}}
        with freezing(frozen):
            run = configuration("frozen", {"method": "none"}, **sections)
            ours, alone = (train(run, iterations=3, attached=on) for on in (True, False))
        assert torch.equal(ours["weights"], alone["weights"]), name
        assert ours["losses"] == pytest.approx(alone["losses"], nan_ok=True), name
        ends[name] = gather_objects(ours["weights"])
    for name, ranks in ends.items():
        moved = any(not torch.equal(one, other) for one, other in zip(ranks, ends["all"], strict=True))
        assert moved == (name != "all"), name


@case
def frozen_search() -> None:
    """EDGC with all its measurements beside a frozen stage; a gradient that is not finite; a checkpoint."""
    with tempfile.TemporaryDirectory() as own:
        root = gather_objects(own)[0]
        for stage, more, settings in ((0, {}, {}), (1, SEARCH, OVERLAP)):
            compression = {**EDGC, "alignment": "measured", "pipeline": TRAFFIC, **more}
            run = configuration("frozen", compression, model=UNTIED, train=settings)
            folder = Path(root) / f"{stage}" / "iter_0000016"

            def finish(session: Session, run: RunConfig, folder: Path) -> dict[str, Any]:
                attachment = session.attachment
                kept = copy.deepcopy(attachment.state_dict()["engine"]["compressor"])
                checkpoint.save(folder, attachment, iteration=16)
                refused(lambda: attach(session.chunks, run.edgc, iterations=16), "already have an attachment")
                assert checkpoint.load(folder, attachment) == 16
                assert same(kept, attachment.state_dict()["engine"]["compressor"])
                return {"errors": len(kept["errors"])}

            with freezing(lambda at, chunk, stage=stage: at == stage):  # type: ignore[misc]
                poison = frozenset({3} if stage == 0 else ())
                prepare = lambda session, run=run, folder=folder: partial(finish, session, run, folder)  # noqa: E731
                ranks = gather_objects(train(run, iterations=16, poison=poison, prepare=prepare))
            last = ranks[0]["decisions"][-1]
            for rank in ranks:
                assert repr(rank["decisions"]) == repr(ranks[0]["decisions"])
                assert rank["skipped"] == len(poison)
                assert rank["stage"] != stage or rank["errors"] == 0
            if stage == 0:  # no times say whether it pays, and the other stage is the first that counts
                assert last["phase"] == "active" and len(last["ranks"]) == 1 and last["ranks"][0] is not None
                assert all(rank["errors"] > 0 for rank in ranks if rank["stage"] == 1)
            else:
                assert last["phase"] in ("active", "disabled") and len(last["ranks"]) == 2


@case
def one_copy_frozen() -> None:
    """A tied embedding that only one of its stages trains is refused."""
    run = configuration("tied", {**POWERSGD, "fused_embedding": True})
    with freezing(lambda stage, chunk: stage == 0):
        refused(lambda: session_of(run), "one copy of the tied embedding is frozen")


class Sometimes(nn.Module):
    """Layers that are used always, in every second step, on one replica in every second step, and that are frozen in
    every second step."""

    NAMES = ("always", "second", "one", "frozen")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in self.NAMES})

    def forward(self, x: torch.Tensor, used: list[str]) -> torch.Tensor:
        return torch.stack([self.layers[name](x) for name in used]).sum(0)


@case
def not_always_trained() -> None:
    """Nothing is lost of a layer that is not trained in every step: what 40 steps computed is what moved the weights
    and what the replicas keep."""
    config = session_of(configuration("law", {"method": "none"})).chunks[0].config
    replicas, replica = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    for compression in (POWERSGD, {"method": "topk", "density": 0.1}, {"method": "quantize", "bits": 4}):
        torch.manual_seed(0)
        model = Sometimes()
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        plain = {"lr": 1.0, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.0, "params_dtype": torch.float32}
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", **plain), [chunk])
        feedback = EDGCConfig.from_dict({**compression, "min_compression_elements": 64})
        attachment = attach(chunk, feedback, iterations=40, optimizer=optimizer)
        matrices = {name: layer.weight for name, layer in model.layers.items()}
        moved = {name: weight.detach().double() for name, weight in matrices.items()}
        computed = {name: torch.zeros(32, 32, dtype=torch.float64) for name in matrices}
        for step in range(40):
            generator = torch.Generator().manual_seed(1000 * replica + step)
            x, t = torch.randn(2, 8, 32, generator=generator)
            odd = step % 2 == 1
            matrices["frozen"].requires_grad_(not odd)
            used = [name for name in matrices if not (odd and (name == "second" or (name == "one" and replica == 0)))]
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            (model(x, used) * t).sum().backward()
            chunk.finish_grad_sync()
            optimizer.step()
            for name in used:
                computed[name] += (t.T @ x).double() * (not odd or name != "frozen")
        kept, lost = attachment.state_dict()["engine"]["compressor"]["errors"], {}
        for name, weight in matrices.items():
            mean = torch.stack([computed[name], kept[f"layers.{name}.weight"].double()])
            dist.all_reduce(mean, group=replicas)
            mean /= 2
            arrived = moved[name] - weight.detach().double()
            lost[name] = float((arrived + mean[1] - mean[0]).norm() / mean[0].norm())
        attachment.remove()
        assert max(lost.values()) < 1e-5, (compression, lost)


test_megatron = case.test()
