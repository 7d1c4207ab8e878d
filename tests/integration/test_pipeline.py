"""Compressed backward traffic under Megatron-Core: four gloo processes, 1F1B and interleaved, one launch."""

from __future__ import annotations

import copy
import io
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.megatron import cpu_shims
from edgc.runtime.groups import gather_objects
from edgc.sections import PipelineConfig
from tests.integration.megatron_cases import (
    Ranks,
    _iteration,
    configuration,
    learns,
    losses,
    session_of,
    steps,
    train,
    weights,
)
from tests.workers import Cases, refused

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from edgc.megatron.pipeline_traffic import BackwardSchedule, CompressedP2P
    from experiments.spec.settings import RunConfig
    from experiments.training.build import Session

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

RANK = 4
PP4 = {"pipeline": 4, "data": 1}
PP2VPP2 = {"pipeline": 2, "virtual_pipeline": 2, "data": 2}
TP2PP2 = {"tensor": 2, "pipeline": 2, "data": 1}
LONG, SHORT = 8, 3
FLUSH = {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}
TOKENS, HIDDEN = 32, 48  # of a micro-batch
DENSE, FACTORS = 4 * TOKENS * HIDDEN, 4 * RANK * (TOKENS + HIDDEN)  # bytes of a gradient


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
        pipeline: Any = self.pipeline
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

        pipeline._communicate, pipeline._outgoing, pipeline._incoming = recorded, leaving, arriving

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"sent": self.sent, "received": self.received, "flags": self.flags}
        if self.pipeline is not None:
            traffic, keys = self.pipeline.traffic, ("sent", "received", "sent_compressed", "received_compressed")
            result |= {
                "state": self.pipeline.compressor.state_dict(),
                "traffic": {key: getattr(traffic, key) for key in (*keys, "dense_bytes")},
                "traffic_bytes": traffic.statistics.bytes,
                "relative_error": traffic.statistics.worker_error,
                "seconds": traffic.statistics.compress.seconds,
                "asynchronous": len(self.seen),
                "tensor": parallel_state.get_tensor_model_parallel_rank(),
            }
        return result


def run(parallel: dict[str, Any], iterations: int, options: dict[str, Any] | None = None, **given: Any) -> Ranks:
    """Results of all ranks, on every rank."""
    prepare = lambda session: Recorder(session, **(options or {})).result  # noqa: E731
    return gather_objects(train(settings(parallel, **given), iterations=iterations, prepare=prepare))


def same_run(one: Ranks, other: Ranks, iterations: int = SHORT) -> bool:
    return torch.equal(losses(one)[:iterations], losses(other)[:iterations])


def traffic(ranks: Ranks, key: str) -> list[int]:
    return [rank["traffic"][key] for rank in ranks]


@case
def counting() -> None:
    """The schedule is Megatron's own."""
    compared = 0
    assert BackwardSchedule(stages=1).sent(0, 4) == []
    for stages, chunks, more, micro_batches in itertools.product(
        (2, 3, 4, 8), (None, 1, 2, 4), (0, 1, 3), (1, 2, 5, 8, 9)
    ):
        group = stages + more
        if chunks is None and more:
            continue
        schedule = BackwardSchedule(stages=stages, chunks=chunks, group=group)
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
                p2p_communicator=other,
            )
            assert schedule.warmup(stage, micro_batches) == warmup
            # Both ends of a link see the same gradients: chunk c of the last stage is followed by c + 1 of the first.
            sent, last = schedule.sent((stage + 1) % stages, micro_batches), stage == stages - 1
            needed = [c for c in schedule.steps(micro_batches) if not (last and c == (chunks or 1) - 1)]
            assert [c - 1 if last else c for c in sent] == needed
            assert 0 <= schedule.cooldown(stage, micro_batches) <= len(sent)
            compared += 1
    assert compared > 200


def full_rank_is_no_compression(reference: Ranks, full: Ranks) -> None:
    assert (losses(full) - losses(reference)).abs().max() < 1e-5 * losses(reference).max()
    assert sum(traffic(full, "sent_compressed")) == sum(traffic(full, "sent")) > 0
    different = [not torch.equal(f["weights"], r["weights"]) for f, r in zip(full, reference, strict=True)]
    assert any(different), "nothing was factored: the comparison would be empty"


def nothing_is_lost(ranks: Ranks, tolerance: float = 1e-5) -> None:
    """What was sent is what arrived plus what is kept, on every link of a pipeline of one rank a stage."""
    for receiver, sender in itertools.pairwise(ranks):
        missing = sender["sent"] - receiver["received"]
        kept = sum(error.double() for error in sender["state"]["errors"].values())
        assert kept.norm() > 0 and (missing.flatten() - kept.flatten()).norm() < tolerance * kept.norm()


def epilogue(ranks: Ranks, sent: list[int], compressed: list[int]) -> None:
    """Exactly what the receiver uses in its cool-down is compressed."""
    assert traffic(ranks, "sent") == sent and traffic(ranks, "sent_compressed") == compressed
    by_stage = {(rank["stage"], rank["replica"]): rank for rank in ranks}
    stages = max(stage for stage, _ in by_stage) + 1
    for (stage, replica), rank in by_stage.items():
        sender = by_stage[(stage + 1) % stages, replica]
        assert rank["flags"]["received"] == sender["flags"]["sent"], "both ends must agree on every transfer"
        assert traffic([rank], "received_compressed") == traffic([sender], "sent_compressed")
        count, low = sender["traffic"]["sent"], sender["traffic"]["sent_compressed"]
        if count:
            flags = sender["flags"]["sent"]
            assert flags == ([False] * (count - low) + [True] * low) * (len(flags) // count)


@case
def one_forward_one_backward() -> None:
    megatron, low = run(PP4, LONG), run(PP4, LONG, rank=RANK)
    full = run(PP4, LONG, {"always_factor": True}, rank=256)
    last = run(PP4, LONG, rank=RANK, epilogue_only=True)
    bf16 = run(PP4, LONG, precision="bf16", rank=RANK)
    for ranks in (megatron, low, full, last, bf16):
        learns(ranks)
    full_rank_is_no_compression(megatron, full)
    for ranks, tolerance in ((low, 1e-5), (last, 1e-5), (bf16, 1e-4)):
        nothing_is_lost(ranks, tolerance)
    for ranks, message, dense in ((low, FACTORS, DENSE), (bf16, FACTORS, DENSE // 2)):
        assert [rank["traffic_bytes"] for rank in ranks] == [0] + [6 * message] * 3
        assert traffic(ranks, "dense_bytes") == [0] + [6 * dense] * 3
        assert all(0 < rank["relative_error"] < 1 and rank["seconds"] > 0 for rank in ranks[1:])
    # What would not be smaller goes as Megatron sends it.
    large = run(PP4, SHORT, rank=256)
    assert same_run(large, megatron)
    assert traffic(large, "sent_compressed") == traffic(large, "received_compressed") == [0] * 4
    assert traffic(large, "sent") == [0, 6, 6, 6] and traffic(large, "received") == [6, 6, 6, 0]
    assert [rank["traffic_bytes"] for rank in large] == traffic(large, "dense_bytes") == [0] + [6 * DENSE] * 3
    batched = run(PP4, SHORT, {"batch_p2p_comm": True}, rank=RANK)
    assert same_run(batched, low) and not any(rank["asynchronous"] for rank in batched)
    assert low[0]["relative_error"] is None and not same_run(low, megatron) and not same_run(last, low)
    # Receivers are stages 0, 1 and 2, with 3, 2 and 1 micro-batches of warm-up.
    epilogue(last, [0, 6, 6, 6], [0, 3, 2, 1])
    epilogue(run(PP4, SHORT, micro_batches=2, rank=RANK, epilogue_only=True), [0, 2, 2, 2], [0, 2, 2, 1])


@case
def interleaved() -> None:
    megatron, low = run(PP2VPP2, LONG), run(PP2VPP2, LONG, rank=RANK)
    learns(low)
    full_rank_is_no_compression(megatron, run(PP2VPP2, LONG, {"always_factor": True}, rank=256))
    for rank in low:  # every model chunk has its own state
        # Stage 0 does not send for the model's first chunk.
        chunks = {"chunk1"} if rank["stage"] == 0 else {"chunk0", "chunk1"}
        assert set(rank["state"]["errors"]) == set(rank["state"]["factors"]) == chunks
        assert all(error.norm() > 0 for error in rank["state"]["errors"].values())
    assert not same_run(low, megatron)
    # How messages are posted changes nothing.
    for options in ({"batch_p2p_comm": True}, {"overlap_p2p_comm": True}, FLUSH):
        ranks = run(PP2VPP2, SHORT, options, rank=RANK)
        assert same_run(ranks, low), options
        assert any(rank["asynchronous"] for rank in ranks) == ("batch_p2p_comm" not in options)
    last = [run(PP2VPP2, SHORT, options, rank=RANK, epilogue_only=True) for options in ({}, FLUSH)]
    assert same_run(*last) and not same_run(last[0], low)
    for ranks in last:
        # Ranks are by stage 0, 0, 1, 1. Warm-up is 4 steps on stage 0 and 2 on stage 1, chunk 1 of which starts from
        # the loss; six micro-batches of two chunks, of which stage 0 sends the second one.
        epilogue(ranks, [6, 6, 12, 12], [2, 2, 4, 4])


@case
def tensor_parallel() -> None:
    """Copies on tensor-parallel ranks stay equal."""
    megatron, low = run(TP2PP2, SHORT), run(TP2PP2, LONG, rank=RANK)
    learns(low)
    first, second = sorted((rank for rank in low if rank["stage"] == 1), key=lambda rank: rank["tensor"])
    assert (first["tensor"], second["tensor"]) == (0, 1)
    for key in ("errors", "factors"):
        assert torch.equal(first["state"][key]["chunk0"], second["state"][key]["chunk0"])
    assert torch.equal(first["sent"], second["sent"])
    assert torch.equal(*[rank["received"] for rank in low if rank["stage"] == 0])
    assert not same_run(low, megatron)


@case
def resume() -> None:
    """Three iterations more: without stopping, from saved state, and from saved state without that of the links."""
    run = settings(PP4, rank=RANK, epilogue_only=True)
    session = session_of(run)
    steps(session, run, 0, SHORT)
    assert session.pipeline is not None
    model = [copy.deepcopy(chunk.state_dict()) for chunk in session.chunks]
    optimizer = copy.deepcopy(session.optimizer.state_dict())
    scheduler = copy.deepcopy(session.scheduler.state_dict())
    saved = io.BytesIO()
    torch.save(session.pipeline.compressor.state_dict(), saved)
    straight = steps(session, run, SHORT, 2 * SHORT), weights(session)
    for links in (True, False):
        session = session_of(run)
        assert session.pipeline is not None
        for chunk, state in zip(session.chunks, model, strict=True):
            chunk.load_state_dict(state)
        session.optimizer.load_state_dict(copy.deepcopy(optimizer))
        session.scheduler.load_state_dict(scheduler)
        if links:
            saved.seek(0)
            session.pipeline.compressor.load_state_dict(torch.load(saved))
        resumed = steps(session, run, SHORT, 2 * SHORT), weights(session)
        assert torch.equal(straight[1], resumed[1]) == links
        assert not links or repr(straight[0]) == repr(resumed[0])


@case
def not_finite() -> None:
    """One gradient that the last stage sends is not finite: that reaches every earlier stage and no state."""
    run = settings(PP4, rank=RANK)
    session = session_of(run)
    steps(session, run, 0, 1)
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
    _iteration(session, run, 1, 0)
    finite = [bool(p.main_grad.isfinite().all()) for c in session.chunks for p in c.parameters()]
    state = pipeline.compressor.state_dict()
    tensors = [(tensor, before[key][name]) for key, each in state.items() for name, tensor in each.items()]
    # The last stage had its backward behind it, but shares the gradient of the embedding with the first one.
    assert not all(finite)
    assert pipeline.traffic.statistics.skipped == (session.stage > 0)
    assert all(torch.equal(now, then) for now, then in tensors), "a skipped step leaves what is kept as it was"
    assert bool(tensors) == (session.stage > 0)


@case
def mistakes() -> None:
    session = session_of(settings(PP4, rank=RANK))
    pipeline, config = session.pipeline, session.chunks[0].config
    assert pipeline is not None
    group = parallel_state.get_pipeline_model_parallel_group()
    for key in ("variable_seq_lengths", "use_ring_exchange_p2p", "mtp_standalone"):
        changed = copy.copy(config)
        setattr(changed, key, True)
        refused(partial(CompressedP2P, pp_group=group, config=changed, pipeline=PipelineConfig(rank=2)), f"set {key}")
    # Nothing is sent: a plan that is empty on every rank is noticed before.
    refused(lambda: pipeline._outgoing(torch.zeros(16, 2, 48)), "begin_iteration")
    pipeline.begin_iteration(3)
    refused(lambda: pipeline.begin_iteration(3), "num_microbatches")


test_pipeline = case.test()
