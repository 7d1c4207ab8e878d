"""What the ranks of ``test_pipeline.py`` do: compressed backward traffic under Megatron's schedules, one launch."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from edgc.errors import UserError
from edgc.megatron import cpu_shims
from edgc.megatron.pipeline_schedule import BackwardSchedule
from edgc.sections import PipelineConfig
from tests.integration import megatron_cases
from tests.integration.megatron_cases import configuration, session_of, train

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from edgc.megatron.pipeline_traffic import CompressedP2P
    from experiments.spec.settings import RunConfig
    from experiments.training.build import Session

RANK = 4
PP4 = {"pipeline": 4, "data": 1}
PP2VPP2 = {"pipeline": 2, "virtual_pipeline": 2, "data": 2}
TP2PP2 = {"tensor": 2, "pipeline": 2, "data": 1}
LONG, SHORT = 12, 3
FLUSH = {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}


def settings(parallel: dict[str, Any], micro_batches: int = 6, precision: str = "fp32", **pipeline: Any) -> RunConfig:
    sequences = micro_batches * 2 * parallel["data"]
    return configuration(
        "pipeline",
        {"method": "none", "pipeline": pipeline},
        model={"layers": 4},
        parallel={"data": 1, **parallel},
        train={"global_batch": sequences, "precision": precision},
    )


class Recorder:
    """Sees from outside what this rank sends and receives; optionally changes Megatron's settings first."""

    def __init__(self, session: Session, always_factor: bool = False, **megatron: Any) -> None:
        self.session = session
        config = session.chunks[0].config
        for key, value in megatron.items():
            assert hasattr(config, key)
            setattr(config, key, value)
        self.pipeline = session.pipeline
        self.sent: Tensor | float = 0.0
        self.received: Tensor | float = 0.0
        self.flags: dict[str, list[bool]] = {"sent": [], "received": []}
        self.seen: list[Any] = []
        if self.pipeline is None:
            return
        self.pipeline.compressor.always_factor = always_factor
        self._wrap(self.pipeline)

    def _wrap(self, pipeline: CompressedP2P) -> None:
        communicate, outgoing, incoming = pipeline._communicate, pipeline._outgoing, pipeline._incoming

        def recorded(**given: Any) -> Any:
            activation, gradient, requests = communicate(**given)
            if given["tensor_send_prev"] is not None:
                self.sent = self.sent + given["tensor_send_prev"].double()
            if gradient is not None and given.get("wait_on_reqs", True):
                self.received = self.received + gradient.detach().double()
            if requests:
                self.seen.append(type(requests))
            return activation, gradient, requests

        def leaving(gradient: Tensor) -> Tensor:
            message = outgoing(gradient)
            self.flags["sent"].append(message is not gradient)
            return message

        def arriving(gradient: Tensor) -> Any:
            message, finish = incoming(gradient)
            self.flags["received"].append(message is not gradient)
            return message, finish

        pipeline._communicate, pipeline._outgoing, pipeline._incoming = (  # type: ignore[method-assign]
            recorded,
            leaving,
            arriving,
        )

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"sent": self.sent, "received": self.received, "flags": self.flags}
        if self.pipeline is not None:
            traffic = self.pipeline.traffic
            found |= {
                "state": self.pipeline.compressor.state_dict(),
                "traffic": {
                    key: getattr(traffic, key)
                    for key in (
                        "sent",
                        "received",
                        "sent_compressed",
                        "received_compressed",
                        "dense_bytes",
                    )
                },
                "traffic_bytes": traffic.statistics.bytes,
                "relative_error": traffic.statistics.worker_error,
                "seconds": (traffic.statistics.compress.seconds, traffic.statistics.decompress.seconds),
                "asynchronous": len(self.seen),
                "tensor": parallel_state.get_tensor_model_parallel_rank(),
            }
        return found


def recorded(**options: Any) -> Callable[[Session], Callable[[], dict[str, Any]]]:
    return lambda session: Recorder(session, **options).result


def run(parallel: dict[str, Any], iterations: int, options: Any = None, **given: Any) -> dict[str, Any]:
    return train(settings(parallel, **given), iterations=iterations, prepare=recorded(**(options or {})))


def _steps(session: Session, run: RunConfig, first: int, last: int) -> list[float]:
    losses = []
    for iteration in range(first, last):
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        losses.append(megatron_cases._iteration(session, run, iteration, 0))
        session.optimizer.step()
        session.scheduler.step(increment=1)
    return losses


def _weights(session: Session) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for c in session.chunks for p in c.parameters()])


def resumed(parallel: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Three iterations more: without stopping, from saved state, and from saved state without that of the links."""
    run = settings(parallel, rank=RANK, **given)
    session = session_of(run)
    _steps(session, run, 0, SHORT)
    assert session.pipeline is not None
    model = [copy.deepcopy(chunk.state_dict()) for chunk in session.chunks]
    optimizer = copy.deepcopy(session.optimizer.state_dict())
    scheduler = copy.deepcopy(session.scheduler.state_dict())
    saved = io.BytesIO()
    torch.save(session.pipeline.compressor.state_dict(), saved)
    found = {"straight": (_steps(session, run, SHORT, 2 * SHORT), _weights(session))}
    for case in ("resumed", "forgetful"):
        session = session_of(run)
        assert session.pipeline is not None
        for chunk, state in zip(session.chunks, model, strict=True):
            chunk.load_state_dict(state)
        session.optimizer.load_state_dict(copy.deepcopy(optimizer))
        session.scheduler.load_state_dict(scheduler)
        if case == "resumed":
            saved.seek(0)
            session.pipeline.compressor.load_state_dict(torch.load(saved))
        found[case] = (_steps(session, run, SHORT, 2 * SHORT), _weights(session))
    return found


def poisoned() -> dict[str, Any]:
    """One gradient that the last stage sends is not finite: what every stage's gradients and state are afterwards."""
    run = settings(PP4, rank=RANK)
    session = session_of(run)
    _steps(session, run, 0, 1)
    pipeline = session.pipeline
    assert pipeline is not None
    before, outgoing, sent = pipeline.compressor.state_dict(), pipeline._outgoing, []

    def spoil(gradient: Tensor) -> Tensor:
        sent.append(gradient)
        if session.is_last_stage and len(sent) == 6:
            gradient[0, 0, 0] = float("inf")
        return outgoing(gradient)

    pipeline._outgoing = spoil  # type: ignore[method-assign]
    for chunk in session.chunks:
        chunk.zero_grad_buffer()
    megatron_cases._iteration(session, run, 1, 0)
    finite = [bool(p.main_grad.isfinite().all()) for c in session.chunks for p in c.parameters()]
    state = {key: next(iter(value.values()), None) for key, value in pipeline.compressor.state_dict().items()}
    return {
        "stage": session.stage,
        "finite": all(finite),
        "skipped": pipeline.traffic.statistics.skipped,
        "state_finite": all(bool(t.isfinite().all()) for t in state.values() if t is not None),
        "state_moved": any(
            t is not None and not torch.equal(t, next(iter(before[key].values()))) for key, t in state.items()
        ),
    }


def mistakes() -> dict[str, str]:
    """The line that each mistake of a user is answered with."""
    run = settings(PP4, rank=RANK)
    session = session_of(run)
    pipeline, config = session.pipeline, session.chunks[0].config
    assert pipeline is not None
    found = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UserError as error:
            found[name] = str(error)

    group = parallel_state.get_pipeline_model_parallel_group()
    for key in ("variable_seq_lengths", "use_ring_exchange_p2p", "mtp_standalone"):
        changed = copy.copy(config)
        setattr(changed, key, True)
        attempt(
            key,
            lambda changed=changed: CompressedP2P(pp_group=group, config=changed, pipeline=PipelineConfig(rank=2)),
        )
    # Nothing is sent: a plan that is empty on every rank is noticed before.
    gradient = torch.zeros(16, 2, 48)
    attempt("not_begun", lambda: pipeline._outgoing(gradient))
    pipeline.begin_iteration(3)
    attempt("unfinished", lambda: pipeline.begin_iteration(3))
    return found


def against_megatron() -> int:
    """How many schedules were compared with Megatron's own counting."""
    compared = 0
    for stages, chunks, more, extra, micro_batches in itertools.product(
        (2, 3, 4, 8), (None, 1, 2, 4), (0, 1, 3), (0, 1), (1, 2, 5, 8, 9)
    ):
        group = stages + more
        if chunks is None and (more or extra):
            continue
        schedule = BackwardSchedule(stages=stages, chunks=chunks, group=group, extra_warmup=extra if chunks else 0)
        table = schedules.get_schedule_table(micro_batches, chunks or 1, group)
        if chunks is not None:
            assert schedule.steps(micro_batches) == [chunks - chunk - 1 for _, chunk in table]
        for stage in range(stages):
            other = SimpleNamespace(
                pp_group=SimpleNamespace(size=lambda n=stages: n, rank=lambda n=stage: n),
                virtual_pipeline_model_parallel_size=chunks,
            )
            _, _, warmup, _ = schedules.get_pp_rank_microbatches(
                micro_batches,
                chunks or 1,
                group,
                overlap_moe_expert_parallel_comm=bool(extra),
                p2p_communicator=other,
            )
            assert schedule.warmup(stage, micro_batches) == warmup
            compared += 1
    return compared


def cases() -> dict[str, Callable[[], Any]]:
    low = {"rank": RANK}
    epilogue = {**low, "epilogue_only": True}
    full = {"rank": 256}
    return {
        "compared": lambda: against_megatron(),
        "mistakes": lambda: mistakes(),
        "megatron": lambda: run(PP4, LONG),
        "too_large": lambda: run(PP4, SHORT, **full),
        "full": lambda: run(PP4, LONG, {"always_factor": True}, **full),
        "rank4": lambda: run(PP4, LONG, **low),
        "batch": lambda: run(PP4, SHORT, {"batch_p2p_comm": True}, **low),
        "no_feedback": lambda: run(PP4, LONG, **low, error_feedback=False),
        "epilogue": lambda: run(PP4, LONG, **epilogue),
        "epilogue_few": lambda: run(PP4, SHORT, micro_batches=2, **epilogue),
        "bf16": lambda: run(PP4, LONG, precision="bf16", **low, factor_dtype="bf16"),
        "interleaved_megatron": lambda: run(PP2VPP2, LONG),
        "interleaved_full": lambda: run(PP2VPP2, LONG, {"always_factor": True}, **full),
        "interleaved": lambda: run(PP2VPP2, LONG, **low),
        "interleaved_batch": lambda: run(PP2VPP2, SHORT, {"batch_p2p_comm": True}, **low),
        "interleaved_overlap": lambda: run(PP2VPP2, SHORT, {"overlap_p2p_comm": True}, **low),
        "interleaved_flush": lambda: run(PP2VPP2, SHORT, FLUSH, **low),
        "interleaved_epilogue": lambda: run(PP2VPP2, SHORT, **epilogue),
        "interleaved_epilogue_overlap": lambda: run(PP2VPP2, SHORT, FLUSH, **epilogue),
        "tp2_megatron": lambda: run(TP2PP2, LONG),
        "tp2": lambda: run(TP2PP2, LONG, **low),
        "resumed": lambda: resumed(PP4),
        "resumed_epilogue": lambda: resumed(PP4, epilogue_only=True),
        "poisoned": lambda: poisoned(),
    }


def all_cases(*only: str) -> dict[str, Any]:
    cpu_shims.install()
    return {name: case() for name, case in cases().items() if not only or name in only}
