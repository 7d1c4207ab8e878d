"""EDGC under DDP with what users bring along: loss scales, fp16, saved states, copies. One launch for all cases."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.runtime.groups import timeout_of
from tests.integration import gpt_reference
from tests.integration.ddp_runs import EDGC, METHODS, SMALL, Case, Run, copied
from tests.integration.readme import DDP_PAGE, ROOT
from tests.workers import Cases, equal, refused, same

pytestmark = pytest.mark.slow
case = Cases(2, __name__)

STEPS = 24
BAD = (2, 5, 6, 11)  # not before DDP has settled its buckets: entries go to blocks and owners by them
LOW: dict[str, Any] = METHODS["powersgd"]
SCALED: dict[str, dict[str, Any]] = {
    "edgc": {**EDGC, "r_max": 10, "r_min": 4, "step_limit": 4},
    "edgc released": {**EDGC, "entropy": {**EDGC["entropy"], "estimator": "released"}},
    "edgc int8 after int4": {**EDGC, "factor_dtype": "int8", "warmup_bits": 4, "error_dtype": "bf16"},
    "edgc spectral": {**EDGC, "policy": "spectral", "target_error": 0.7},
    "powersgd one-sided": {"method": "powersgd", "rank": 4, "one_sided": True, **SMALL},
    "powersgd bf16": {"method": "powersgd", "rank": 4, "factor_dtype": "bf16", **SMALL},
    "quantize": {"method": "quantize", "bits": 4, **SMALL},
    "topk": {"method": "topk", "density": 0.1, **SMALL},
    "sign": {"method": "sign", **SMALL},
}


def run_of(settings: dict[str, Any], scaler: torch.amp.GradScaler | None = None) -> Any:
    return Run(Case(steps=STEPS), scaler=scaler, config=EDGCConfig.from_dict(settings))


def registered(module: nn.Module, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model under DDP and its handle."""
    model = DistributedDataParallel(module)
    return model, edgc.ddp.register(model, EDGCConfig.from_dict(settings or {}), iterations=9, **options)


@case
def scales() -> None:
    """A loss scale that is a power of two changes nothing, though it moves in the middle of windows, up and down; nor
    does going on without one."""

    def followed(method: str, scaler: torch.amp.GradScaler | None) -> tuple[list[Any], Tensor, dict[str, Tensor], Any]:
        run, rows = run_of(SCALED[method], scaler), []
        for step in range(STEPS):
            if scaler is not None and step in (7, 13):
                scaler.update(new_scale=scaler.get_scale() / (2 if step == 7 else 64))  # type: ignore[no-untyped-call]
            run.train(step, step + 1)
            last = run.handle.last
            row = (last.iteration, last.statistics.bytes, repr(last.entropy), repr(run.handle.decision), str(last))
            rows.append((last.rank, *row))
        scale, errors = run.handle.engine.entropy.scale, run.handle.engine.compressor.state_dict()["errors"]
        assert (scale > 1) == (scaler is not None) and errors
        state = run.handle.state_dict()
        run.close()
        return rows, run.weights, {name: error.double() / scale for name, error in errors.items()}, state

    for method in SCALED:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
        plain, scaled = followed(method, None), followed(method, scaler)
        assert same(plain[:3], scaled[:3]), method
        without = run_of(SCALED[method])
        without.handle.load_state_dict(scaled[3])
        engine, saved = without.handle.engine, plain[3]["engine"]
        assert engine.entropy.scale == 1 and same(engine.compressor.errors, saved["compressor"]["errors"]), method
        without.close()
        if method in ("edgc", "edgc spectral"):
            assert len({row[0] for row in plain[0]} - {None}) >= 2, f"{method} does not act, so this would say little"


@case
def skips() -> None:
    """Steps with an infinite gradient, against a run to which they were not given."""
    for method in SCALED:
        weights = []
        for poisoned in (True, False):
            run = run_of(SCALED[method], torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6))
            factor = [1.0]
            run.model.module.second.weight.register_hook(lambda gradient, factor=factor: gradient * factor[0])
            unchanged = []
            for step in range(16):
                bad = step in BAD
                if bad and not poisoned:
                    continue
                before = copied(run.handle.engine.compressor.state_dict())
                factor[0] = math.inf if bad and dist.get_rank() == 1 else 1.0
                run.train(step, step + 1)
                if bad:
                    # Not what follows from the scale, which the scaler halves, and so does what is kept at once.
                    unchanged.append(same(before, run.handle.engine.compressor.state_dict()))
                    run.scaler.update(new_scale=2.0**8)
            skipped = run.handle.skipped
            run.close()
            weights.append(run.weights)
            assert unchanged == [True] * skipped and skipped == (len(BAD) if poisoned else 0), method
        if not method.startswith("edgc"):  # whose windows count iterations, skipped ones too
            assert torch.equal(*weights), method


@case
def states() -> None:
    """A state that does not fit is refused; on purpose a run goes on with other settings and owes what it owed."""
    low = {**LOW, "rank": 8}
    first = run_of(low).train(0, 4)
    state = first.handle.state_dict()
    engine, compressor = state["engine"], state["engine"]["compressor"]

    def answer(settings: dict[str, Any], state: Any, *names: str, **options: Any) -> None:
        run = run_of(settings)
        refused(lambda: run.handle.load_state_dict(state, **options), *names)
        run.close()

    answer({**low, "rank": 2}, state, "rank = 8, now 2", "changed_settings")
    answer({**low, "factor_dtype": "int8", "error_dtype": "bf16"}, state, "factor_dtype = 'fp32'", "error_dtype")
    answer(METHODS["topk"], state, "powersgd", "topk")
    answer(METHODS["topk"], state, "powersgd", "topk", changed_settings=True)
    answer(low, None, "NoneType")
    for key in ("engine", "layout"):
        answer(low, {name: value for name, value in state.items() if name != key}, key)
    answer(low, {**state, "engine": {name: value for name, value in engine.items() if name != "scale"}}, "engine.scale")
    for change, *names in (
        ({name: value for name, value in compressor.items() if name != "factors"}, "compressor.factors"),
        ({**compressor, "errors": {"third.weight": torch.zeros(3, 3)}}, "third.weight, (3, 3)"),
        ({**compressor, "errors": {"first.weight": torch.zeros(3, 3)}}, "first.weight, (3, 3)", "(24, 24)"),
    ):
        answer(low, {**state, "engine": {**engine, "compressor": change}}, *names)
    other = run_of({**low, "rank": 2})
    other.handle.load_state_dict(state, changed_settings=True)
    assert same(other.handle.engine.compressor.state_dict()["errors"], compressor["errors"])
    other.train(4, 8)
    assert equal(other.weights) and other.handle.last.rank == 2
    # The same for the controller: other limits, other policy.
    run = run_of(SCALED["edgc"]).train(0, 12)
    saved = run.handle.state_dict()
    answer({**SCALED["edgc"], "r_max": 8}, saved, "r_max = 10, now 8")
    for change, ranks in (
        ({"r_max": 4, "r_min": 2}, range(2, 5)),
        ({"policy": "spectral"}, range(4, 11)),
        ({"policy": "fixed", "rank": 6}, [6]),
        ({"window": 3}, range(4, 11)),
    ):
        changed = run_of(EDGCConfig.usable({**SCALED["edgc"], **change}))
        changed.handle.load_state_dict(saved, changed_settings=True)
        changed.train(12, 18)
        assert equal(changed.weights) and changed.handle.last.rank in ranks, change
        changed.close()
    for each in (first, other, run):
        each.close()


@case
def copies() -> None:
    """Copies and pickles of a registered model, which average plainly and can be registered anew."""
    run = Run(Case()).train(0, 3)
    duplicate = copy.deepcopy(run.model)
    file = io.BytesIO()
    torch.save(run.model, file)
    torch.optim.swa_utils.AveragedModel(run.model).update_parameters(run.model)
    run.train(3, 4)
    file.seek(0)
    for model in (duplicate, torch.load(file, weights_only=False)):
        handle = edgc.ddp.register(model, Case().config, iterations=9)
        model(torch.ones(2, 24), False).square().mean().backward()
        assert handle.last is not None and handle.last.rank == 2
        handle.remove()
    run.close()
    assert equal(run.weights)


@case
def groups() -> None:
    """The group that is made has the timeout of the model's and ends with the handle."""
    for ranks in ([0, 1], None):
        group = dist.new_group(ranks, timeout=timedelta(seconds=77))
        model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
        handle = edgc.ddp.register(model, EDGCConfig(), iterations=9)
        assert timeout_of(handle.group) == timedelta(seconds=77)
        handle.remove()
    alive = dist.distributed_c10d._world.pg_names
    before = len(alive)
    model, handle = registered(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    handle.remove()
    assert handle.state_dict()["world"] == 2 and len(alive) == before


@case
def frozen() -> None:
    """A layer that was frozen after DDP had put it into a bucket does not end iterations early."""
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
    model = DistributedDataParallel(layers, find_unused_parameters=True, bucket_cap_mb=0.003)  # as many as layers
    layers[3].weight.requires_grad_(False)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict(LOW), iterations=9)
    for iteration in (1, 2, 3):
        model(torch.ones(2, 32)).square().mean().backward()
        assert handle.last is not None and handle.last.iteration == iteration
        assert sum(map(len, handle._worker.layout)) == 4
    handle.remove()


@case
def registered_again() -> None:
    """A model that is registered, left to DDP, and registered again, with one hook of DDP's all the time."""
    run = run_of(LOW).train(0, 4)
    run.handle.remove()
    run.ranks.clear()
    assert equal(run.train(4, 6).weights)
    sent = []
    for method in ("topk", "powersgd"):
        run.handle = edgc.ddp.register(run.model, EDGCConfig.from_dict(METHODS[method]), iterations=STEPS)
        run.train(6, 9)
        assert run.handle.last.iteration == 3
        sent.append(run.handle.last.statistics.bytes)
        run.handle.remove()
    assert equal(run.weights) and len(run.model._comm_hooks) == 1
    assert sent[0] != sent[1] and all(sent)


@case
def failed() -> None:
    """A handle ends after a backward that an exception has ended on every rank, and the model is registered anew."""
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.003)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict(LOW), iterations=9)
    model(torch.ones(2, 32)).square().mean().backward()

    def fails(_: Tensor) -> None:
        refused(handle.remove, "call it after backward")
        raise ValueError("no gradient")

    hook = layers[1].weight.register_hook(fails)
    with pytest.raises(ValueError, match="no gradient"):
        model(torch.ones(2, 32)).square().mean().backward()
    hook.remove()
    alive = len(dist.distributed_c10d._world.pg_names)
    handle.remove()
    assert not handle.active and len(dist.distributed_c10d._world.pg_names) == alive - 1
    again = DistributedDataParallel(copy.deepcopy(layers))  # DDP itself does not go on after that
    handle = edgc.ddp.register(again, EDGCConfig.from_dict(LOW), iterations=9)
    again(torch.ones(2, 32)).square().mean().backward()
    assert handle.last is not None
    handle.remove()


def warned(call: Callable[[], Any]) -> list[str]:
    """Warnings of the library in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(item.message) for item in caught if str(item.message).startswith("edgc")]


@case
def warnings_of_users() -> None:
    """The first rank warns of a loss scale that nobody gave, and of settings that compress nothing."""

    def scaled(given: Any, *, enabled: bool = True, clip: bool = False) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        model, handle = registered(nn.Linear(32, 32), LOW, scaler=scaler if given else given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 32)).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
        handle.remove()

    def shape(**settings: Any) -> None:
        registered(nn.Linear(32, 96), settings)[1].remove()

    first = dist.get_rank() == 0
    above = {**EDGC, "rank_multiple": 24, "r_max": 24, "r_min": 24, "step_limit": 24}
    for name, call, key in (
        ("not given", lambda: scaled(None), "scaler"),
        ("not given, clipped", lambda: scaled(None, clip=True), "scaler"),
        ("given", lambda: scaled(True), None),
        ("on purpose", lambda: scaled(False), None),
        ("not enabled", lambda: scaled(None, enabled=False), None),
        ("rank too high", lambda: shape(method="powersgd", rank=24), "rank 24"),
        ("rank high enough", lambda: shape(method="powersgd", rank=23), None),
        ("too small", lambda: shape(method="topk", min_compression_elements=10**6), "nothing is compressed"),
        ("edgc", lambda: shape(**above), "rank 24"),
        ("none", lambda: shape(method="none", min_compression_elements=10**6), None),
    ):
        messages = warned(call)
        assert len(messages) == (first and key is not None), (name, messages)
        assert all(key is not None and key in message for message in messages), (name, messages)


@case
def advised() -> None:
    """Settings that README and the page on DDP offer, each registered as it stands."""
    page = DDP_PAGE.read_text(encoding="utf-8") + (ROOT / "README.md").read_text(encoding="utf-8")
    calls = re.findall(r"`EDGCConfig\.from_dict\((.*?)\)`", page)
    calls += re.findall(r"\| `(method=.*?)` \|", page)
    assert len(set(calls)) > 4 and any("paper" in call for call in calls)
    for call in calls:
        settings = json.loads(call) if call.startswith("{") else eval(f"dict({call})")
        model = DistributedDataParallel(nn.Linear(256, 256))
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=10**5)
        model(torch.ones(2, 256)).sum().backward()
        handle.remove()


@case
def gpt() -> None:
    """A small GPT trains as with torch's PowerSGD hook."""
    results = gpt_reference.losses(50)
    reference, uncompressed = results["torch"][0], results["plain"][0]
    assert len(reference) == 50 and reference[-1] < reference[0] - 0.3
    assert max(abs(a - b) for a, b in zip(reference, uncompressed, strict=True)) > 0.1
    for name in ("edgc", "edgc, many buckets"):
        losses, buckets = results[name]
        assert max(abs(a - b) for a, b in zip(reference, losses, strict=True)) < 1e-4, name
        assert buckets > 5 if "many" in name else buckets == 1


@case
def lost_peer() -> None:
    """``remove`` where the other rank is gone, its connections closed as when its process has ended."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(32, 32), process_group=group)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict(LOW), iterations=9)
    model(torch.ones(2, 32)).sum().backward()
    before = len(dist.distributed_c10d._world.pg_names)
    if dist.get_rank() == 1:
        dist.destroy_process_group(handle.group)
        dist.destroy_process_group(group)
        del model, handle, group
        gc.collect()
        dist.barrier()
        return
    dist.barrier()
    assert len(warned(handle.remove)) == 1
    assert not warned(handle.remove) and not handle.active
    assert len(dist.distributed_c10d._world.pg_names) == before - 1


test_ddp = case.test()
