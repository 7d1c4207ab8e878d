"""EDGC under DDP with parameters that backward does not come by, in other modes of torch, and with odd parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.runtime.device import masked_path
from tests import examples
from tests.integration.ddp_runs import METHODS, SMALL
from tests.workers import Cases, mean, refused, said, same

pytestmark = pytest.mark.slow
case = Cases(2, __name__)

KEEPING: dict[str, dict[str, Any]] = {
    **{name: METHODS[name] for name in ("powersgd", "int8 factors", "topk", "randomk", "sign")},
    "quantize": {"method": "quantize", "bits": 4, **SMALL},
    "one-sided": {"method": "powersgd", "rank": 2, "one_sided": True, **SMALL},
    "edgc after int4": EDGCConfig.usable({**METHODS["edgc"], "policy": "fixed", "rank": 2, "warmup_bits": 4}),
}


def drawn(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def registered(module: nn.Module, settings: dict[str, Any], **options: Any) -> Any:
    """A model under DDP and its handle."""
    model, config = DistributedDataParallel(module, **options), EDGCConfig.from_dict(settings)
    return model, edgc.ddp.register(model, config, iterations=60)


class Given(nn.Module):
    """Gradients are what it is given, for each parameter that it is given something for."""

    def __init__(self, *parameters: Tensor) -> None:
        super().__init__()
        self.each = nn.ParameterList(parameters)

    def forward(self, *gradients: Any) -> Tensor:
        pairs = zip(self.each, gradients, strict=True)
        return torch.stack([(p * g).sum().float() for p, g in pairs if g is not None]).sum()


# ------------------------------------------------------------------ parameters that backward does not come by


def lost_of_unused(settings: dict[str, Any], view: bool) -> tuple[float, float]:
    """How much of the gradients that were computed has neither arrived nor is kept, relative to them, and how much is
    kept, of a parameter that is used now and then."""
    module = Given(torch.zeros(24, 32), torch.zeros(32, 24).t())
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    model, handle = registered(module, settings, **options)
    parameter = module.each[0]
    arrived, given = torch.zeros(2, 24, 32, dtype=torch.float64)

    def clear(to_none: bool = True) -> None:
        if parameter.grad is not None:
            arrived.add_(parameter.grad)
        model.zero_grad(set_to_none=to_none)

    def backward(step: int, uses: bool, sync: bool = True) -> None:
        a, b = drawn(step, 24, 32), drawn(100 + step, 24, 32)
        with nullcontext() if sync else model.no_sync():
            model(a if uses else None, b).backward()
        given.add_(a.double() * uses)

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
            parameter.requires_grad_(False)
            backward(step, False)
            parameter.requires_grad_(True)
    clear()
    kept = mean(handle.state_dict()["engine"]["compressor"]["errors"]["each.0"])
    handle.remove()
    # What DDP throws away is the same everywhere, so what arrives is, too.
    return float((arrived + kept - mean(given)).norm() / mean(given).norm()), float(kept.norm())


@case
def unused() -> None:
    results = {}
    for i, (name, settings) in enumerate(KEEPING.items()):
        for on in (False, True):
            with masked_path(on), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                view = (i + on) % 3 == 2
                results[f"{name}, masked {on}, view {view}"] = lost_of_unused(settings, view)
    if dist.get_rank() == 0:
        assert all(lost < 1e-5 and kept > 0 for lost, kept in results.values()), results


# ------------------------------------------------------------------ modes of torch


@contextlib.contextmanager
def setting(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default type": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "autograd": torch.enable_grad,
    "no autograd": torch.no_grad,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "inference": torch.inference_mode,
    "products": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
}


def several_types() -> Given:
    return Given(torch.zeros(40, 24), torch.zeros(24, 32, dtype=torch.bfloat16), torch.zeros(24))


def gradients(module: Given, step: int) -> list[Tensor]:
    return [drawn(10 * step + i, *p.shape, dtype=p.dtype) for i, p in enumerate(module.each)]


@case
def modes() -> None:
    """A run whose every backward, and what is asked for after it, is in another mode is one without any."""
    chosen = ("powersgd", "powersgd bf16", "powersgd int8", "powersgd one-sided", "topk_dgc", "stochastic4")
    methods = {**examples.EACH, **{name: examples.settings_of(name) for name in chosen}, "edgc": METHODS["edgc"]}
    for number, (name, settings) in enumerate(methods.items()):
        # Both paths for what the list names, which differ most between them.
        for on in (False, True) if name in chosen else [bool(number % 2)]:
            # On the path of a CPU products are then made in fp64, and so other bits come out.
            chosen_modes = [mode for mode in MODES if on or mode != "products"]
            runs = []
            for plain in (True, False):
                with masked_path(on):
                    runs.append(run_in_modes({**settings, **SMALL}, ["", *chosen_modes, *chosen_modes], plain))
            assert same(*runs), f"{name}, masked {on}"


def run_in_modes(settings: dict[str, Any], modes: list[str], plain: bool) -> list[Any]:
    module, results = several_types(), []
    model, handle = registered(module, settings)
    for step, mode in enumerate(modes):
        model.zero_grad()
        loss = model(*gradients(module, step))
        with nullcontext() if plain or not mode else MODES[mode]():
            loss.backward()
            state = handle.state_dict()
            assert handle.last is not None
            if step == 9:
                handle.load_state_dict(state)
        results += [p.grad.clone() for p in module.each if p.grad is not None]
    results.append(handle.state_dict()["engine"]["compressor"])
    handle.remove()
    return results


@case
def products() -> None:
    """Nothing is lost on the path of a CPU where products may be rounded to bf16."""
    for name in ("powersgd", "powersgd int8", "powersgd one-sided"):
        module = several_types()
        model, handle = registered(module, {**examples.settings_of(name), **SMALL})
        arrived, given = torch.zeros(2, 40, 24, dtype=torch.float64)
        for step in range(6):
            model.zero_grad()
            with MODES["products"]():
                model(*gradients(module, step)).backward()
            assert module.each[0].grad is not None
            arrived += module.each[0].grad
            given += gradients(module, step)[0]
        kept = mean(handle.state_dict()["engine"]["compressor"]["errors"]["each.0"])
        handle.remove()
        assert float((arrived + kept - mean(given)).norm() / mean(given).norm()) < 1e-6, name


# ------------------------------------------------------------------ odd parameters


def share(settings: dict[str, Any], steps: int) -> float:
    """How much of gradients that are all alike their velocity has after so many steps."""
    return 1 - float(settings.get("momentum", 0)) ** steps


@case
def empty() -> None:
    """Parameters without entries train beside one with some."""
    shapes = ((24, 24), (0, 24), (24, 0), (0,), (), (3, 0, 3), (0, 3, 3))
    for name, settings in METHODS.items():
        module = Given(*map(torch.zeros, shapes))
        model, handle = registered(module, settings)
        for _ in range(2):
            model.zero_grad()
            model(*[2.0] * len(shapes)).backward()
        handle.remove()
        assert float(module.each[4].grad) / share(settings, 2) == 2, name


@case
def memory_formats() -> None:
    """A state of a model in another memory format is refused."""

    def convolution(memory: Any) -> Any:
        module = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=memory)  # type: ignore[call-overload]
        return registered(module, METHODS["powersgd"])

    for saved in (torch.channels_last, torch.contiguous_format):
        model, handle = convolution(saved)
        model(drawn(1, 2, 8, 5, 5)).square().sum().backward()
        state = handle.state_dict()
        handle.remove()
        for here in (torch.channels_last, torch.contiguous_format):
            other = convolution(here)[1]
            names = [] if here == saved else ["weight", "memory_format"]
            answer = said(partial(other.load_state_dict, state))
            assert (answer == "nothing") == (here == saved) and all(name in answer for name in names), answer
            other.remove()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(32, 16))

    def forward(self, places: Tensor) -> Tensor:
        return functional.embedding(places, self.table, sparse=True)


@case
def sparse() -> None:
    model, handle = registered(Table(), {})
    refused(lambda: model(torch.arange(4)).sum().backward(), "parameter table", "sparse=False")
    handle.remove()


@case
def ranges() -> None:
    """The mean of like numbers is that number, also near the ends of its type's range."""
    plain = ("none", "bf16", "quantize", "topk", "randomk", "sign")
    for name, dtype, value in [
        *((method, torch.float64, value) for method in METHODS for value in (1e200, 1e-200)),
        *((method, torch.float32, 3e38) for method in plain),
        *((method, torch.float16, 4e4) for method in ("powersgd", *plain)),  # the sum over two ranks would overflow
    ]:
        settings = {**METHODS[name], "density": 1.0} if name in ("topk", "randomk") else METHODS[name]
        module = Given(torch.zeros(32, 24, dtype=dtype))
        model = DistributedDataParallel(module)
        handle = edgc.ddp.register(model, EDGCConfig.from_dict(settings), iterations=9, scaler=False)
        model(torch.full((32, 24), value, dtype=dtype)).backward()
        handle.remove()
        assert module.each[0].grad is not None
        entries = module.each[0].grad.double() / share(settings, 1) / value
        assert tuple(map(float, entries.aminmax())) == pytest.approx((1, 1), rel=2e-2), (name, dtype, value)


test_ddp = case.test()
