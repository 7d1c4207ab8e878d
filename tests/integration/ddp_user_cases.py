"""What the ranks of ``test_ddp_users.py`` do: what users of DDP bring along besides a model."""

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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.runtime.device import masked_path
from edgc.runtime.groups import timeout_of
from tests.integration import ddp_odd_cases as odd
from tests.integration.ddp_cases import world
from tests.integration.ddp_runs import EDGC, METHODS, SMALL, Case, Run, copied, same
from tests.integration.readme import DDP_PAGE, ROOT
from tests.workers import said

STEPS = 24
BAD = (2, 5, 6, 11)  # not before DDP has settled its buckets: entries go to blocks and owners by them
SCALED: dict[str, dict[str, Any]] = {
    "edgc": {**EDGC, "r_max": 10, "r_min": 4, "step_limit": 4},
    "edgc released": {**EDGC, "entropy": {**EDGC["entropy"], "estimator": "released"}},
    "edgc int8 after int4": {**EDGC, "factor_dtype": "int8", "warmup_bits": 4, "error_dtype": "bf16"},
    "edgc spectral": {**EDGC, "policy": "spectral", "target_error": 0.7, "per_layer": True},
    "powersgd one-sided": {"method": "powersgd", "rank": 4, "one_sided": True, **SMALL},
    "powersgd bf16": {"method": "powersgd", "rank": 4, "factor_dtype": "bf16", **SMALL},
    "quantize": {"method": "quantize", "bits": 4, **SMALL},
    "topk": {"method": "topk", "density": 0.1, **SMALL},
    "sign": {"method": "sign", **SMALL},
}


def started(method: str, scaler: torch.amp.GradScaler | None) -> Run:
    return Run(Case(steps=STEPS), scaler=scaler, config=EDGCConfig.from_dict(SCALED[method]))


def followed(method: str, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    """A run with what it decided; the scale of a scaler moves in the middle of windows, up and down."""
    run = started(method, scaler)
    assert run.handle is not None
    rows = []
    for step in range(STEPS):
        if scaler is not None and step in (7, 13):
            scaler.update(new_scale=scaler.get_scale() / (2 if step == 7 else 64))  # type: ignore[no-untyped-call]
        run.train(step, step + 1)
        last = run.handle.last
        assert last is not None
        rows.append(
            (last.iteration, last.rank, last.statistics.bytes, repr(last.entropy), repr(run.handle.decision), str(last))
        )
    scale = run.handle.engine.entropy.scale
    errors = run.handle.engine.compressor.state_dict()["errors"]
    kept = {name: error.double() / scale for name, error in sorted(errors.items())}
    result = {"rows": rows, "weights": run.weights, "errors": kept, "scale": scale}
    run.close()
    return result


def scales() -> dict[str, dict[str, Any]]:
    """Every method without a loss scale, and with one that is a power of two and changes."""
    results = {}
    for method in SCALED:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
        results[method] = {"plain": followed(method, None), "scaled": followed(method, scaler)}
    return results


class Poison:
    """Makes one gradient of rank 1 infinite while ``on``."""

    def __init__(self, run: Run) -> None:
        self.on = False
        run.model.module.second.weight.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * math.inf if self.on and dist.get_rank() == 1 else gradient


def skips() -> dict[str, dict[str, Any]]:
    """Steps with an infinite gradient, against a run to which they were not given."""
    results: dict[str, dict[str, Any]] = {}
    for method in SCALED:
        runs = []
        for poisoned in (True, False):
            run = started(method, torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6))
            assert run.handle is not None
            poison, unchanged = Poison(run), []
            for step in range(16):
                bad = step in BAD
                if bad and not poisoned:
                    continue
                before, poison.on = copied(run.handle.engine.compressor.state_dict()), bad
                run.train(step, step + 1)
                if bad:
                    # Not what follows from the scale, which the scaler halves, and so does what is kept at once.
                    after = run.handle.engine.compressor.state_dict()
                    unchanged.append(same(before, after))
                    run.scaler.update(new_scale=2.0**8)  # type: ignore[union-attr]
            skipped = run.handle.skipped
            runs.append({"weights": run.weights, "unchanged": unchanged, "skipped": skipped})
            run.close()
        results[method] = {"poisoned": runs[0], "without": runs[1]}
    return results


def masked() -> dict[str, dict[str, Any]]:
    """Every method on the path of a GPU, without a thread, beside that of a CPU."""
    results: dict[str, dict[str, Any]] = {}
    for method in SCALED:
        for on in (False, True):
            with masked_path(on):
                run = started(method, None).train(0, STEPS)
                assert run.handle is not None and run.handle._worker.inline == on
                last = run.handle.last
                assert last is not None
                found = {"bytes": last.statistics.bytes, "iteration": last.iteration}
                results[f"{method}, {on}"] = {"weights": run.weights, **found}
                run.close()
    # A resumed run on that path equals one that never stopped.
    with masked_path():
        run = started("edgc", None).train(0, 9)
        state = run.state()
        run.train(9, 16)
        again = started("edgc", None).load(state).train(9, 16)
        results["resumed"] = {"equal": torch.equal(run.weights, again.weights)}
        run.close()
        again.close()
    return results


class Halves(nn.Module):
    """Parameters in fp16 whose gradients are 40 000 each."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(32, 32, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float16))

    def forward(self) -> Tensor:
        return (self.matrix.float() * 40000).sum() + (self.bias.float() * 40000).sum()


def halves() -> dict[str, tuple[float, float]]:
    results = {}
    for method in ("none", "bf16", "powersgd", "topk", "randomk", "quantize", "sign"):
        rank = {"rank": 2} if method == "powersgd" else {}
        density = {"density": 1.0} if method in ("topk", "randomk") else {}
        model = DistributedDataParallel(Halves())
        config = EDGCConfig.from_dict({"method": method, **rank, **density, **SMALL})
        handle = edgc.ddp.register(model, config, iterations=9, scaler=False)
        model().backward()
        assert isinstance(model.module, Halves)
        gradients = model.module.matrix.grad, model.module.bias.grad
        results[method] = tuple(float(g.flatten()[0]) for g in gradients if g is not None)
        handle.remove()
    return results  # type: ignore[return-value]


def states() -> dict[str, Any]:
    """What a state that does not fit is answered with, and going on with other settings on purpose."""

    def run(**settings: Any) -> Run:
        return Run(Case(steps=STEPS), config=EDGCConfig.from_dict(settings))

    def answer(one: Run, state: Any, **options: Any) -> str:
        assert one.handle is not None
        return said(lambda: one.handle.load_state_dict(state, **options))

    low = {"method": "powersgd", "rank": 8, **SMALL}
    first = run(**low).train(0, 4)
    assert first.handle is not None
    state = first.handle.state_dict()
    answers: dict[str, Any] = {
        "other rank": answer(run(**{**low, "rank": 2}), state),
        "other type": answer(run(**low, factor_dtype="int8", error_dtype="bf16"), state),
        "other method": answer(run(method="topk", **SMALL), state),
        "other method on purpose": answer(run(method="topk", **SMALL), state, changed_settings=True),
        "none": answer(run(**low), None),
        "no engine": answer(run(**low), {key: value for key, value in state.items() if key != "engine"}),
        "no layout": answer(run(**low), {key: value for key, value in state.items() if key != "layout"}),
        "no scale": answer(run(**low), {**state, "engine": {k: v for k, v in state["engine"].items() if k != "scale"}}),
    }
    compressor = state["engine"]["compressor"]
    for name, change in {
        "no factors": {k: v for k, v in compressor.items() if k != "factors"},
        "other parameters": {**compressor, "errors": {"third.weight": torch.zeros(3, 3)}},
        "other shape": {**compressor, "errors": {"first.weight": torch.zeros(3, 3)}},
    }.items():
        answers[name] = answer(run(**low), {**state, "engine": {**state["engine"], "compressor": change}})
    # On purpose: the settings of now hold, and what was kept is still owed.
    other = run(**{**low, "rank": 2})
    assert other.handle is not None
    other.handle.load_state_dict(state, changed_settings=True)
    errors = other.handle.engine.compressor.state_dict()["errors"]
    answers["errors are taken over"] = same(errors, compressor["errors"])
    other.train(4, 8)
    answers["rank in use"] = other.handle.last.rank if other.handle.last else None
    answers["weights"] = other.weights
    # The same for the controller: other limits, other policy.
    edgc_run = run(**SCALED["edgc"]).train(0, 12)
    assert edgc_run.handle is not None
    saved = edgc_run.handle.state_dict()
    answers["other limits"] = answer(run(**{**SCALED["edgc"], "r_max": 8}), saved)
    ranks = []
    for change in (
        {"r_max": 4, "r_min": 2},
        {"policy": "spectral"},
        {"policy": "fixed", "rank": 6},
        {"window": 3},
    ):
        changed = run(**EDGCConfig.usable({**SCALED["edgc"], **change}))
        assert changed.handle is not None
        changed.handle.load_state_dict(saved, changed_settings=True)
        changed.train(12, 18)
        ranks.append([changed.handle.last.rank if changed.handle.last else None, changed.weights])
        changed.close()
    answers["changed ranks"] = ranks
    for one in (first, other, edgc_run):
        one.close()
    return answers


def copies() -> dict[str, Any]:
    """Copies and pickles of a registered model, which average plainly and can be registered anew."""
    run = Run(Case()).train(0, 3)
    duplicate = copy.deepcopy(run.model)
    file = io.BytesIO()
    torch.save(run.model, file)
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    averaged.update_parameters(run.model)
    run.train(3, 4)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    results = []
    for model in (duplicate, loaded):
        handle = edgc.ddp.register(model, Case().config, iterations=9)
        model(torch.ones(2, 24), False).square().mean().backward()
        results.append(handle.last.rank if handle.last else None)
        handle.remove()
    run.close()
    return {"ranks": results, "weights": run.weights}


def timeouts() -> list[float]:
    """The timeout of the group that is made for the reductions, where the model's has one of its own."""
    found = []
    for ranks in ([0, 1], None):
        group = dist.new_group(ranks, timeout=timedelta(seconds=77))
        model = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
        handle = edgc.ddp.register(model, EDGCConfig(), iterations=9)
        timeout = timeout_of(handle.group)
        found.append(timeout.total_seconds() if timeout is not None else math.nan)
        handle.remove()
    return found


def frozen() -> dict[str, Any]:
    """A layer that was frozen after DDP had put it into a bucket, as many buckets as layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
    model = DistributedDataParallel(layers, find_unused_parameters=True, bucket_cap_mb=0.003)
    layers[3].weight.requires_grad_(False)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict({"method": "powersgd", "rank": 4, **SMALL}), iterations=9)
    iterations, reduced = [], []
    for _ in range(3):
        model(torch.ones(2, 32)).square().mean().backward()
        assert handle.last is not None
        iterations.append(handle.last.iteration)
        reduced.append(sum(map(len, handle._worker.layout)))
    handle.remove()
    return {"iterations": iterations, "reduced": reduced}


def again() -> dict[str, Any]:
    """A model that is registered, left to DDP, and registered again, with one hook of DDP's all the time."""
    run = Run(Case(steps=STEPS)).train(0, 4)
    assert run.handle is not None
    run.handle.remove()
    run.ranks.clear()
    removed, sent = run.train(4, 6).weights, []
    for method in ("topk", "powersgd"):
        run.handle = edgc.ddp.register(run.model, EDGCConfig.from_dict(METHODS[method]), iterations=STEPS)
        run.train(6, 9)
        assert run.handle.last is not None
        sent.append((run.handle.last.iteration, run.handle.last.statistics.bytes))
        run.handle.remove()
    return {"removed": removed, "weights": run.weights, "sent": sent, "hooks": len(run.model._comm_hooks)}


def warned(call: Callable[[], Any]) -> list[str]:
    """What of the library's a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(item.message) for item in caught if str(item.message).startswith("edgc")]


def told() -> dict[str, list[str]]:
    """What is warned of: a loss scale that nobody gave, and settings that compress nothing."""

    def scaled(given: Any, *, enabled: bool = True, clip: bool = False) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        model = DistributedDataParallel(nn.Linear(32, 32))
        config = EDGCConfig.from_dict(METHODS["powersgd"])
        handle = edgc.ddp.register(model, config, iterations=9, scaler=scaler if given else given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 32)).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
        handle.remove()

    def registered(**settings: Any) -> None:
        model = DistributedDataParallel(nn.Linear(32, 96))
        edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=9).remove()

    return {
        "not given": warned(lambda: scaled(None)),
        "not given, clipped": warned(lambda: scaled(None, clip=True)),
        "given": warned(lambda: scaled(True)),
        "on purpose": warned(lambda: scaled(False)),
        "not enabled": warned(lambda: scaled(None, enabled=False)),
        "rank too high": warned(lambda: registered(method="powersgd", rank=24)),
        "rank high enough": warned(lambda: registered(method="powersgd", rank=23)),
        "too small": warned(lambda: registered(method="topk", min_compression_elements=10**6)),
        "edgc": warned(lambda: registered(**EDGC | {"rank_multiple": 24, "r_max": 24, "r_min": 24, "step_limit": 24})),
        "none": warned(lambda: registered(method="none", min_compression_elements=10**6)),
    }


def lost_peer() -> dict[str, Any]:
    """What ``remove`` does where the other rank is gone: its connections are closed, as when its process has ended."""
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(32, 32), process_group=group)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict(METHODS["powersgd"]), iterations=9)
    model(torch.ones(2, 32)).sum().backward()
    before = len(dist.distributed_c10d._world.pg_names)
    if dist.get_rank() == 1:
        dist.destroy_process_group(handle.group)
        dist.destroy_process_group(group)
        del model, handle, group
        gc.collect()
        dist.barrier()
        return {}
    dist.barrier()
    told = warned(handle.remove)
    left = len(dist.distributed_c10d._world.pg_names) - before
    return {"told": told, "again": warned(handle.remove), "groups": left, "active": handle.active}


def advised() -> list[str]:
    """Settings that README and the page on DDP offer, each registered as it stands."""
    page = DDP_PAGE.read_text(encoding="utf-8") + (ROOT / "README.md").read_text(encoding="utf-8")
    calls = re.findall(r"`EDGCConfig\.from_dict\((.*?)\)`", page)
    calls += re.findall(r"\| `(method=.*?)` \|", page)
    for call in calls:
        settings = json.loads(call) if call.startswith("{") else eval(f"dict({call})")
        model = DistributedDataParallel(nn.Linear(256, 256))
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=10**5)
        model(torch.ones(2, 256)).sum().backward()
        handle.remove()
    return calls


def groups() -> list[int]:
    """How many process groups there are while models come and go."""
    alive = dist.distributed_c10d._world.pg_names
    found = [len(alive)]
    given = dist.new_group()
    for process_group in (None, None, given):
        model = DistributedDataParallel(nn.Linear(8, 8))
        handle = edgc.ddp.register(model, EDGCConfig(), iterations=9, process_group=process_group)
        model(torch.ones(2, 8)).sum().backward()
        state = handle.state_dict()
        handle.remove()
        assert handle.state_dict()["world"] == state["world"] == 2
        found.append(len(alive))
    dist.destroy_process_group(given)
    return found


def all_cases() -> dict[str, Any]:
    cases: dict[str, Callable[[], Any]] = {
        "scales": scales,
        "skips": skips,
        "masked": masked,
        "halves": halves,
        "states": states,
        "copies": copies,
        "timeouts": timeouts,
        "frozen": frozen,
        "groups": groups,
        "unused": odd.unused,
        "modes": odd.modes,
        "products": odd.products,
        "empty": odd.empty,
        "memory orders": odd.memory_orders,
        "sparse": odd.sparse,
        "ranges": odd.ranges,
        "again": again,
        "told": told,
        "lost peer": lost_peer,
        "advised": advised,
    }
    return world(cases)
