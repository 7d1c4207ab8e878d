"""What the ranks of ``test_ddp.py`` do: many cases in one launch."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from tests.integration import gpt_reference
from tests.integration.ddp_runs import EDGC, METHODS, TYPES, Case, Run, batch, copied, recorded, same
from tests.workers import said

RESUMED = ("powersgd", "int8 factors", "int6 factors", "edgc", "quantize", "topk_dgc")
TIMED = ("search", "gate")  # what these do depends on times that they measure: no two runs are the same


def trained(case: Case) -> dict[str, Any]:
    alive()
    with recorded(case.delays) as calls:
        run = Run(case).train(0, case.steps)
    handle = run.handle
    run.close()
    return {
        "weights": run.weights,
        "losses": run.losses,
        "calls": calls,
        "buckets": len(handle._worker.layout) if handle else 0,
        "ranks": run.ranks,
        "bytes": handle.last.statistics.bytes if handle and handle.last else 0,
    }


def matrix(steps: int) -> dict[str, dict[str, Any]]:
    """``steps`` of each case, the first half without accumulation and the second half with it."""
    results = {}
    for unused, static, dtype in itertools.product((False, True), (False, True), TYPES):
        # Fewer parameters, smaller buckets: one for each of the four.
        cap = 1e-3 if unused else 4e-5
        case = Case(accumulation=2, unused=unused, static=static, dtype=dtype, steps=steps, bucket_cap_mb=cap)
        results[f"unused {unused}, static {static}, {dtype}"] = trained(case)
    return results


def methods() -> dict[str, dict[str, Any]]:
    """Every method with one timing and with another, and none against DDP without a hook."""
    results = {}
    for name in [name for name in METHODS if name not in TIMED]:
        for delays in (False, True):
            case = Case(method=name, unused=True, steps=14, delays=delays)
            results[f"{name}, delays {delays}"] = trained(case)
    for name in TIMED:
        results[f"{name}, timed"] = trained(Case(name, unused=True, steps=14, delays=True))
    for dtype, plain in itertools.product(TYPES, (False, True)):
        case = Case("none", 2, dtype=dtype, bucket_view=dtype == "fp32", steps=6, plain=plain)
        results[f"{dtype}, plain {plain}"] = trained(case)
    return results


def resume() -> dict[str, dict[str, Any]]:
    """A run that is never stopped, and one that a new model, with its buckets not yet cut anew, goes on with."""
    results = {}
    for name, (unused, static) in itertools.product(RESUMED, ((False, False), (True, True))):
        case = Case(name, unused=unused, static=static, steps=16)
        run = Run(case).train(0, 9)
        state = run.state()
        edgc_state = copied(state["edgc"])
        run.train(9, 16)
        first = Run(case, seed=1).train(0, 1)
        assert first.handle is not None
        fresh = len(first.handle._worker.layout)
        first.close()
        again = Run(case, seed=1).load(state).train(9, 16)
        results[f"{name}, unused {unused}, static {static}"] = {
            "equal weights": torch.equal(run.weights, again.weights),
            "equal state": same(run.state(), again.state()),  # optimizer, error feedback, controller, layout
            "saved state untouched": same(state["edgc"], edgc_state),
            "weights": run.weights,
            "buckets": len(state["edgc"]["layout"]),
            "buckets of a new model": fresh,
        }
        run.close()
        again.close()
    return results


def two_models() -> dict[str, Any]:
    """Two models in one backward, their buckets mixed, and each of them alone."""
    cases = (Case("powersgd"), Case("edgc", unused=True))
    alone = [Run(case).train(0, 12).weights for case in cases]
    with recorded(delays=True):
        runs = [Run(case) for case in cases]
        for step in range(12):
            for run in runs:
                run.optimizer.zero_grad()
            x, target = batch(step)
            losses = [(run.model(x, run.uses(step)) - target).square().mean() for run in runs]
            torch.stack(losses).sum().backward()
            for run in runs:
                run.optimizer.step()
    return {"alone": alone, "together": [run.weights for run in runs]}


def overlap() -> list[int]:
    """Hold backward up before its last bucket until the first one is averaged; the buckets of each iteration."""
    hook, futures, counts = edgc.ddp.Handle._reduce, list[Any](), list[int]()

    def patient(handle: edgc.ddp.Handle, bucket: Any) -> Any:
        if bucket.is_last() and futures:
            futures[0].wait()
        future = hook(handle, bucket)
        futures.append(future)
        if bucket.is_last():
            counts.append(len(futures))
            futures.clear()
        return future

    run = Run(Case(unused=True))
    edgc.ddp.Handle._reduce = patient  # type: ignore[method-assign, assignment]
    try:
        run.train(0, 4)
    finally:
        edgc.ddp.Handle._reduce = hook  # type: ignore[method-assign]
    run.close()
    return counts


def not_finite() -> dict[str, Any]:
    """GradScaler trains on; one gradient of one rank is not finite at one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(Case(unused=True), scaler=scaler)
    assert run.handle is not None
    compressor = run.handle.engine.compressor
    poison = [1.0]
    run.model.module.second.weight.register_hook(lambda gradient: gradient * poison[0])
    record: dict[str, Any] = {}
    for step in range(20):
        bad = step == 8
        before, weights = copied(compressor.state_dict()), run.weights
        poison[0] = math.inf if bad and dist.get_rank() == 1 else 1.0
        run.optimizer.zero_grad()
        x, target = batch(step)
        loss = (run.model(x, True) - target).square().mean()
        scaler.scale(loss).backward()
        run.losses.append(float(loss.detach()))
        if bad:
            after = compressor.state_dict()
            for kind in ("errors", "factors"):
                assert before[kind]
                for key, tensor in before[kind].items():
                    record[f"{kind} of {key}"] = torch.equal(tensor, after[kind][key])
            gradients = run.model.module.named_parameters()
            record["finite"] = {n: bool(p.grad.isfinite().any()) for n, p in gradients if p.grad is not None}
        scaler.step(run.optimizer)
        scaler.update()
        if bad:
            record["step was skipped"] = torch.equal(weights, run.weights)
    record["layout"] = run.handle._worker.layout
    run.close()
    return {**record, "skipped": run.handle.skipped, "losses": run.losses, "weights": run.weights}


def lost_rank() -> str:
    """One rank's compressor fails; what backward says, there and on its peer, whose group has a timeout."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    run = Run(Case(), group=group).train(0, 3)
    assert run.handle is not None
    if dist.get_rank() == 1:

        def fail(*args: Any) -> Any:
            raise ValueError("out of\nluck")

        run.handle.engine.compressor.steps = fail  # type: ignore[method-assign, assignment]
    try:
        run.train(3, 4)
    except RuntimeError as error:
        said = str(error)
    try:
        run.handle._reduce(None)
    except RuntimeError as error:
        said += "" if str(error) == said else f", and then: {error}"
    run.close()
    return said


def ends() -> dict[str, Any]:
    """After remove DDP averages plainly; a model that nobody holds any longer takes its thread with it."""

    def threads() -> int:
        gc.collect()
        return sum(thread.name == "edgc-buckets" for thread in threading.enumerate())

    counts = [threads()]
    run = Run(Case(unused=True)).train(0, 3)
    state = run.state()
    counts.append(threads())
    run.close()
    counts.append(threads())
    run.close()
    removed = run.train(3, 6).weights
    plain = Run(Case(unused=True, plain=True))
    plain.model.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(state["optimizer"])
    forgotten: Run | None = Run(Case()).train(0, 2)
    counts.append(threads())
    del forgotten
    counts.append(threads())
    return {"threads": counts, "removed": removed, "plain": plain.train(3, 6).weights}


def uneven() -> Tensor:
    """Ranks with different numbers of batches, under DDP's own ``join``."""
    run = Run(Case())
    with run.model.join():
        for step in range(4 + 2 * dist.get_rank()):
            run.train(step, step + 1)
    run.close()
    return run.weights


class Shapes(nn.Module):
    """A convolution in channels-last order and a matrix whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 12, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(20, 50).mT)

    def forward(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return self.convolution(x).square().mean(), (self.transposed @ direction).square().mean()


def shapes() -> dict[str, Any]:
    """Gradients of rank 1 lie in memory in other orders than the parameter's shape says."""
    record: dict[str, Any] = {}
    torch.manual_seed(3)
    x = torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last)
    direction = torch.randn(20, 1)
    for name in ("plain", "none", "powersgd"):
        torch.manual_seed(4)
        model = DistributedDataParallel(Shapes())
        handle = None
        if name != "plain":
            rank = {"rank": 1} if name == "powersgd" else {}
            options = {"method": name, **rank, "min_compression_elements": 64}
            handle = edgc.ddp.register(model, EDGCConfig.from_dict(options), iterations=9)
        for _ in range(3):
            model.zero_grad()
            convolved, product = model(x, direction)
            (convolved + product).backward()
        named = model.module.named_parameters()
        record[name] = {key: p.grad.clone() for key, p in named if p.grad is not None}
        if handle is not None:
            errors = handle.engine.compressor.state_dict().get("errors", {})
            record[f"{name} errors"] = {key: float(error.norm()) for key, error in errors.items()}
            handle.remove()
    return record


def alive_here() -> tuple[int, int]:
    """How many process groups and threads of reductions this process has."""
    threads = sum(thread.name == "edgc-buckets" for thread in threading.enumerate())
    return len(dist.distributed_c10d._world.pg_names), threads


def wrapped_otherwise() -> dict[str, Callable[[], DistributedDataParallel]]:
    """Models whose gradients DDP does not give to a hook of ours, or not all of them."""
    net = nn.Linear

    def python_reducer() -> DistributedDataParallel:
        with mock.patch("torch._dynamo.config.optimize_ddp", "python_reducer"):
            return DistributedDataParallel(net(24, 48))

    def optimizer_in_backward() -> DistributedDataParallel:
        module = net(24, 48)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        return DistributedDataParallel(module)

    def built_in() -> DistributedDataParallel:
        model = DistributedDataParallel(net(24, 48))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return model

    def another_hook() -> DistributedDataParallel:
        model = DistributedDataParallel(net(24, 48))
        model.register_comm_hook(None, allreduce_hook)
        return model

    def hook_of_the_reducer() -> DistributedDataParallel:
        model = DistributedDataParallel(net(24, 48))
        dist._register_comm_hook(model.reducer, None, allreduce_hook)
        return model

    def unfrozen(ranks: Sequence[int] = (0, 1)) -> DistributedDataParallel:
        frozen = dist.get_rank() in ranks
        module = nn.Sequential(net(24, 48), net(48, 24))
        module[0].requires_grad_(not frozen)
        # Ranks whose models differ: DDP would say so itself.
        with mock.patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"):
            model = DistributedDataParallel(module)
        module.requires_grad_(True)
        return model

    def half() -> DistributedDataParallel:
        return DistributedDataParallel(net(24, 48, dtype=torch.float16))

    def mixed() -> DistributedDataParallel:
        types = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
        return DistributedDataParallel(net(24, 48), mixed_precision=types)

    return {
        "python reducer": python_reducer,
        "optimizer in backward": optimizer_in_backward,
        "built-in hook": built_in,
        "another hook": another_hook,
        "hook of the reducer": hook_of_the_reducer,
        "unfrozen": unfrozen,
        "unfrozen on one rank": lambda: unfrozen([1]),
        "fp16": half,
        "mixed precision": mixed,
    }


def refusals() -> dict[str, Any]:
    """What a mistake is answered with; under ``left`` what refusals by ``register`` have left behind."""

    def wrap(*layers: nn.Module) -> DistributedDataParallel:
        # Not every version of torch can send complex parameters with gloo, or be told to leave it.
        with mock.patch("torch.nn.parallel.distributed._sync_module_states"):
            return DistributedDataParallel(nn.Sequential(*layers))

    def register(length: Any = 9, **options: Any) -> edgc.ddp.Handle:
        return edgc.ddp.register(wrap(nn.Linear(32, 32)), EDGCConfig.from_dict(options), iterations=length)

    def without_losses() -> None:
        model = wrap(nn.Linear(32, 32))
        edgc.ddp.register(model, EDGCConfig.from_dict({**EDGC, "policy": "loss"}), iterations=9)
        for _ in range(3):
            model(torch.ones(4, 32)).sum().backward()

    low, left = EDGCConfig.from_dict(METHODS["powersgd"]), dict[str, Any]()

    def refused(name: str, call: Callable[[], Any]) -> str:
        before = alive_here()
        answer = said(call)
        left[name] = [after - now for after, now in zip(alive_here(), before, strict=True)]
        return answer

    def otherwise(make: Callable[[], DistributedDataParallel]) -> edgc.ddp.Handle:
        return edgc.ddp.register(make(), low, iterations=9)

    config, mine = EDGCConfig(), EDGCConfig(seed=dist.get_rank())
    run = Run(Case(unused=True)).train(0, 1)
    handle = run.handle
    assert handle is not None
    state = handle.state_dict()
    inside: list[str] = []

    def call_inside(iteration: Any, decision: Any) -> None:
        inside.append(said(handle.state_dict))

    handle.log = call_inside
    run.train(1, 2)
    linear = nn.Linear(4, 4)
    by_register: dict[str, Callable[[], Any]] = {
        "not wrapped": lambda: edgc.ddp.register(linear, config, iterations=9),  # type: ignore[arg-type]
        "twice": lambda: edgc.ddp.register(run.model, config, iterations=9),
        "sparse": lambda: edgc.ddp.register(wrap(nn.Embedding(9, 4, sparse=True)), config, iterations=9),
        "complex": lambda: edgc.ddp.register(wrap(nn.Linear(4, 4, dtype=torch.cfloat)), config, iterations=9),
        "ranks differ": lambda: edgc.ddp.register(wrap(nn.Linear(4, 4)), mine, iterations=9),
        "pipeline": lambda: register(pipeline={"rank": 8}),
        "embedding": lambda: register(fused_embedding=True),
        "some stages": lambda: register(method="powersgd", rank=4, compressed_stages=0.5),
        "experts": lambda: register(method="powersgd", rank=4, compress_experts=False),
        "no iterations": lambda: register(0),
        "half an iteration": lambda: register(1e3),
        "no window": lambda: register(preset="paper"),
        "no scaler": lambda: edgc.ddp.register(wrap(nn.Linear(4, 4)), config, iterations=9, scaler=2.0**16),  # type: ignore[arg-type]
        **{name: partial(otherwise, make) for name, make in wrapped_otherwise().items()},
    }
    answers: dict[str, Any] = {
        **{name: refused(name, call) for name, call in by_register.items()},
        "no losses": said(without_losses),
        "inside": inside[0],
        "another rank": said(lambda: handle.load_state_dict({**state, "rank": 1 - state["rank"]})),
        "another world": said(lambda: handle.load_state_dict({**state, "world": 4})),
    }
    run.close()
    return {**answers, "left": left}


def saved_states() -> dict[str, Any]:
    """This rank's state after some steps, for a job of another size."""
    run = Run(Case(unused=True)).train(0, 6)
    state = run.state()
    run.close()
    return state


def another_world(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Go on from the states of a job with more ranks."""
    run = Run(Case(unused=True), seed=5)
    assert run.handle is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.load({**saved[0], "edgc": [item["edgc"] for item in reversed(saved)]})
    errors = copied(run.handle.engine.compressor.state_dict()["errors"])
    run.train(6, 12)
    run.close()
    messages = [str(item.message) for item in caught if "edgc" in str(item.message)]
    return {"errors": errors, "warnings": messages, "losses": run.losses, "weights": run.weights}


def subgroups() -> Tensor:
    """Two jobs of two ranks each inside a world of four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    run = Run(Case(), process_group=group).train(0, 6)
    assert run.handle is not None
    assert dist.get_world_size(run.handle.group) == 2
    run.close()
    return run.weights


def alive() -> None:
    """A rank that does not say so again within five minutes ends with the stacks of its threads, and so the launch."""
    faulthandler.dump_traceback_later(300, exit=True)


def world(cases: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The results of all cases, none of which may hang."""
    results = {}
    for name, case in cases.items():
        alive()
        results[name] = case()
    faulthandler.cancel_dump_traceback_later()
    return results


def world_of_four() -> dict[str, Any]:
    return world(
        {
            "matrix": lambda: matrix(60),
            "methods": methods,
            "resume": resume,
            "uneven": uneven,
            "subgroups": subgroups,
            "saved": saved_states,
        }
    )


def world_of_two(saved: list[dict[str, Any]]) -> dict[str, Any]:
    return world(
        {
            "matrix": lambda: matrix(100),
            "methods": methods,
            "resume": resume,
            "uneven": uneven,
            "two models": two_models,
            "overlap": overlap,
            "another world": lambda: another_world(saved),
            "not finite": not_finite,
            "shapes": shapes,
            "refusals": refusals,
            "gpt": lambda: gpt_reference.losses(50),
            "ends": ends,
            "lost rank": lost_rank,
        }
    )
