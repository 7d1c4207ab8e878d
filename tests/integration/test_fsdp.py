"""EDGC under torch's FSDP2: a gloo world of four ranks as 2 x 2, 4 x 1 and 1 x 4, one launch for all cases."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
import edgc.fsdp
from edgc import EDGCConfig
from edgc.checkpoints.saved_state import state_for
from edgc.fsdp.state import Place
from edgc.runtime.device import masked_path
from edgc.runtime.groups import gather_objects
from edgc.strategies import StrategyConfig
from tests.integration.fsdp_runs import (
    EDGC,
    POWERSGD,
    SMALL,
    Run,
    Scaler,
    loss_of,
    mesh_of,
    plain_net,
    poisoned,
    replicas_equal,
    scattered,
    sharded,
    tokens,
    watched,
)
from tests.strategy_cases import settings_of
from tests.workers import Cases, refused, said, same

STEPS = 7
KNOWN = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # of torch 2.13
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not KNOWN, reason="edgc.fsdp needs torch 2.13")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "library" / "fsdp.md"
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
def layouts() -> None:
    """FSDP2's rows of the matrix of layouts (``test_megatron_layouts.py``), as many steps as there: without
    compression, at full rank as without, and compressed, which learns, sends less, loses nothing, and leaves replicas
    equal."""
    for replicas in (2, 1, 4):
        mesh = mesh_of(replicas)
        plain = Run(mesh).train(0, STEPS)
        low = Run(mesh, POWERSGD if replicas > 1 else {"method": "quantize", "bits": 4, **SMALL})
        with (watched if replicas > 1 else scattered)(low) as gaps:
            low.train(0, STEPS)
        assert max(gaps) < 1e-6, (replicas, gaps)
        assert sum(low.losses[-3:]) < sum(low.losses[:3]) - 0.1, (replicas, low.losses)
        assert low.handle.last.statistics.bytes < 0.7 * low.handle.last.statistics.dense_bytes, replicas
        assert not same(low.weights, plain.weights), replicas
        if replicas > 1:
            full = Run(mesh, {"method": "powersgd", "rank": 64, **SMALL})
            full.handle.engine.compressor.always_factor = True
            full.train(0, STEPS)
            assert replicas_equal(mesh, full.weights) and replicas_equal(mesh, low.weights), replicas
            assert full.handle.last.rank == 64 and not same(full.weights, plain.weights), replicas  # it was factored
            torch.testing.assert_close(full.losses, plain.losses, rtol=1e-5, atol=0)


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
            assert gaps and max(gaps) < 1e-6, (replicas, name, gaps)
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
def whole_matrices() -> None:
    """Low rank takes each matrix on one rank of its shard group, and sends what the whole one costs."""
    mesh = mesh_of(2)
    run, given = Run(mesh, POWERSGD), {}
    reduce = run.handle.engine.reduce
    run.handle.engine.reduce = lambda gradients, group: (
        given.update({g.name: tuple(g.tensor.shape) for g in gradients}),
        reduce(gradients, group),
    )
    run.train(0, 1)
    rows = gather_objects((mesh.get_coordinate(), given, run.handle.last.statistics.bytes))
    replica = [(shapes, sent) for place, shapes, sent in rows if place[0] == 0]
    matrices = {n: tuple(p.shape) for n, p in plain_net().named_parameters() if p.dim() > 1 and p.requires_grad}
    for name, shape in matrices.items():
        if "conv" in name:
            shape = (shape[0], 3)
        held = [shapes[name] for shapes, _ in replica if name in shapes]
        assert held in ([shape], [(7, shape[1]), (6, shape[1])]), (name, held)
        assert (len(held) == 2) == (shape == (13, 3)), (name, held)  # which is tall enough to stay in blocks
    sent = sum(
        4 * sum(shape if len(shape) > 1 else (math.prod(shape),)) for shapes, _ in replica for shape in shapes.values()
    )
    assert sum(sent for _, sent in replica) == sent  # of two replicas 2 (W - 1) / W is one


@case
def mixed_precision() -> None:
    """bf16 in forward and backward, reduced in fp32 and in bf16, whose rounding is kept, too."""
    mesh = mesh_of(2)
    for reduce_dtype in (torch.float32, torch.bfloat16):
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**types)}
        options["root"] = {"mp_policy": MixedPrecisionPolicy(**types, output_dtype=torch.float32)}
        plain = Run(mesh, net=sharded(mesh, **options)).train(0, 2)
        exact = Run(mesh, {"method": "none"}, net=sharded(mesh, **options)).train(0, 2)
        assert same(plain.weights, exact.weights), reduce_dtype
        run = Run(mesh, POWERSGD, net=sharded(mesh, **options))
        with watched(run) as gaps:
            run.train(0, 2)
        assert replicas_equal(mesh, run.weights)
        assert max(gaps) < (1e-6 if reduce_dtype == torch.float32 else 1e-2), gaps
        assert run.weights["words.weight"].dtype == torch.float32 and run.handle.last.iteration == 2


@case
def types_of_a_unit() -> None:
    """A frozen matrix of another type before those that are trained: what saves bytes follows from theirs."""
    layers = nn.Sequential(nn.Linear(32, 32, bias=False).bfloat16(), nn.Linear(32, 32, bias=False))
    layers[0].requires_grad_(False)
    net = fully_shard(nn.Sequential(layers), mesh=mesh_of(2))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        edgc.fsdp.register(net, EDGCConfig(method="powersgd", rank=8, **SMALL), iterations=9).remove()
    assert not [each for each in warned if "nothing is compressed" in str(each.message)]


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
    # Two forwards before one backward.
    plain, twice, low = Run(mesh), Run(mesh, {"method": "none"}), Run(mesh, POWERSGD)
    with watched(low) as gaps:
        for run in (plain, twice, low):
            (loss_of(run.net, tokens(0)) + loss_of(run.net, tokens(1))).backward()
            run.optimizer.step()
    assert same(twice.weights, plain.weights) and twice.handle.last.iteration == 1
    assert max(gaps) < 1e-6 and replicas_equal(mesh, low.weights)


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
    """By a distributed checkpoint: as if it had never stopped, bit for bit. Other replicas share what is owed."""
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
    refused(lambda: Run(mesh, {"method": "sign", **SMALL}).handle.load_state_dict(state), "method quantize")
    # Of a run of one rank its state is those of all ranks.
    four = Run(mesh_of(1)["shard"], settings).train(0, 1).handle
    [packed] = four.state_dict().values()
    one = torch.load(io.BytesIO(packed), weights_only=True) | {"world": 1, "rank": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        four.load_state_dict(Place("whole", 0, 1).packed(one))
    assert same(four.engine.state_dict(four._parts)["compressor"], one["engine"]["compressor"])


@case
def steps_given_up() -> None:
    """What is not finite in one shard on one rank gives the step up on all shards and replicas, as if it had never
    been."""
    mesh, quantised = mesh_of(2), {"method": "quantize", "bits": 2, **SMALL}
    for settings, masked in ((POWERSGD, False), (POWERSGD, True), (quantised, False)):
        with masked_path(masked):
            run = Run(mesh, settings).train(0, 2)
            before = copy.deepcopy(run.handle.engine.state_dict()["compressor"])
            with poisoned(run.net, dist.get_rank() == 3):
                run.optimizer.zero_grad()
                loss_of(run.net, tokens(9)).backward()
            bias = run.net.blocks[0].narrow.bias.grad.to_local()
            assert bool(bias.isfinite().all()) == (mesh["shard"].get_local_rank() == 1)
            assert run.handle.skipped == 1 and run.handle.last.skipped
            assert same(run.handle.engine.state_dict()["compressor"], before)
            assert replicas_equal(mesh, run.train(2, 3).weights) and run.handle.skipped == 1


@case
def frozen_and_thawed() -> None:
    """Parameters that are frozen when the model is registered, also those of a whole unit, are averaged once they are
    trained; those that are frozen later are no longer."""
    mesh = mesh_of(2)
    for given, options in ((mesh, {}), (mesh["shard"], {"replicas": mesh["replicate"]})):
        net = sharded(given)
        net.blocks[1].requires_grad_(False)
        run = Run(given, POWERSGD, net=net, options=options, clip=1.0).train(0, 1)
        net.blocks[1].requires_grad_(True)
        net.blocks[0].up.requires_grad_(False)
        before = run.weights
        run.train(1, 3)
        assert replicas_equal(mesh, run.weights)
        assert not same(run.weights["blocks.1.frozen.weight"], before["blocks.1.frozen.weight"])
        assert any("blocks.1.up.weight" in row for row in gather_objects(list(run.handle.engine.compressor.kept)))
        run.handle.load_state_dict(run.handle.state_dict())  # with what is owed of those that are frozen now
    scattering = Run(mesh_of(1)["shard"], {"method": "quantize", "bits": 4, **SMALL}).train(0, 1)
    scattering.net.blocks[0].up.requires_grad_(False)
    owed = scattering.handle.engine.errors["blocks.0.up.weight"]
    scattering.train(1, 2).handle.load_state_dict(scattering.handle.state_dict())
    torch.testing.assert_close(scattering.handle.engine.errors["blocks.0.up.weight"], owed)


@case
def loss_scales() -> None:
    """With scales that are powers of two, and change, a run is that without, bit for bit."""
    for mesh, settings in ((mesh_of(2), POWERSGD), (mesh_of(1)["shard"], {"method": "quantize", "bits": 4, **SMALL})):
        scaler, plain = Scaler(), Run(mesh, settings).train(0, 3)
        run = Run(mesh, settings, options={"scaler": scaler})
        for step, scale in enumerate((1024.0, 8.0, 65536.0)):
            scaler.factor = scale
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.net, tokens(step))).backward()
            for parameter in run.net.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            run.optimizer.step()
        assert same(run.weights, plain.weights)
        assert run.handle.last.statistics.error_sq == plain.handle.last.statistics.error_sq > 0


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
    estimates = EDGCConfig(method="quantize", ef21=True)
    refused(lambda: register(sharded(mesh_of(1)), estimates, **options), "ef21: false")
    refused(lambda: register(sharded(mesh["shard"]), low, **options), "2 of 4 ranks", "replicas=mesh")
    refused(lambda: register(sharded(mesh), low, replicas=mesh["replicate"], **options), "leave replicas out")
    for wrong, words in ((mesh["shard"], "different shards"), (mesh["replicate"].get_group(), "mesh[name]")):
        refused(lambda wrong=wrong: register(sharded(mesh["shard"]), low, replicas=wrong, **options), words)
    refused(lambda: register(sharded(mesh), low, iterations=9 + dist.get_rank()), "give the same on every rank")
    refused(
        lambda: register(sharded(mesh), EDGCConfig(method="powersgd", rank=4, compressed_stages=0.5), **options),
        "compressed_stages",
    )
    other = sharded(mesh)  # as of another torch
    del other._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_hook_stream
    refused(lambda: register(other, low, **options), "FSDP2 of torch", "use torch 2.13")
    net = sharded(mesh)
    handle = register(net, low, **options)
    refused(lambda: register(net, low, **options), "handle.remove()")
    handle.remove()
    run = Run(mesh, POWERSGD, net=net)
    loss = loss_of(net, tokens(0))
    refused(lambda: register(net.blocks[0], low, **options), "Block", "register the root")
    inside: list[str] = []
    net.blocks[0].up.weight.register_hook(lambda _: inside.append(said(run.handle.state_dict)))
    loss.backward()
    assert all("after backward" in one for one in inside)
    run.net.blocks[0].narrow.forward = lambda x: x[..., :5]  # which leaves two parameters out
    refused(lambda: loss_of(net, tokens(1)).backward(), "set_reduce_scatter_unused_params(True)")
    refused(lambda: loss_of(net, tokens(1)), "reset_iter_state()", "register anew")
    net.reset_iter_state()
    run.handle.remove()
    net.set_reduce_scatter_unused_params(True)
    again = Run(mesh, POWERSGD, net=net)
    with watched(again) as gaps:
        again.train(0, 2)
    assert max(gaps) < 1e-6 and replicas_equal(mesh, again.weights)


@case
def factors_and_sums() -> None:
    """A divide factor of the user's, and sums in place of means, give what they give under torch."""
    mesh = mesh_of(2)
    for change in (
        lambda module: module.set_gradient_divide_factor(2.0),
        lambda module: module.set_force_sum_reduction_for_comms(True),
    ):
        nets = sharded(mesh), sharded(mesh)
        for net in nets:
            for module in (net, *net.blocks):
                change(module)
        run = Run(mesh, {"method": "none"}, net=nets[1]).train(0, 2)
        assert same(run.weights, Run(mesh, net=nets[0]).train(0, 2).weights)


@case
def over_all_ranks() -> None:
    """A quantised reduce-scatter: what arrives and what is kept are what was there; it learns, and sends less."""
    mesh = mesh_of(1)["shard"]
    plain = Run(mesh).train(0, 3)
    exact = Run(mesh, {"method": "none"}).train(0, 3)
    assert same(exact.weights, plain.weights)
    dense = exact.handle.last.statistics.bytes
    assert dense == exact.handle.last.statistics.dense_bytes > 0
    names = {
        **{f"{bits} bits": {"method": "quantize", "bits": bits} for bits in (8, 4, 2)},
        "e4m3": {"method": "quantize", "format": "e4m3"},
        "rotated": {"method": "quantize", "bits": 4, "hadamard": True},
        "sign": {"method": "sign"},
    }
    for name, settings in names.items():
        for reduce_dtype in (None, torch.bfloat16) if name == "4 bits" else (None,):
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            run = Run(mesh, {**settings, **SMALL}, net=sharded(mesh, mp_policy=policy))
            with scattered(run) as gaps:
                run.train(0, 2)
            assert len(gaps) == 2 * (9 if reduce_dtype else 21) and max(gaps) < 1e-6, (name, reduce_dtype, gaps)
            assert any(float(error.abs().max()) for error in run.handle.engine.errors.values())
            assert run.handle.last.statistics.bytes < dense, name
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        Run(mesh, {"method": "quantize", "bits": 4})  # of matrices that are all too small
    assert sum("no matrix is large enough" in str(each.message) for each in warned) == (dist.get_rank() == 0)
    # Without error feedback, rounded at random: nothing is kept. Filtered: a part of it.
    random = Run(mesh, {"method": "quantize", "bits": 4, "rounding": "stochastic", **SMALL}).train(0, 2)
    assert not random.handle.engine.errors
    loco = {"method": "quantize", "bits": 4, "error_decay": 0.5, **SMALL}
    filtered, whole = Run(mesh, loco).train(0, 1), Run(mesh, loco | {"error_decay": 0.0}).train(0, 1)
    for name, error in whole.handle.engine.errors.items():
        torch.testing.assert_close(filtered.handle.engine.errors[name], error / 2)
    through = Run(mesh, {"method": "quantize", "bits": 2, **SMALL}).train(0, 2)
    state, weights = through.handle.state_dict(), copy.deepcopy(through.net.state_dict())
    momenta = copy.deepcopy(through.optimizer.state_dict())
    through.train(2, 4)
    again = Run(mesh, through.settings)
    again.net.load_state_dict(weights)
    again.optimizer.load_state_dict(momenta)
    again.handle.load_state_dict(state)
    assert same(again.train(2, 4).weights, through.weights)
    # One rank of a run of one owes what all four did together.
    states = [torch.load(io.BytesIO(*one.values()), weights_only=True) for one in gather_objects(state)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = state_for(states, world=1, rank=0)["engine"]["compressor"]["errors"]
    again.handle.load_state_dict(state)
    owed = again.handle.engine.state_dict(again.handle._parts)["compressor"]["errors"]
    for name, error in owed.items():
        dist.all_reduce(error)
        torch.testing.assert_close(alone[name], error / 4)
    # A step is given up on all ranks though one owner alone sees what is not finite, even if it is the owner's own.
    before = copy.deepcopy(through.handle.engine.errors)
    for skipped, (place, options) in enumerate(
        ((1, {}), (1, {"matrix": True}), (0, {"matrix": True, "value": math.inf})), start=1
    ):
        through.optimizer.zero_grad()
        with poisoned(through.net, dist.get_rank() == place, **options):
            loss_of(through.net, tokens(9)).backward()
        narrow = through.net.blocks[0].narrow
        gradient = (narrow.weight if options else narrow.bias).grad.to_local()
        assert bool(gradient.isfinite().all()) == (dist.get_rank() > 0), options
        assert through.handle.skipped == skipped and same(through.handle.engine.errors, before), options
    natural = Run(mesh, {"method": "natural", **SMALL})  # which sends NaN as infinity
    with poisoned(natural.net, dist.get_rank() == 1, matrix=True):
        loss_of(natural.net, tokens(9)).backward()
    assert natural.handle.skipped == 1


@case
def strategies() -> None:
    """DiLoCo between replicas that are sharded; with one step a round and outer SGD it is data parallel."""
    mesh = mesh_of(2)
    plain_sgd = partial(torch.optim.SGD, lr=0.3)
    law = StrategyConfig.from_dict({"name": "diloco", "every": 1, "lr": 1.0, "momentum": 0.0})
    run = Run(mesh, {"method": "none"}, options={"strategy": law}, make=plain_sgd).train(0, 3)
    plain = Run(mesh, make=plain_sgd).train(0, 3)
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, plain.weights[name], rtol=1e-5, atol=1e-6)
    for name, compression in (("diloco", POWERSGD), ("sparseloco", {"method": "none"}), ("demo", {"method": "none"})):
        settings = StrategyConfig.from_dict({"name": name, **({} if name == "demo" else {"every": 2})})
        make = plain_sgd if name == "demo" else partial(torch.optim.AdamW, lr=0.01)
        options = {"options": {"strategy": settings}, "make": make}
        run = Run(mesh, compression, **options).train(0, 1)
        assert replicas_equal(mesh, run.weights) == (settings.equal == "step"), name
        run.train(1, 2)
        assert replicas_equal(mesh, run.weights), name
        run.train(2, 3)
        state, weights = run.handle.state_dict(), copy.deepcopy(run.net.state_dict())
        moments = copy.deepcopy(run.optimizer.state_dict())
        again = Run(mesh, compression, **options)
        again.net.load_state_dict(weights)
        again.optimizer.load_state_dict(moments)
        again.handle.load_state_dict(state)
        assert same(again.train(3, 5).weights, run.train(3, 5).weights), name
        replica = [piece for one in gather_objects(state) for piece in one.items() if piece[0] not in state]
        wrong = {key: value for key, value in replica if key[:6] == next(iter(state))[:6]}
        refused(lambda load=again.handle.load_state_dict, wrong=wrong: load(wrong), "save and load one state per rank")
        # With one shard a replica it is the same strategy under DDP.
        uncut = Run(mesh_of(4), compression, decay=0.3, **options).train(0, 3)
        net = plain_net()
        wrapped, optimizer = DistributedDataParallel(net), make(net.parameters())
        config = EDGCConfig.from_dict(compression)
        handle = edgc.ddp.register(wrapped, config, iterations=20, strategy=settings, optimizer=optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(wrapped, tokens(step)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.3
        for key, weight in uncut.weights.items():
            torch.testing.assert_close(weight, net.get_parameter(key).detach(), rtol=1e-4, atol=1e-5, msg=name)
        assert uncut.handle.bytes == handle.bytes, name
        handle.remove()
    # What backward leaves out the optimizer leaves alone.
    decaying = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    run = Run(mesh, {"method": "none"}, options={"strategy": settings_of("diloco")}, make=decaying)
    run.net.blocks[1].up.requires_grad_(False)
    frozen = run.weights["blocks.1.up.weight"]
    assert same(run.train(0, 1).weights["blocks.1.up.weight"], frozen)
    # What is not finite on one shard of one replica leaves the round to nobody.
    run = Run(mesh, POWERSGD, options={"strategy": settings_of("diloco")}, make=partial(torch.optim.AdamW, lr=0.01))
    before = run.weights
    last = settings_of("diloco").period - 1
    for step in range(last + 1):
        run.optimizer.zero_grad()
        with poisoned(run.net, dist.get_rank() == 2 and step == last):
            loss_of(run.net, tokens(step)).backward()
        run.optimizer.step()
    assert same(run.weights, before)
    run.handle.remove()
    options = {"iterations": 9, "strategy": settings_of("diloco")}
    config, register = EDGCConfig(method="none"), edgc.fsdp.register
    net = sharded(mesh)
    refused(lambda: register(net, config, **options), "diloco", "give optimizer")
    early = torch.optim.SGD(plain_net().parameters(), lr=0.1)
    refused(lambda: register(net, config, optimizer=early, **options), "diloco", "after fully_shard")
    alone, right = sharded(mesh_of(1)), torch.optim.SGD(net.parameters(), lr=0.1)
    refused(lambda: register(alone, config, optimizer=right, **options), "diloco", "2-D mesh")
    options["strategy"] = StrategyConfig.from_dict("dion")
    refused(lambda: register(net, config, optimizer=right, **options), "dion", "whole matrices")
    empty = sharded(mesh, meta=True)
    options["strategy"] = settings_of("diloco")
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
    refused(lambda: register(empty, config, optimizer=optimizer, **options), "diloco", "to_empty")


@case
def page() -> None:
    """The blocks of docs/library/fsdp.md: three lines, a program that learns and sends less, and its state."""
    first, program, saved, shared = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in first.splitlines() if line]
    assert len(lines) == 3 and lines[-1] in program
    program = (
        re.sub(r"dist\.(init|destroy)_process_group.*", "", program)
        .replace("range(200)", "range(30)")
        .replace("% 50 == 49", "% 15 == 14")
    )
    names: dict[str, Any] = {}
    printed, folder = io.StringIO(), gather_objects(tempfile.mkdtemp())[0]
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    for block in (saved, shared.replace("replicas=4", "replicas=2")):
        exec(block.replace("step-100", folder), names)
    said = re.findall(r"step (\d+): loss ([\d.]+), (\d+) bytes sent", printed.getvalue())
    assert [int(step) for step, _, _ in said] == ([15, 30] if dist.get_rank() == 0 else [])
    if said:
        assert float(said[1][1]) < float(said[0][1])
        assert 0 < int(said[1][2]) < 0.25 * 4 * sum(p.numel() for p in names["model"].parameters())


test_fsdp = case.test()
