"""EDGC under torch's FSDP2: a gloo world of four ranks as 2 x 2, 4 x 1 and 1 x 4, one launch for all cases, those of
``fsdp_cases.py`` first."""

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
import edgc.fsdp
from edgc import EDGCConfig
from edgc.checkpoints.saved_state import state_for
from edgc.fsdp.state import Place
from edgc.runtime.groups import gather_objects
from edgc.strategies import StrategyConfig
from tests.integration.fsdp_cases import case
from tests.integration.fsdp_runs import (
    EDGC,
    POWERSGD,
    SMALL,
    Run,
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
from tests.strategy_cases import Wrapper, settings_of
from tests.workers import refused, said, same

KNOWN = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # of torch 2.13
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not KNOWN, reason="edgc.fsdp needs torch 2.13")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "library" / "fsdp.md"


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
    [key] = state
    for wrong, words in (
        (None, "NoneType"),
        ([None], "NoneType"),
        (target.handle.placeholders(2), "placeholders"),
        ({key: state[key][:-100]}, "cannot be read"),
        ({key: "text"}, "cannot be read"),
    ):
        refused(lambda wrong=wrong: target.handle.load_state_dict(wrong), words)
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
def refusals() -> None:
    """One line each, on every rank, and nothing is left behind."""
    config, options = EDGCConfig(method="none"), {"iterations": 9}
    low = EDGCConfig.from_dict(POWERSGD)
    mesh, register = mesh_of(2), edgc.fsdp.register
    for wrong in (plain_net(), None):
        refused(lambda wrong=wrong: register(wrong, config, **options), type(wrong).__name__, "call fully_shard")
    refused(lambda: register(sharded(mesh), POWERSGD, **options), "config", "EDGCConfig")
    refused(lambda: register(sharded(mesh_of(1)), low, **options), "powersgd", "factors", "2-D mesh")
    refused(lambda: register(sharded(mesh_of(1)["shard"]), low, **options), "powersgd", "2-D mesh")
    refused(lambda: register(sharded(mesh_of(1)), EDGCConfig(method="topk"), **options), "topk", "method: quantize")
    estimates = EDGCConfig(method="quantize", ef21=True)
    refused(lambda: register(sharded(mesh_of(1)), estimates, **options), "ef21: false")
    for key in ("cost_gate", "record_full_entropy"):
        measured = partial(register, config=EDGCConfig(method="quantize", **{key: True}), **options)
        refused(partial(measured, sharded(mesh_of(1))), f"{key} = True", f"set {key}: false")
    refused(lambda: register(sharded(mesh["shard"]), low, **options), "2 of 4 ranks", "replicas=mesh")
    refused(lambda: register(sharded(mesh), low, replicas=mesh["replicate"], **options), "leave replicas out")
    for wrong, words in ((mesh["shard"], "different shards"), (mesh["replicate"].get_group(), "mesh[name]")):
        refused(lambda wrong=wrong: register(sharded(mesh["shard"]), low, replicas=wrong, **options), words)
    refused(lambda: register(sharded(mesh), low, iterations=9 + dist.get_rank()), "give the same on every rank")
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    refused(lambda: register(sharded(mesh, mp_policy=half), low, **options), "fp16", "scaler=False")
    register(sharded(mesh, mp_policy=half), low, scaler=False, **options).remove()
    refused(lambda: register(sharded(mesh), low, scaler=2.0**16, **options), "scaler = 65536.0", "or False")
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
    handle.remove()  # once more: torch does not add up over replicas beside the new one
    assert {type(unit.mesh).__name__ for unit in run.handle._units} == {"FSDPMeshInfo"}
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
    # With other settings: no error feedback any more, or of some parameters, whose own goes along once, as it is.
    none = Run(mesh, {**through.settings, "error_feedback": False})
    none.handle.load_state_dict(state, changed_settings=True)
    assert not none.handle.engine.errors
    fewer = Run(mesh, {**through.settings, "min_compression_elements": 100})
    fewer.handle.load_state_dict(state, changed_settings=True)
    owed = copy.deepcopy(fewer.handle.engine.errors)
    with poisoned(fewer.net, dist.get_rank() == 1):
        loss_of(fewer.net, tokens(9)).backward()
    assert fewer.handle.skipped == 1 and same(fewer.handle.engine.errors, owed)
    with scattered(fewer) as gaps:
        fewer.train(0, 2)
    assert max(gaps) < 1e-6 and 0 < len(fewer.handle.engine.errors) < len(owed)
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
    wrapper = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    for wrong, words in ((net, "no optimizer"), (wrapper, "optimizer.optimizer")):
        # On one rank alone, while the others wait for its answer.
        given = wrong if dist.get_rank() == 1 else wrapper.optimizer
        refused(lambda given=given: register(net, config, optimizer=given, **options), words)
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
