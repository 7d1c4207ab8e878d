"""What the ranks of ``test_megatron_users.py`` do: attach, detach, and states that do not fit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from edgc.megatron import cpu_shims
from edgc.runtime.device import masked_path
from experiments.spec.settings import RunConfig
from tests.integration.layout_cases import FP16, OVERLAP, SHARDED
from tests.integration.megatron_cases import EDGC, _iteration, configuration, session_of, train
from tests.workers import said

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

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


def all_cases() -> dict[str, Any]:
    cpu_shims.install()
    return {
        "closed": closed(),
        "pipeline": pipeline(),
        "states": states(),
        "scaled": scaled(),
        "bits": bits(),
        "masked": masked(),
    }
