"""What the ranks of ``test_ddp_users.py`` do with parameters that backward does not come by, in other modes of torch,
and with parameters of odd shapes and memory orders."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.ddp import Handle
from edgc.runtime.device import masked_path
from tests import examples
from tests.integration.ddp_runs import METHODS, SMALL, same
from tests.workers import said

KEEPING: dict[str, dict[str, Any]] = {
    **{name: METHODS[name] for name in ("powersgd", "int8 factors", "topk", "randomk", "sign")},
    "quantize": {"method": "quantize", "bits": 4, **SMALL},
    "one-sided": {"method": "powersgd", "rank": 2, "one_sided": True, **SMALL},
    "edgc after int4": {**METHODS["edgc"], "policy": "fixed", "rank": 2, "warmup_bits": 4},
}
for _key in ("r_max", "r_min", "rank_multiple", "step_limit"):
    KEEPING["edgc after int4"].pop(_key)


def _drawn(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# ------------------------------------------------------------------ parameters that backward does not come by


class Branches(nn.Module):
    """Gradients are what it is given, for each matrix that it is given something for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(24, 32)), nn.Parameter(torch.zeros(32, 24).t())

    def forward(self, a: Tensor | None, b: Tensor | None) -> Tensor:
        parts = [(p * g).sum() for p, g in ((self.a, a), (self.b, b)) if g is not None]
        return torch.stack(parts).sum()


def _law(settings: dict[str, Any], view: bool, whole: bool) -> dict[str, float]:
    """How much of the gradients that were computed has neither arrived nor is kept, relative to them, by parameter."""
    module = Branches()
    model = DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=view)
    handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=60, whole_steps=whole)
    came, given = torch.zeros(24, 32, dtype=torch.float64), torch.zeros(24, 32, dtype=torch.float64)

    def clear(to_none: bool = True) -> None:
        nonlocal came
        came = came + (0 if module.a.grad is None else module.a.grad.double())
        model.zero_grad(set_to_none=to_none)

    def backward(step: int, uses: bool, sync: bool = True) -> None:
        nonlocal given
        a, b = _drawn(step, 24, 32), _drawn(100 + step, 24, 32)
        with nullcontext() if sync else model.no_sync():
            model(a if uses else None, b).backward()
        given = given + a.double() * uses

    odd = dist.get_rank() == 0
    for step in range(44):
        kind = step % 11
        clear(to_none=kind != 3)
        if kind in (0, 1, 4):
            backward(step, True)
        elif kind in (2, 3):  # without .grad, and with one of zeros
            backward(step, False)
        elif kind == 5:  # what the step before has left stays where it is
            backward(step, True)
            backward(50 + step, False)
        elif kind == 6:  # or is sent again by one rank and not by the other
            backward(step, True)
            backward(50 + step, odd)
        elif kind == 7:
            backward(step, odd)
        elif kind == 8:
            backward(step, odd, sync=False)
            backward(50 + step, False)
        elif kind == 9:
            backward(step, False, sync=False)
            backward(50 + step, not odd)
        else:
            module.a.requires_grad_(False)
            backward(step, False)
            module.a.requires_grad_(True)
    clear()
    errors = handle.state_dict()["engine"]["compressor"]["errors"]
    handle.remove()
    missing = came + _mean(errors["a"]) - _mean(given)
    return {"lost": float(missing.norm() / _mean(given).norm()), "kept": float(_mean(errors["a"]).norm())}


def unused() -> dict[str, dict[str, float]]:
    results = {}
    for i, (name, settings) in enumerate(KEEPING.items()):
        for on in (False, True):
            with masked_path(on), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                view = (i + on) % 3 == 2
                results[f"{name}, masked {on}, view {view}"] = _law(settings, view, whole=(i + on) % 4 != 3)
    return results


# ------------------------------------------------------------------ modes of torch


class Given(nn.Module):
    """Parameters of two types whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(40, 24))
        self.narrow = nn.Parameter(torch.zeros(24, 32, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, step: int) -> Tensor:
        sums = [
            (p * _drawn(10 * step + i, *p.shape, dtype=p.dtype)).sum().float() for i, p in enumerate(self.parameters())
        ]
        return torch.stack(sums).sum()


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default type": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "autograd": torch.enable_grad,
    "no autograd": torch.no_grad,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "inference": torch.inference_mode,
    "products": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
}


def _modes(settings: dict[str, Any], on: bool) -> bool:
    """Whether a run whose every backward, and what is asked for after it, is in another mode is one without any."""
    # On the path of a CPU products are then made in fp64, and so other bits come out.
    modes = [mode for mode in MODES if on or mode != "products"]
    runs: list[list[Any]] = []
    with masked_path(on):
        for plain in (True, False):
            module = Given()
            model = DistributedDataParallel(module)
            handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=60)
            found: list[Any] = []
            for step, mode in enumerate(["", *modes, *modes]):
                model.zero_grad()
                loss = model(step)
                with nullcontext() if plain or not mode else MODES[mode]():
                    loss.backward()
                    state = handle.state_dict()
                    assert handle.last is not None
                    if step == 9:
                        handle.load_state_dict(state)
                found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
            found.append(handle.state_dict()["engine"]["compressor"])
            handle.remove()
            runs.append(found)
    return all(same(one, other) for one, other in zip(*runs, strict=True))


def modes() -> dict[str, bool]:
    chosen = ("powersgd", "powersgd bf16", "powersgd int8", "powersgd one-sided", "topk_dgc", "stochastic4")
    methods = {**examples.EACH, **{name: examples.settings_of(name) for name in chosen}, "edgc": METHODS["edgc"]}
    return {
        f"{name}, masked {on}": _modes({**settings, **SMALL}, on)
        for name, settings in methods.items()
        for on in (False, True)
    }


def products() -> dict[str, float]:
    """The share of gradients that is lost on the path of a CPU where products may be rounded to bf16."""
    results = {}
    for name in ("powersgd", "powersgd int8", "powersgd one-sided"):
        module = Given()
        model = DistributedDataParallel(module)
        settings = {**examples.settings_of(name), **SMALL}
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=9)
        came, given = torch.zeros(40, 24, dtype=torch.float64), torch.zeros(40, 24, dtype=torch.float64)
        for step in range(6):
            model.zero_grad()
            with MODES["products"]():
                model(step).backward()
            assert module.wide.grad is not None
            came, given = came + module.wide.grad.double(), given + _drawn(10 * step, 40, 24).double()
        kept = _mean(handle.state_dict()["engine"]["compressor"]["errors"]["wide"])
        results[name] = float((came + kept - _mean(given)).norm() / _mean(given).norm())
        handle.remove()
    return results


# ------------------------------------------------------------------ odd parameters


class Odd(nn.Module):
    """Parameters without entries beside one with some."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((24, 24), (0, 24), (24, 0), (0,), (), (3, 0, 3), (0, 3, 3))
        self.each = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([(p + 1).square().sum() for p in self.each]).sum()


def _share(settings: dict[str, Any], steps: int) -> float:
    """How much of gradients that are all alike their velocity has after so many steps."""
    return 1 - float(settings.get("momentum", 0)) ** steps


def empty() -> dict[str, float]:
    results = {}
    for name in METHODS:
        module = Odd()
        model = DistributedDataParallel(module)
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(METHODS[name]), iterations=9)
        for _ in range(2):
            model.zero_grad()
            model().backward()
        results[name] = float(module.each[4].grad) / _share(METHODS[name], 2)
        handle.remove()
    return results


def _convolution(memory: torch.memory_format) -> tuple[DistributedDataParallel, Handle]:
    module = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=memory)  # type: ignore[call-overload]
    model = DistributedDataParallel(module)
    return model, edgc.ddp.register(model, EDGCConfig.from_dict(METHODS["powersgd"]), iterations=9)


def memory_orders() -> dict[str, str]:
    """What a state of a model in another memory format is answered with."""
    answers = {}
    for saved in (torch.channels_last, torch.contiguous_format):
        model, handle = _convolution(saved)
        model(_drawn(1, 2, 8, 5, 5)).square().sum().backward()
        state = handle.state_dict()
        for here in (torch.channels_last, torch.contiguous_format):
            other = _convolution(here)[1]
            answers[f"{saved} in {here}"] = said(partial(other.load_state_dict, state))
            other.remove()
        handle.remove()
    return answers


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(32, 16))

    def forward(self, places: Tensor) -> Tensor:
        return functional.embedding(places, self.table, sparse=True)


def sparse() -> str:
    model = DistributedDataParallel(Table())
    handle = edgc.ddp.register(model, EDGCConfig(), iterations=9)
    answer = said(lambda: model(torch.arange(4)).sum().backward())
    handle.remove()
    return answer


class Large(nn.Module):
    """Every gradient is what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(32, 24, dtype=dtype))

    def forward(self, value: float) -> Tensor:
        return (self.matrix * value).sum()


def ranges() -> dict[str, tuple[float, float]]:
    """The smallest and largest entry of a mean of like numbers, by method, type and number."""
    results = {}
    for name, dtype, value in [
        *((method, torch.float64, value) for method in METHODS for value in (1e200, 1e-200)),
        *((method, torch.float32, 3e38) for method in ("none", "bf16", "quantize", "topk", "randomk", "sign")),
    ]:
        module = Large(dtype)
        model = DistributedDataParallel(module)
        settings = {**METHODS[name], "density": 1.0} if name in ("topk", "randomk") else METHODS[name]
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=9)
        model(value).backward()
        assert module.matrix.grad is not None
        low, high = (module.matrix.grad.double() / _share(settings, 1)).aminmax()
        results[f"{name}, {dtype}, {value}"] = (float(low) / value, float(high) / value)
        handle.remove()
    return results
