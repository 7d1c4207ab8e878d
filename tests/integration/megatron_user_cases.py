"""What the ranks of ``test_megatron_users.py`` do: attach, detach, and states that do not fit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from edgc.config import EDGCConfig
from edgc.megatron import attach, cpu_shims
from edgc.runtime.device import masked_path
from experiments.spec.settings import RunConfig
from tests.integration.layout_cases import FP16, OVERLAP, SHARDED, UNTIED, VPP2
from tests.integration.megatron_cases import EDGC, _iteration, _same, configuration, session_of, train
from tests.workers import said

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from edgc.megatron import checkpoint
    from experiments.training import build as build_module
    from experiments.training.build import Session

POWERSGD = {"method": "powersgd", "rank": 4}
TRAFFIC = {"rank": 4, "epilogue_only": False}
HOW: dict[str, dict[str, Any]] = {
    "": {},
    ", overlap": OVERLAP,
    ", overlap, distributed optimizer": {**OVERLAP, **SHARDED},
    ", fp16": FP16,
}


def steps(session: Session, run: RunConfig, first: int, last: int) -> None:
    for iteration in range(first, last):
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        _iteration(session, run, iteration, parallel_state.get_data_parallel_rank())
        session.optimizer.step()


def weights(session: Session) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for c in session.chunks for p in c.parameters()])


def end(session: Session) -> None:
    session.attachment.close()
    parallel_state.destroy_model_parallel()


def closed() -> dict[str, dict[str, Any]]:
    """Three iterations with an attachment that compresses nothing and three after it was closed, against six of
    Megatron's own."""
    results: dict[str, dict[str, Any]] = {}
    for how, settings in HOW.items():
        found = {}
        for attached in (True, False):
            run = configuration("close", {"method": "none", "fused_embedding": how == ""}, train=settings)
            session = session_of(run)
            if not attached:
                session.attachment.close()
            steps(session, run, 0, 3)
            groups = [g for chunk in session.chunks for g in chunk.bucket_groups]
            session.attachment.close()
            session.attachment.close()
            steps(session, run, 3, 6)
            found[attached] = weights(session)
            found["restored"] = (
                all(type(group) is _ParamAndGradBucketGroup for group in groups)
                and not any(name.startswith(("edgc", "_edgc")) for group in groups for name in vars(group))
                and "prepare_grads" not in vars(session.optimizer)
            )
            parallel_state.destroy_model_parallel()
        results[how] = found
    return results


def pipeline() -> dict[str, Any]:
    """``config.pipeline`` is attach's business, and a loop that does not use its communicator is told so."""
    run = configuration("traffic", {**POWERSGD, "pipeline": TRAFFIC})
    session = session_of(run)
    communicator = session.attachment.pipeline
    steps(session, run, 0, 2)
    used = communicator is session.pipeline and communicator is not None
    sent = communicator.traffic.sent_compressed if communicator is not None else 0
    state = session.attachment.state_dict()
    kept = sorted(state["pipeline"]["errors"])
    session.pipeline = None  # the loop of somebody who forgot it
    answer = said(lambda: steps(session, run, 2, 3))
    end(session)
    alone = configuration("alone", {**POWERSGD, "pipeline": TRAFFIC}, parallel={"pipeline": 1, "data": 4})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = session_of(alone)
    steps(session, alone, 0, 1)
    end(session)
    messages = [str(item.message) for item in caught if "edgc" in str(item.message)]
    return {"used": used, "sent": sent, "kept": kept, "forgotten": answer, "one stage": messages}


def states() -> dict[str, str]:
    """What a state that does not fit is answered with."""
    run = configuration("state", POWERSGD)
    session = session_of(run)
    steps(session, run, 0, 2)
    attachment = session.attachment
    state = attachment.state_dict()
    place = state["place"]
    engine = state["engine"]
    answers = {
        "another replica": said(lambda: attachment.load_state_dict({**state, "rank": 1 - state["rank"]})),
        "another stage": said(
            lambda: attachment.load_state_dict(
                {**state, "place": {**place, "pipeline stage": 1 - place["pipeline stage"]}}
            )
        ),
        "none": said(lambda: attachment.load_state_dict(None)),  # type: ignore[arg-type]
        "no engine": said(lambda: attachment.load_state_dict({"world": 2, "rank": state["rank"]})),
        "no window": said(
            lambda: attachment.load_state_dict({**state, "engine": {k: v for k, v in engine.items() if k != "window"}})
        ),
        "other parameters": said(
            lambda: attachment.load_state_dict(
                {
                    **state,
                    "engine": {
                        **engine,
                        "compressor": {**engine["compressor"], "errors": {"x": torch.ones(2)}},
                    },
                }
            )
        ),
        "its own": said(lambda: attachment.load_state_dict(state)),
    }
    end(session)
    other = configuration("state", {"method": "powersgd", "rank": 2})
    session = session_of(other)
    answers["other settings"] = said(lambda: session.attachment.load_state_dict(state))
    answers["on purpose"] = said(lambda: session.attachment.load_state_dict(state, changed_settings=True))
    steps(session, other, 2, 3)
    last = session.attachment.last
    answers["rank in use"] = str(last.rank if last is not None else None)
    end(session)
    return answers


def scaled() -> dict[str, Any]:
    """A state of fp16 that goes on under a sixteenth of its loss scale, whatever is loaded first: norms of the error
    feedback in units of the gradient, and of that one's mean, after an iteration."""
    run = configuration("scale", POWERSGD, train=FP16)
    session = session_of(run)
    steps(session, run, 0, 3)
    engine, state = session.attachment.engine, copy.deepcopy(session.attachment.state_dict())
    optimizers = getattr(session.optimizer, "chained_optimizers", [session.optimizer])
    scales = [optimizer.grad_scaler._scale for optimizer in optimizers]
    saved = [scale.clone() for scale in scales]
    found = {}
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
        found[order] = (float(owed) / unit, float(mean))  # the optimizer has taken the scale off the mean
    end(session)
    return found


def bits() -> list[tuple[float, float]]:
    """Mean bits of an entry that the engine reckons with, and what the buffers have."""
    found = []
    for precision in ("fp32", "bf16"):
        run = configuration("bits", POWERSGD, train={"precision": precision})
        session = session_of(run)
        sizes = {8 * p.main_grad.element_size() for chunk in session.chunks for p in chunk.parameters()}
        found.append((session.attachment.engine.monitor.gradient_bits, float(*sizes)))
        end(session)
    return found


def masked() -> dict[str, dict[str, Any]]:
    """The path of a GPU, without a thread, beside that of a CPU."""
    results = {}
    for name, compression in {
        "powersgd": POWERSGD,
        "edgc": EDGC,
        "int8": {**POWERSGD, "factor_dtype": "int8"},
        "int6": {**POWERSGD, "factor_dtype": "int6"},
    }.items():
        for how in ("", ", overlap", ", overlap, distributed optimizer"):
            for on in (False, True):
                with masked_path(on):
                    run = configuration("masked", compression, train=HOW[how])
                    results[f"{name}{how}, {on}"] = train(run, iterations=8, poison=frozenset({4}))
    return results


# Which model chunks train nothing, by stage and number of the chunk.
FROZEN: dict[str, tuple[Callable[[int, int], bool], dict[str, dict[str, Any]]]] = {
    "last stage, overlap": (lambda stage, chunk: stage == 1, {"train": OVERLAP}),
    "first stage, overlap, distributed optimizer": (lambda stage, chunk: stage == 0, {"train": {**OVERLAP, **SHARDED}}),
    "first stage, fp16": (lambda stage, chunk: stage == 0, {"train": FP16}),
    "chunks, overlap": (
        lambda stage, chunk: stage == chunk,
        {"parallel": VPP2, "model": {"layers": 4}, "train": {"overlap_grad_reduce": True}},
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


def frozen_parts() -> dict[str, dict[bool, Any]]:
    """Three iterations of an attachment that compresses nothing, and of Megatron alone."""
    results: dict[str, dict[bool, Any]] = {}
    for name, (frozen, sections) in FROZEN.items():
        sections = {**sections, "model": {**UNTIED, **sections.get("model", {})}}
        with freezing(frozen):
            run = configuration("frozen", {"method": "none"}, **sections)
            results[name] = {on: train(run, iterations=3, attached=on) for on in (True, False)}
    return results


def frozen_search(root: str) -> dict[str, dict[str, Any]]:
    """EDGC with all its measurements beside a frozen stage; a gradient that is not finite; a checkpoint."""
    results: dict[str, dict[str, Any]] = {}
    for stage, more, settings in ((0, {}, {}), (1, SEARCH, OVERLAP)):
        compression = {**EDGC, "alignment": "measured", "pipeline": TRAFFIC, **more}
        run = configuration("frozen", compression, model=UNTIED, train=settings)
        folder = Path(root) / f"{stage}" / "iter_0000016"

        def prepare(session: Session, run: RunConfig = run, folder: Path = folder) -> Callable[[], dict[str, Any]]:
            def finish() -> dict[str, Any]:
                attachment = session.attachment
                kept = copy.deepcopy(attachment.state_dict()["engine"]["compressor"])
                checkpoint.save(folder, attachment, iteration=16)
                return {
                    "attached again": said(lambda: attach(session.chunks, run.edgc, iterations=16)),
                    "errors": len(kept["errors"]),
                    "loaded": checkpoint.load(folder, attachment),
                    "as saved": _same(kept, attachment.state_dict()["engine"]["compressor"]),
                }

            return finish

        with freezing(lambda at, chunk, stage=stage: at == stage):  # type: ignore[misc]
            poison = frozenset({3} if stage == 0 else ())
            results[f"stage {stage}"] = train(run, iterations=16, poison=poison, prepare=prepare)
    return results


def one_copy_frozen() -> str:
    """The answer to a tied embedding that only one of its stages trains."""
    run = configuration("tied", {**POWERSGD, "fused_embedding": True})
    with freezing(lambda stage, chunk: stage == 0):
        return said(lambda: session_of(run))


class Sometimes(nn.Module):
    """Layers that are used always, in every second step, on one replica in every second step, and that are frozen in
    every second step."""

    NAMES = ("always", "second", "one", "frozen")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in self.NAMES})

    def forward(self, x: torch.Tensor, used: list[str]) -> torch.Tensor:
        return torch.stack([self.layers[name](x) for name in used]).sum(0)


FEEDBACK: dict[str, dict[str, Any]] = {
    "powersgd": POWERSGD,
    "int8": {**POWERSGD, "factor_dtype": "int8"},
    "topk": {"method": "topk", "density": 0.1},
    "randomk": {"method": "randomk", "density": 0.1},
    "quantize": {"method": "quantize", "bits": 4},
    "sign": {"method": "sign"},
}


def law() -> dict[str, dict[str, float]]:
    """How far, relative to it, what 40 steps computed is from what moved the weights and what the replicas keep."""
    config = session_of(configuration("law", {"method": "none"})).chunks[0].config
    replicas, replica = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    results: dict[str, dict[str, float]] = {}
    for method, compression in FEEDBACK.items():
        torch.manual_seed(0)
        model = Sometimes()
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        plain = {"lr": 1.0, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.0, "params_dtype": torch.float32}
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", **plain), [chunk])
        feedback = EDGCConfig.from_dict({**compression, "min_compression_elements": 64})
        attachment = attach(chunk, feedback, iterations=40, optimizer=optimizer)
        weights = {name: layer.weight for name, layer in model.layers.items()}
        moved = {name: weight.detach().double() for name, weight in weights.items()}
        computed = {name: torch.zeros(32, 32, dtype=torch.float64) for name in weights}
        for step in range(40):
            generator = torch.Generator().manual_seed(1000 * replica + step)
            x, t = torch.randn(2, 8, 32, generator=generator)
            odd = step % 2 == 1
            weights["frozen"].requires_grad_(not odd)
            used = [name for name in weights if not (odd and (name == "second" or (name == "one" and replica == 0)))]
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            (model(x, used) * t).sum().backward()
            chunk.finish_grad_sync()
            optimizer.step()
            for name in used:
                computed[name] += (t.T @ x).double() * (not odd or name != "frozen")
        kept = attachment.state_dict()["engine"]["compressor"]["errors"]
        for name, weight in weights.items():
            mean = torch.stack([computed[name], kept[f"layers.{name}.weight"].double()])
            dist.all_reduce(mean, group=replicas)
            mean /= 2
            arrived = moved[name] - weight.detach().double()
            results.setdefault(method, {})[name] = float((arrived + mean[1] - mean[0]).norm() / mean[0].norm())
        attachment.close()
    return results


def all_cases(root: str) -> dict[str, Any]:
    cpu_shims.install()
    return {
        "frozen": frozen_parts(),
        "frozen search": frozen_search(root),
        "one copy frozen": one_copy_frozen(),
        "law": law(),
        "closed": closed(),
        "pipeline": pipeline(),
        "states": states(),
        "scaled": scaled(),
        "bits": bits(),
        "masked": masked(),
    }
