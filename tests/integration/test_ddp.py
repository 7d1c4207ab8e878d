"""EDGC as a hook of PyTorch's DDP: a gloo world of four ranks, one launch for all cases."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.runtime.device import masked_path
from edgc.runtime.groups import gather_objects
from tests.integration.ddp_runs import EDGC, METHODS, TYPES, Case, Run, batch, copied, recorded
from tests.workers import Cases, equal, refused, said, same

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

TIMED = ("search", "gate")  # what these do depends on times that they measure: no two runs are the same
# A covering set of parameters that are used now and then, static graphs, and types.
MATRIX = (
    (False, False, "fp32"),
    (True, True, "fp32"),
    (False, True, "bf16"),
    (True, False, "bf16"),
    (False, True, "mixed"),
    (True, False, "mixed"),
)


def trained(case: Case) -> dict[str, Any]:
    """A run whose collectives come in one order on all ranks, and whose replicas end equal."""
    with recorded(case.delays) as calls:
        run = Run(case).train(0, case.steps)
    handle = run.handle
    run.close()
    alike, orders = equal(run.weights), gather_objects(calls)
    assert alike, case
    assert case.plain or (orders == [calls] * len(orders) and len(calls) >= case.steps), case
    return {
        "weights": run.weights,
        "losses": run.losses,
        "calls": calls,
        "buckets": len(handle._worker.layout) if handle else 0,
        "ranks": run.ranks,
        "bytes": handle.last.statistics.bytes if handle and handle.last else 0,
    }


@case
def matrix() -> None:
    """The first half of each run without accumulation and the second half with it."""
    for unused, static, dtype in MATRIX:
        # Fewer parameters, smaller buckets: one for each of the four.
        cap = 1e-3 if unused else 4e-5
        case = Case(accumulation=2, unused=unused, static=static, dtype=dtype, steps=24, bucket_cap_mb=cap)
        result = trained(case)
        losses = torch.tensor(result["losses"])
        dist.all_reduce(losses)
        assert losses[-8:].sum() < 0.8 * losses[:8].sum(), f"{case} does not learn"
        assert result["buckets"] >= (5 if unused else 4), case


@case
def methods() -> None:
    """Delays change nothing, methods differ and send less, and none is plain DDP bit for bit."""
    results = {}
    steps = dict.fromkeys(METHODS, 8) | {"edgc": 14}
    for name in METHODS.keys() - set(TIMED):
        results[name] = trained(Case(method=name, unused=True, steps=steps[name]))
    for name in ("powersgd", "int8 factors", "edgc", "quantize", "topk_dgc"):
        prompt, delayed = results[name], trained(Case(method=name, unused=True, steps=steps[name], delays=True))
        assert torch.equal(prompt["weights"], delayed["weights"]) and prompt["calls"] == delayed["calls"], name
    dense = results.pop("none")
    for name, result in results.items():
        assert not torch.equal(result["weights"], dense["weights"]), name
        assert 0 < result["bytes"] < 0.8 * dense["bytes"], name
    ranks = set(results["edgc"]["ranks"])
    assert None in ranks and len(ranks) > 2, f"the controller's rank does not change: {ranks}"
    for name in TIMED:
        trained(Case(name, unused=True, steps=14, delays=True))
    for dtype in TYPES:
        case = partial(Case, "none", 2, dtype=dtype, bucket_view=dtype == "fp32", steps=6)
        ours, plain = trained(case()), trained(case(plain=True))
        assert torch.equal(ours["weights"], plain["weights"]), dtype


@case
def resume() -> None:
    """A run that is never stopped, and one that a new model, with its buckets not yet cut anew, goes on with."""
    names = ("powersgd", "int8 factors", "int6 factors", "edgc", "quantize", "topk_dgc")
    for name, odd in zip(names, itertools.cycle((False, True))):
        case = Case(name, unused=odd, static=odd, steps=12)
        run = Run(case).train(0, 7)
        state = run.state()
        saved = copied(state["edgc"])
        run.train(7, 12)
        first = Run(case, seed=1).train(0, 1)
        assert first.handle is not None
        fresh = len(first.handle._worker.layout)
        first.close()
        resumed = Run(case, seed=1).load(state).train(7, 12)
        states = run.state(), resumed.state()  # optimizer, error feedback, controller, layout
        alike = equal(run.weights, resumed.weights)
        run.close()
        resumed.close()
        assert alike and same(*states), name
        assert same(state["edgc"], saved), f"{name}: training on changed a state that had been saved"
        assert fresh < len(state["edgc"]["layout"]), "buckets were not cut anew"


@case
def uneven() -> None:
    """Ranks with different numbers of batches, under DDP's own ``join``."""
    run = Run(Case(steps=5))
    with run.model.join():
        run.train(0, 2 + dist.get_rank())
    run.close()
    assert equal(run.weights)


@case
def another_world() -> None:
    """Two jobs of two ranks inside a world of four, which go on from its states: the average owes what it owed."""
    run = Run(Case(unused=True)).train(0, 6)
    saved = gather_objects(run.state())
    run.close()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    run = Run(Case(unused=True), seed=5, process_group=group)
    assert run.handle is not None and dist.get_world_size(run.handle.group) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.load({**saved[0], "edgc": [item["edgc"] for item in reversed(saved)]})
    errors = copied(run.handle.engine.compressor.state_dict()["errors"])
    run.train(6, 12)
    run.close()
    loaded, weights = gather_objects(errors, group), gather_objects(run.weights)
    before = [item["edgc"]["engine"]["compressor"]["errors"] for item in saved]
    assert set(errors) == set(before[0]) and len(errors) > 2
    for name in errors:
        owed = sum(each[name].double() for each in before) / 4
        assert float(owed.norm()) > 0 or name == "never.weight"
        torch.testing.assert_close(sum(e[name].double() for e in loaded) / 2, owed, rtol=1e-6, atol=1e-9)
    assert len([item for item in caught if "edgc" in str(item.message)]) == 1
    assert run.losses[-1] < run.losses[0]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2]), "the two jobs have different data"


@case
def two_models() -> None:
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
    alike = [equal(run.weights, reference) for run, reference in zip(runs, alone, strict=True)]
    assert all(alike)


@case
def overlap() -> None:
    """Backward waits for the first bucket before its last: a hook without overlap would hang, and the launch."""
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
    with mock.patch.object(edgc.ddp.Handle, "_reduce", patient):
        run.train(0, 4)
    run.close()
    assert counts == [5] * 4


class Shapes(nn.Module):
    """A convolution in channels-last order and a matrix whose memory is that of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 12, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(20, 50).mT)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        return self.convolution(x).square().mean() + (self.transposed @ direction).square().mean()


@case
def memory_orders() -> None:
    """Gradients of rank 1 lie in memory in other orders than the parameter's shape says."""
    torch.manual_seed(3)
    x, direction = torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last), torch.randn(20, 1)
    gradients, errors = {}, dict[str, Tensor]()
    for name in ("plain", "none", "powersgd"):
        torch.manual_seed(4)
        model, handle = DistributedDataParallel(Shapes()), None
        if name != "plain":
            rank = {"rank": 1} if name == "powersgd" else {}
            config = EDGCConfig.from_dict({"method": name, **rank, "min_compression_elements": 64})
            handle = edgc.ddp.register(model, config, iterations=9)
        for _ in range(3):
            model.zero_grad()
            model(x, direction).backward()
        named = model.module.named_parameters()
        gradients[name] = {key: p.grad.clone() for key, p in named if p.grad is not None}
        if handle is not None:
            errors = copied(handle.engine.compressor.state_dict().get("errors", {}))
            handle.remove()
    assert same(gradients["none"], gradients["plain"])
    norm = float(gradients["plain"]["transposed"].norm())
    assert float(errors["transposed"].norm()) < 1e-5 * norm, "a gradient of rank 1 is sent whole"
    assert errors["convolution.weight"].any(), "a convolution is compressed as a matrix"


def alive() -> tuple[int, int]:
    """Number of process groups and of threads of reductions that this process has."""
    gc.collect()
    threads = sum(thread.name == "edgc-buckets" for thread in threading.enumerate())
    return len(dist.distributed_c10d._world.pg_names), threads


@case
def ends() -> None:
    """After remove DDP averages plainly; a model that nobody holds any longer takes its thread with it."""
    threads = [alive()[1]]
    run = Run(Case(unused=True)).train(0, 3)
    state = run.state()
    threads.append(alive()[1])
    run.close()
    threads.append(alive()[1])
    run.close()
    removed = run.train(3, 6).weights
    plain = Run(Case(unused=True, plain=True))
    plain.model.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(state["optimizer"])
    plain.train(3, 6)
    forgotten: Run | None = Run(Case()).train(0, 2)
    threads.append(alive()[1])
    del forgotten
    threads.append(alive()[1])
    assert [count - threads[0] for count in threads] == [0, 1, 0, 1, 0]
    assert torch.equal(removed, plain.weights)


# ------------------------------------------------------------------ mistakes


def wrapped(*layers: nn.Module) -> DistributedDataParallel:
    # Not every version of torch can send complex parameters with gloo, or be told to leave it.
    with mock.patch("torch.nn.parallel.distributed._sync_module_states"):
        return DistributedDataParallel(nn.Sequential(*layers))


def python_reducer() -> DistributedDataParallel:
    with mock.patch("torch._dynamo.config.optimize_ddp", "python_reducer"):
        return wrapped(nn.Linear(24, 48))


def optimizer_in_backward() -> DistributedDataParallel:
    layer = nn.Linear(24, 48)
    _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    return wrapped(layer)


def hooked(register: Callable[[Any], Any]) -> DistributedDataParallel:
    model = wrapped(nn.Linear(24, 48))
    register(model)
    return model


def unfrozen(*ranks: int) -> DistributedDataParallel:
    """A model whose first layer was frozen when it was wrapped on these ranks."""
    first = nn.Linear(24, 48).requires_grad_(dist.get_rank() not in ranks)
    # Ranks whose models differ: DDP would say so itself.
    with mock.patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"):
        model = wrapped(first, nn.Linear(48, 24))
    first.requires_grad_(True)
    return model


def mixed_precision() -> DistributedDataParallel:
    types = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
    return DistributedDataParallel(nn.Linear(24, 48), mixed_precision=types)


def register(model: Any = None, iterations: Any = 9, scaler: Any = None, **settings: Any) -> edgc.ddp.Handle:
    model = wrapped(nn.Linear(32, 32)) if model is None else model
    return edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=iterations, scaler=scaler)


LOW: dict[str, Any] = METHODS["powersgd"]
POWERSGD: dict[str, Any] = {"method": "powersgd", "rank": 4}
BY_REGISTER: dict[str, tuple[Callable[[], Any], str]] = {
    "not wrapped": (lambda: register(nn.Linear(4, 4)), "Linear"),
    "compiled": (lambda: register(torch.compile(wrapped(nn.Linear(4, 4)))), "before torch.compile"),
    "a mapping": (lambda: edgc.ddp.register(wrapped(nn.Linear(4, 4)), cast(Any, {}), iterations=1), "of type dict"),
    "sparse": (lambda: register(wrapped(nn.Embedding(9, 4, sparse=True))), "sparse=False"),
    "complex": (lambda: register(wrapped(nn.Linear(4, 4, dtype=torch.cfloat))), "parameter 0.weight"),
    "ranks differ": (lambda: register(seed=dist.get_rank()), "ranks 0 and 1"),
    "pipeline": (lambda: register(pipeline={"rank": 8}), "pipeline.rank = 8"),
    "embedding": (lambda: register(fused_embedding=True), "fused_embedding = True"),
    "some stages": (lambda: register(**POWERSGD, compressed_stages=0.5), "compressed_stages = 0.5"),
    "experts": (lambda: register(**POWERSGD, compress_experts=False), "compress_experts"),
    "no iterations": (lambda: register(iterations=0), "iterations = 0"),
    "half an iteration": (lambda: register(iterations=1e3), "iterations = 1000.0"),
    "no window": (lambda: register(preset="paper"), "window = 1000"),
    "no scaler": (lambda: register(scaler=2.0**16), "scaler = 65536.0"),
    "python reducer": (lambda: register(python_reducer(), **LOW), "python_reducer"),
    "optimizer in backward": (lambda: register(optimizer_in_backward(), **LOW), "backward"),
    "built-in hook": (
        lambda: register(hooked(lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)), **LOW),
        "communication hook",
    ),
    "another hook": (
        lambda: register(hooked(lambda m: m.register_comm_hook(None, allreduce_hook)), **LOW),
        "communication hook",
    ),
    "hook of the reducer": (
        lambda: register(hooked(lambda m: dist._register_comm_hook(m.reducer, None, allreduce_hook)), **LOW),
        "takes no hook",
    ),
    "unfrozen": (lambda: register(unfrozen(0, 1, 2, 3), **LOW), "0.weight, 0.bias"),
    "unfrozen on one rank": (lambda: register(unfrozen(1), **LOW), "0.weight, 0.bias"),
    "fp16": (lambda: register(wrapped(nn.Linear(24, 48, dtype=torch.float16)), **LOW), "scaler"),
    "mixed precision": (lambda: register(mixed_precision(), **LOW), "mixed_precision"),
}


@case
def refusals() -> None:
    """Mistakes are answered in one line on every rank; those that ``register`` finds leave no group and no thread."""
    for name, (call, key) in BY_REGISTER.items():
        before = alive()
        message = said(call)
        assert key in message and "\n" not in message, (name, message)
        assert alive() == before, f"{name} leaves something behind"
    run = Run(Case(unused=True)).train(0, 1)
    handle = run.handle
    assert handle is not None
    state, rank, inside = handle.state_dict(), dist.get_rank(), list[str]()
    refused(lambda: register(run.model), "registered already", "handle.remove()")
    with masked_path():  # where the caller's own thread reduces
        other = Run(Case(unused=True))
        asked = other.model.module.first.weight.register_hook(lambda _: inside.append(said(other.handle.state_dict)))
        other.train(0, 1)
    asked.remove()
    other.close()
    assert "inside an iteration" in inside[0]
    refused(lambda: handle.load_state_dict({**state, "rank": (rank + 1) % 4}), f"this is rank {rank}")
    refused(lambda: handle.load_state_dict({**state, "world": 8}), f"rank {rank} of 8", "list of all 8")
    run.close()


@case
def no_losses() -> None:
    model = wrapped(nn.Linear(32, 32))
    register(model, **{**EDGC, "policy": "loss"})
    iterations: Sequence[int] = range(3)
    refused(lambda: [model(torch.ones(4, 32)).sum().backward() for _ in iterations], "policy loss", "add_loss(loss)")


@case
def lost_rank() -> None:
    """One rank's compressor fails: backward says so, there and on its peers, whose group has a timeout."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    run = Run(Case(), process_group=group).train(0, 3)
    assert run.handle is not None
    if dist.get_rank() == 1:

        def fail(*args: Any) -> Any:
            raise ValueError("out of\nluck")

        run.handle.engine.compressor.steps = fail  # type: ignore[method-assign, assignment]
    messages = []
    for call in (lambda: run.train(3, 4), lambda: run.handle._reduce(None)):  # type: ignore[union-attr]
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    run.close()
    start = f"edgc: gradient reduction stopped on rank {dist.get_rank()} in iteration 4: "
    first, again = messages
    assert again == first and first.startswith(start) and "\n" not in first
    if dist.get_rank() == 1:
        assert first == start + "ValueError: out of luck"
    else:
        assert first.startswith(start + "RuntimeError: ")


test_ddp = case.test()
