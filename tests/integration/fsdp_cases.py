"""What an FSDP2 model of four ranks learns from gradients that replicas average.

``test_fsdp.py`` runs these cases in its launch: ``pytest tests/integration/test_fsdp.py -k NAME``.
"""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
import edgc.fsdp
from edgc import EDGCConfig
from edgc.runtime.device import masked_path
from edgc.runtime.groups import gather_objects
from edgc.strategies import StrategyConfig
from tests.integration.fsdp_runs import (
    EDGC,
    POWERSGD,
    QUANTISED,
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
    tensor_parallel,
    tokens,
    watched,
)
from tests.strategy_cases import settings_of
from tests.workers import Cases, equal, refused, same

STEPS = 7
case = Cases(4, "tests.integration.test_fsdp")


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
        low = Run(mesh, POWERSGD if replicas > 1 else QUANTISED)
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
    for replicas, settings in (
        (2, {"method": "powersgd", "rank": 2, "factor_dtype": "int8", **SMALL}),
        (2, {"method": "topk", "density": 0.1, **SMALL}),
        (2, QUANTISED),
        (4, QUANTISED),
    ):
        mesh = mesh_of(replicas)
        run = Run(mesh, settings)
        with watched(run) as gaps:
            run.train(0, 2)
        assert replicas_equal(mesh, run.weights), (replicas, settings)
        assert gaps and max(gaps) < 1e-6, (replicas, settings, gaps)
        assert run.handle.last.statistics.bytes < run.handle.last.statistics.dense_bytes, (replicas, settings)


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


def broken(_: Tensor) -> None:
    raise ZeroDivisionError


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
    # Registered, removed or registered anew between two micro-batches: what the shards have reduced is not lost.
    kept = {"accumulation": 2, "keep_back": "shards"}
    plain, none, alone = Run(mesh, **kept).train(0, 1), {"method": "none"}, {"replicas": mesh["replicate"]}
    for before, after in ((none, None), (None, none), (none, none)):
        run = Run(mesh, before)
        run.net.set_requires_all_reduce(False)
        (loss_of(run.net, tokens(0)) / 2).backward()
        if run.handle is not None:
            run.handle.remove()
        run = Run(mesh, after, net=run.net)
        run.net.set_requires_all_reduce(True)
        (loss_of(run.net, tokens(1)) / 2).backward()
        run.optimizer.step()
        assert same(run.weights, plain.weights), (before, after)
    for given, options in ((mesh, {}), (mesh["shard"], alone)):
        run = Run(given, none, net=sharded(given), options=options, **kept)
        run.net.set_requires_all_reduce(False)
        loss_of(run.net, tokens(2)).backward()
        if options:
            refused(run.handle.remove, "never be averaged", "between two steps")
        run.net.reset_iter_state()  # which drops it
        assert same(run.train(0, 1).weights, plain.weights), options
        run.handle.remove()
    # What a failed backward has reduced is not averaged with what comes after it. (torch does keep what a unit had not
    # reduced yet, so a run that fails is compared with torch's that fails.)
    for strategy, torchs in ((None, Run(mesh, **kept)), (settings_of("diloco"), Run(mesh["shard"], **kept))):
        more = {} if strategy is None else {"options": {"strategy": strategy}}
        run = Run(mesh, none, **more, **kept)
        for each in (torchs, run):
            each.net.set_requires_all_reduce(False)
            entered = each.net.blocks[0].register_forward_pre_hook(
                lambda _, inputs: inputs[0].register_hook(broken) and None
            )
            with pytest.raises(ZeroDivisionError):
                loss_of(each.net, tokens(2)).backward()
            entered.remove()
            each.optimizer.zero_grad()
            each.net.reset_iter_state()
        if strategy is None:
            refused(lambda run=run: loss_of(run.net, tokens(0)), "register anew")
            run.net.reset_iter_state()
            run.handle.remove()
            run = Run(mesh, none, net=run.net, **kept)
        assert same(run.train(0, 1).weights, torchs.train(0, 1).weights), strategy
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
    scattering = Run(mesh_of(1)["shard"], QUANTISED).train(0, 1)
    scattering.net.blocks[0].up.requires_grad_(False)
    owed = scattering.handle.engine.errors["blocks.0.up.weight"]
    scattering.train(1, 2).handle.load_state_dict(scattering.handle.state_dict())
    torch.testing.assert_close(scattering.handle.engine.errors["blocks.0.up.weight"], owed)


@case
def loss_scales() -> None:
    """With scales that are powers of two, and change, a run is that without, bit for bit; and goes on without. The
    first rank warns of one that nobody gave."""
    for mesh, settings in ((mesh_of(2), POWERSGD), (mesh_of(1)["shard"], QUANTISED)):
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
        states = [each.handle.state_dict() for each in (run, plain)]
        run, plain = Run(mesh, settings), Run(mesh, settings)
        for each, state in zip((run, plain), states, strict=True):
            each.handle.load_state_dict(state)
            loss_of(each.net, tokens(3)).backward()
            each.optimizer.step()
        assert same(run.weights, plain.weights)
        for given in (None, False):
            run = Run(mesh, settings, options={"scaler": given})
            grows = torch.amp.GradScaler("cpu", init_scale=8.0)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                grows.scale(loss_of(run.net, tokens(0))).backward()
                grows.step(run.optimizer)
            told = sum("fsdp.register was given no scaler" in str(each.message) for each in warned)
            assert told == (given is None and dist.get_rank() == 0)


@case
def tensor_parallelism() -> None:
    """Each rank's part of a matrix by itself: the bits of torch without compression; what is sent and kept is what came
    in; what all ranks of a replica hold stays equal on them; and all give a step up that one of them cannot take."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    make = partial(tensor_parallel, mesh, mesh["replicate", "shard"])
    place: dict[str, Any] = {"place": mesh["replicate"].get_local_rank()}
    plain = Run(mesh, net=make(), **place).train(0, 2)
    exact = Run(mesh, {"method": "none"}, net=make(), **place).train(0, 2)
    assert same(exact.weights, plain.weights)
    run = Run(mesh, POWERSGD, net=make(), **place)
    with watched(run) as gaps:
        run.train(0, 2)
    assert max(gaps) < 1e-6 and replicas_equal(mesh, run.weights)
    assert all(equal(run.net[layer].weight.full_tensor()) for layer in (0, 4))
    assert run.handle.last.statistics.bytes < run.handle.last.statistics.dense_bytes
    states = gather_objects(run.handle.state_dict())
    assert len({key for state in states for key in state}) == 4
    run.handle.load_state_dict(states)
    reduce, poison = run.handle.engine.reduce, math.nan if dist.get_rank() == 3 else 1.0
    run.handle.engine.reduce = lambda gradients, group: (gradients[0].tensor.mul_(poison), reduce(gradients, group))
    loss_of(run.net, tokens(9, place["place"])).backward()
    assert run.handle.skipped == 1
    law = StrategyConfig.from_dict({"name": "diloco", "every": 1, "lr": 1.0, "momentum": 0.0})
    sgd = {"make": partial(torch.optim.SGD, lr=0.3), **place}
    run = Run(mesh, {"method": "none"}, net=make(), options={"strategy": law}, **sgd).train(0, 2)
    for name, weight in Run(mesh, net=make(), **sgd).train(0, 2).weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-5, atol=1e-6)
    # Sharded over all ranks of a part.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    make, place = partial(tensor_parallel, mesh, mesh["shard"]), {"place": mesh["shard"].get_local_rank()}
    plain, exact, run = (
        Run(mesh, settings, net=make(), **place).train(0, 2) for settings in (None, {"method": "none"}, QUANTISED)
    )
    assert same(exact.weights, plain.weights) and not same(run.weights, plain.weights)
    assert all(equal(run.net[layer].weight.full_tensor()) for layer in (0, 4))
    before = copy.deepcopy(run.handle.engine.errors)
    run.handle.load_state_dict(gather_objects(run.handle.state_dict()))
    assert same(run.handle.engine.errors, before)
    uneven = parallelize_module(nn.Sequential(nn.Linear(4, 11)), mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(uneven, mesh=mesh["shard"])
    refused(lambda: edgc.fsdp.register(uneven, EDGCConfig.from_dict(QUANTISED), iterations=9), "shapes", "divisible")


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
