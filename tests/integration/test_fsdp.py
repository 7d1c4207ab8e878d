"""EDGC under torch's FSDP2: a gloo world of four ranks as 2 x 2, 4 x 1 and 1 x 4, one launch for all cases."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
import edgc.fsdp
from edgc import EDGCConfig, UserError
from edgc.runtime.groups import gather_objects
from tests.integration.fsdp_runs import (
    EDGC,
    POWERSGD,
    SMALL,
    Run,
    loss_of,
    mesh_of,
    plain_net,
    replicas_equal,
    sharded,
    tokens,
    watched,
)
from tests.workers import Cases, refused, said, same

pytestmark = pytest.mark.slow
case = Cases(4, __name__)


@case
def without_loss_it_is_torch() -> None:
    """None, and a low rank that saves nothing: bit for bit what torch's own HSDP gives, however the mesh is given."""
    full = {"method": "powersgd", "rank": 64, **SMALL}
    for replicas in (2, 4, 1):
        mesh = mesh_of(replicas)
        plain = Run(mesh).train(0, 3)
        assert replicas_equal(mesh, plain.weights)
        for settings in ({"method": "none"}, full) if replicas > 1 else ({"method": "none"},):
            run = Run(mesh, settings).train(0, 3)
            assert same(run.weights, plain.weights), (replicas, settings)
        if replicas == 2:
            net = sharded(mesh["shard"])
            run = Run(mesh["shard"], {"method": "none"}, net=net, options={"replicas": mesh["replicate"]}).train(0, 3)
            assert same(run.weights, plain.weights)
            # And after its end torch averages again.
            given_back = Run(mesh, {"method": "none"}).train(0, 1)
            given_back.handle.remove()
            given_back.handle = None
            assert same(given_back.train(1, 3).weights, plain.weights)


@case
def methods() -> None:
    """Sent + kept is what came in, replicas stay equal, and fewer bytes go."""
    every = {
        "powersgd": POWERSGD,
        "int8 factors": {"method": "powersgd", "rank": 2, "factor_dtype": "int8", **SMALL},
        "quantize": {"method": "quantize", "bits": 4, **SMALL},
        "topk": {"method": "topk", "density": 0.1, **SMALL},
    }
    for replicas, names in ((2, every), (4, ("powersgd", "quantize"))):
        mesh = mesh_of(replicas)
        for name in names:
            run = Run(mesh, every[name])
            with watched(run) as gaps:
                run.train(0, 2)
            assert replicas_equal(mesh, run.weights), (replicas, name)
            assert len(gaps) == 6 and max(gaps) < 1e-6, (replicas, name, gaps)
            assert run.handle.last.statistics.bytes < run.handle.last.statistics.dense_bytes, (replicas, name)


@case
def whole_policy() -> None:
    """Entropy, warm-up and ranks: decided alike on all shards and replicas, and as under DDP where nothing is cut."""
    mesh = mesh_of(2)
    run = Run(mesh, EDGC)
    with watched(run) as gaps:
        run.train(0, 7)
    assert max(gaps) < 1e-6 and replicas_equal(mesh, run.weights)
    assert run.ranks[:2] == [None, None] and None not in run.ranks[4:], run.ranks
    entropies = gather_objects(run.handle.last.entropy)
    told = gather_objects((run.ranks, run.handle.engine.controller.state_dict()))
    assert all(same(row, told[0]) for row in told)
    assert len(set(entropies)) > 1  # each of its own gradients
    uncut = Run(mesh_of(4), EDGC).train(0, 7)
    net = plain_net()
    wrapped = DistributedDataParallel(net)
    handle = edgc.ddp.register(wrapped, EDGCConfig.from_dict(EDGC), iterations=20)
    optimizer, ranks = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5), []
    for step in range(7):
        optimizer.zero_grad()
        loss_of(wrapped, tokens(step)).backward()
        optimizer.step()
        ranks.append(handle.last.rank)
    assert uncut.ranks == ranks
    handle.remove()
    for name, weight in uncut.weights.items():
        torch.testing.assert_close(weight, net.get_parameter(name), rtol=1e-3, atol=1e-4)


@case
def mixed_precision() -> None:
    """bf16 in forward and backward, reduced in fp32 and in bf16, whose rounding is kept, too."""
    mesh = mesh_of(2)
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        plain = Run(mesh, net=sharded(mesh, mp_policy=policy)).train(0, 2)
        exact = Run(mesh, {"method": "none"}, net=sharded(mesh, mp_policy=policy)).train(0, 2)
        assert same(plain.weights, exact.weights), reduce_dtype
        run = Run(mesh, POWERSGD, net=sharded(mesh, mp_policy=policy))
        with watched(run) as gaps:
            run.train(0, 2)
        assert replicas_equal(mesh, run.weights)
        assert max(gaps) < (1e-6 if reduce_dtype == torch.float32 else 1e-2), gaps
        assert run.weights["words.weight"].dtype == torch.float32


@case
def accumulation() -> None:
    """As torch accumulates, and an iteration of EDGC is a backward that averages."""
    mesh = mesh_of(2)
    for keep_back in ("gradients", "shards"):
        options = {"accumulation": 2, "keep_back": keep_back}
        plain = Run(mesh, **options).train(0, 2)
        run = Run(mesh, {"method": "none"}, **options).train(0, 2)
        assert same(run.weights, plain.weights), keep_back
        assert run.handle.last.iteration == 2
    compressed = Run(mesh, POWERSGD, accumulation=2).train(0, 2)
    assert replicas_equal(mesh, compressed.weights) and compressed.handle.last.iteration == 2


@case
def checkpointing_meta_and_clipping() -> None:
    """Activations computed again, a model that gets its weights after it was registered, and the norm of gradients:
    the same bits as without."""
    mesh = mesh_of(2)
    first = Run(mesh, POWERSGD, clip=0.5).train(0, 2)
    assert len(set(gather_objects(tuple(first.norms)))) == 1 and first.norms[0] > 0.5
    assert replicas_equal(mesh, first.weights)
    for again in ("reentrant", "saved"):
        run = Run(mesh, POWERSGD, clip=0.5, net=sharded(mesh, again=again)).train(0, 2)
        assert same(run.weights, first.weights), again
        assert run.handle.last.iteration == 2
    net = sharded(mesh, meta=True)
    handle = edgc.fsdp.register(net, EDGCConfig.from_dict(POWERSGD), iterations=20)
    net.to_empty(device="cpu")
    net.load_state_dict(sharded(mesh).state_dict())
    late = Run(mesh, clip=0.5, net=net)
    late.handle = handle
    assert same(late.train(0, 2).weights, first.weights)
    plain, exact = Run(mesh, clip=0.5).train(0, 1), Run(mesh, {"method": "none"}, clip=0.5).train(0, 1)
    assert plain.norms == exact.norms
    offloaded = Run(mesh, POWERSGD, net=sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), clip=0.5)
    assert same(offloaded.train(0, 2).weights, first.weights)


@case
def resumed() -> None:
    """By a distributed checkpoint: equal to a run that never stopped, bit for bit. Other replicas share what was owed."""
    mesh, folder = mesh_of(2), gather_objects(tempfile.mkdtemp())[0]
    for settings in (EDGC, {"method": "quantize", "bits": 2, **SMALL}):
        through = Run(mesh, settings).train(0, 3)
        parts = lambda run: {"net": run.net.state_dict(), "edgc": run.handle}  # noqa: E731
        momenta = copy.deepcopy(through.optimizer.state_dict())
        dcp.save(parts(through), checkpoint_id=f"{folder}/{settings['method']}")
        state = through.handle.state_dict()
        through.train(3, 6)
        again = Run(mesh, settings)
        loaded = parts(again)
        dcp.load(loaded, checkpoint_id=f"{folder}/{settings['method']}")
        again.net.load_state_dict(loaded["net"])
        again.optimizer.load_state_dict(momenta)
        assert same(again.train(3, 6).weights, through.weights), settings
        assert again.ranks == through.ranks[3:]
    owed = torch.load(io.BytesIO(*state.values()), weights_only=True)
    pieces = [piece for row in gather_objects(state) for piece in row.items()]
    shard = mesh["shard"].get_local_rank()
    three = {}
    for number in range(3):  # a run of three replicas, of which two owe what this rank does
        other = owed | {"world": 3, "rank": number}
        errors = {n: e * (number > 0) for n, e in owed["engine"]["compressor"]["errors"].items()}
        other["engine"] = owed["engine"] | {"compressor": owed["engine"]["compressor"] | {"errors": errors}}
        file = io.BytesIO()
        torch.save(other, file)
        three[f"shard{shard}of2.replica{number}of3"] = file.getvalue()
    target = Run(mesh, settings)
    assert target.handle.placeholders(3).keys() == three.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.handle.load_state_dict(three)
    found = target.handle.engine.compressor.kept
    for name, error in owed["engine"]["compressor"]["errors"].items():
        torch.testing.assert_close(found[name], error * 2 / 3)
    others = dict(piece for piece in pieces if not piece[0].startswith(f"shard{shard}"))
    refused(lambda: target.handle.load_state_dict(others), "shard", "this rank is")
    replica = dict(piece for piece in pieces if piece[0].startswith(f"shard{shard}") and piece[0] not in state)
    refused(lambda: target.handle.load_state_dict(replica), "save and load one state per rank")
    refused(lambda: Run(mesh, POWERSGD).handle.load_state_dict(state), "method quantize")


@case
def steps_given_up() -> None:
    """What is not finite on one rank gives the step up on all shards and replicas, as if it had never been."""
    mesh = mesh_of(2)
    for settings in (POWERSGD, EDGC):
        run = Run(mesh, settings).train(0, 2)
        before, weights = run.handle.engine.state_dict()["compressor"], run.weights
        run.optimizer.zero_grad()
        loss = loss_of(run.net, tokens(9))
        (loss * (torch.inf if dist.get_rank() == 3 else 1)).backward()
        assert run.handle.skipped == 1 and run.handle.last.skipped
        assert same(run.handle.engine.state_dict()["compressor"], before)
        assert not torch.isfinite(
            nn.utils.get_total_norm([p.grad for p in run.net.parameters() if p.grad is not None]).full_tensor()
        )
        run.net.load_state_dict(run.net.state_dict() | {})
        assert same(run.weights, weights)
        assert replicas_equal(mesh, run.train(2, 3).weights) and run.handle.skipped == 1


@case
def refusals() -> None:
    """One line each, on every rank, and nothing is left behind."""
    config, options = EDGCConfig(method="none"), {"iterations": 9}
    low = EDGCConfig.from_dict(POWERSGD)
    mesh, register = mesh_of(2), edgc.fsdp.register
    refused(lambda: register(plain_net(), config, **options), "Net", "call fully_shard")
    refused(lambda: register(sharded(mesh_of(1)), low, **options), "powersgd", "factors", "2-D mesh")
    refused(lambda: register(sharded(mesh_of(1)["shard"]), low, **options), "powersgd", "2-D mesh")
    refused(lambda: register(sharded(mesh_of(1)), EDGCConfig(method="topk"), **options), "topk", "method: quantize")
    refused(lambda: register(sharded(mesh["shard"]), low, **options), "2 of 4 ranks", "replicas=mesh")
    refused(lambda: register(sharded(mesh), low, replicas=mesh["replicate"], **options), "leave replicas out")
    refused(lambda: register(sharded(mesh), low, iterations=9 + dist.get_rank()), "give the same on every rank")
    refused(
        lambda: register(sharded(mesh), EDGCConfig(method="powersgd", rank=4, compressed_stages=0.5), **options),
        "compressed_stages",
    )
    net = sharded(mesh)
    handle = register(net, low, **options)
    refused(lambda: register(net, low, **options), "handle.remove()")
    handle.remove()
    run = Run(mesh, POWERSGD, net=net)
    loss = loss_of(net, tokens(0))
    inside: list[str] = []
    net.blocks[0].up.weight.register_hook(lambda _: inside.append(said(run.handle.state_dict)))
    loss.backward()
    assert all("after backward" in one for one in inside)
    run.net.blocks[0].narrow.forward = lambda x: x[..., :5]  # which leaves two parameters out
    try:
        loss_of(net, tokens(1)).backward()
    except UserError as error:
        assert "set_reduce_scatter_unused_params(True)" in str(error)
    else:
        raise AssertionError
    refused(lambda: loss_of(net, tokens(1)), "reset_iter_state()", "register anew")
    net.reset_iter_state()
    run.handle.remove()
    net.set_reduce_scatter_unused_params(True)
    again = Run(mesh, POWERSGD, net=net)
    with watched(again) as gaps:
        again.train(0, 2)
    assert max(gaps) < 1e-6 and replicas_equal(mesh, again.weights)


test_fsdp = case.test()
