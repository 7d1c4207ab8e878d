"""Random training on every rank of a world, and what has to hold after every step."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import io
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

import edgc
from edgc.ddp.strategy import StrategyHandle
from edgc.runtime.device import masked_path
from edgc.runtime.groups import gather_objects
from tests.integration.ddp_runs import TYPES, WIDTH, batch, wrapped
from tests.integration.ddp_runs import Case as Options
from tests.soak.cases import LONG, MARKS, Case, case_of
from tests.soak.traffic import Traffic
from tests.strategy_cases import adamw, sgd

TIMEOUT = timedelta(seconds=60)  # of the group: a rank that waits longer for another says so
STILL_SECONDS = 150.0  # without a step after which a rank ends, with the stacks of its threads
TENSORS = 20  # more that may be alive at the end of a long case than in the middle of it, where 60 steps lie between
BARRIER_BYTES = 64  # of a measurement of times, which are not counted


class Wrong(AssertionError):
    """Something that has to hold does not: one line."""


def digest(value: Any) -> str:
    """Of a nested value; tensors by their bits."""
    found = hashlib.blake2b(digest_size=12)

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            found.update(f"{item.dtype} {tuple(item.shape)}".encode())
            # Not a number is one thing, whatever its bits.
            item = item.detach().contiguous().reshape(-1)
            item = torch.where(item.isnan(), math.nan, item) if item.is_floating_point() else item
            found.update(item.view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                found.update(str(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            for each in item:
                add(each)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()


class Net(nn.Module):
    """Layers, of which one is used now and then and one never; filters of three dimensions; and an embedding."""

    def __init__(self, types: tuple[torch.dtype, torch.dtype], unused: bool) -> None:
        super().__init__()
        sizes = ((WIDTH, 40), (40, WIDTH), *((WIDTH, WIDTH),) * (2 * unused))
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=types[i % 2]) for i, size in enumerate(sizes))
        self.filters = nn.Conv1d(1, 8, 3, padding=1, dtype=types[0])
        self.table = nn.Embedding(16, WIDTH, dtype=types[1])

    def forward(self, x: Tensor, use: bool) -> Tensor:
        first, second, *others = self.layers
        hidden = torch.tanh(first(x.to(first.weight.dtype)))
        hidden = second(hidden.to(second.weight.dtype))
        if others and use:
            hidden = hidden + others[0](torch.tanh(hidden).to(others[0].weight.dtype)).to(hidden.dtype)
        places = (x[:, 0].nan_to_num().abs() * 5).long() % 16
        filtered = self.filters(x.to(self.filters.weight.dtype).unsqueeze(1)).mean(1)
        return hidden.float() + 0.1 * self.table(places).float() + filtered.float()


class Trained:
    """A model with its optimizer and handle, trained step by step.

    Attributes:
        void: the last step in which something was broken.
        kept: state of a handle that was removed.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup, traffic: Traffic, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.group, self.traffic, self.rank = case, group, traffic, dist.get_rank(group)
        self.kept: dict[str, Any] = {}
        # Nothing that its own parameters hold may refer to a model: DDP's reducer is not seen by the garbage collector.
        self.late = late = [0.0]
        net = Net(TYPES[case.dtype], case.unused)
        net.layers[0].weight.register_hook(lambda _: time.sleep(late[0]))
        options = Options(unused=case.unused, bucket_view=case.view)
        self.model = wrapped(net, options, process_group=group)
        directs = case.subject.strategy is not None and case.subject.strategy.directs
        self.optimizer: torch.optim.Optimizer = sgd(net) if directs else adamw(net)
        if case.subject.strategy is None and case.momentum:
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5) if case.scaled else None
        self.counts: Counter[str] = Counter()
        self.void, self.handle = -math.inf, self.register()

    def register(self) -> Any:
        subject = self.case.subject
        options: dict[str, Any] = {"scaler": self.scaler}
        if subject.strategy is not None:
            options = {"strategy": subject.strategy, "optimizer": self.optimizer}
        return edgc.register(self.model, subject.config, iterations=max(10, self.case.steps), **options)

    def renew(self) -> None:
        """Register the model again, with or without the state that the handle had."""
        self.handle = self.register()
        self.counts["registered anew"] += 1
        if self.case.keeps:
            self.handle.load_state_dict(self.kept)

    def backward(self, step: int) -> None:
        event = self.case.event(step)
        self.late[0] = event.slow[1] if event.slow is not None and event.slow[0] == self.rank else 0.0
        self.optimizer.zero_grad(set_to_none=event.to_none)
        for index, use in enumerate(event.uses[self.rank]):
            x, target = batch(step, index, self.rank)
            if event.broken == (self.rank, index):
                x[0, 0] = math.nan
            with nullcontext() if index == event.passes - 1 else self.model.no_sync():
                loss = (self.model(x, use) - target).square().mean() / event.passes
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.case.subject.name == "edgc loss" and self.handle is not None:
            self.handle.add_loss(float(loss.detach()))

    def step(self, step: int) -> bool:
        """Take a step; returns whether the optimizer left it out."""
        skips = False
        self.backward(step)
        if self.case.event(step).broken is not None:
            self.void = step
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skips = self.scaler.get_scale() < before
        elif isinstance(self.handle, StrategyHandle):
            self.optimizer.step()
        else:
            skips = not all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
            if not skips:
                self.optimizer.step()
        return skips

    def checked(self, step: int) -> None:
        """Take a step, and compare what all ranks have then.

        Raises:
            Wrong: on every rank.
        """
        case, wrong, shared = self.case, [], ""
        if self.handle is None:
            self.renew()
        if step == case.renewed:
            self.kept = loaded(saved(self.handle.state_dict()))
            self.handle.remove()
            self.handle = None
            # Optimizers of replicas with steps of their own would take a plain step in other directions.
            if case.subject.equal != "step":
                self.renew()
        local = isinstance(self.handle, StrategyHandle)
        before = self.handle.bytes if local else 0
        broken = case.event(step).broken is not None
        kept = self.compressor() if broken else ""
        self.traffic.clear()
        skips = self.step(step)
        self.counts.update(steps=1, skipped=skips, broken=broken)
        if self.handle is not None:
            counted = self.handle.bytes - before if local else self.handle.last.statistics.bytes
            over, calls = self.traffic.bytes - counted, len(self.traffic.calls)
            if not 0 <= over <= calls * (BARRIER_BYTES if case.subject.timed else 1):
                wrong.append(f"{float(self.traffic.bytes):g} bytes passed, {counted} were counted")
            self.counts.update(bytes=counted)
        if broken and self.compressor() != kept:
            wrong.append("error feedback is not as if the step had never been")
        if not local and skips != broken:
            wrong.append("a step was left out" if skips else "a step was not left out")
        if local:
            shared = digest(self.handle.strategy.shared_state())
        weights = [p.detach() for p in self.model.parameters()]
        mended = case.subject.equal == "never" and step - self.void > 2 * case.subject.period
        if (self.equal or mended) and not all(bool(p.isfinite().all()) for p in weights):
            wrong.append("weights are not finite")
        skipped = self.handle.skipped if self.handle is not None and not local else 0
        row = {
            "weights": digest(weights) if self.equal else "",
            "steps that are left out": (skips, skipped, self.scaler and self.scaler.get_scale()),
            "collectives": digest(self.traffic.calls),
            "shared state": shared,
        }
        rows = gather_objects((row, wrong), self.group)
        wrong = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(rows) for line in lines]
        wrong += [f"{key} differ: {[r[key] for r, _ in rows]}" for key in row if len({r[key] for r, _ in rows}) > 1]
        if wrong:
            raise Wrong("; ".join(wrong))

    def compressor(self) -> str:
        """Digest of what a method keeps; of a strategy, and where a scale multiplies it, nothing."""
        if self.handle is None or isinstance(self.handle, StrategyHandle) or self.scaler is not None:
            return ""
        return digest(self.handle.state_dict()["engine"]["compressor"])

    @property
    def equal(self) -> bool:
        """True if all replicas hold the same bits, and finite ones, after this step."""
        if not isinstance(self.handle, StrategyHandle):
            return self.case.subject.equal != "never"
        settings = self.case.subject.strategy
        assert settings is not None
        return settings.equal == "step" or (
            settings.equal == "round" and self.handle.strategy.step % settings.period == 0
        )

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "edgc": self.handle, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in (("model", self.model), ("optimizer", self.optimizer), ("scaler", self.scaler)):
            if part is not None:
                part.load_state_dict(state[name])
        self.handle.load_state_dict(state["edgc"])

    def bits(self) -> dict[str, str]:
        """Digests of what a run that goes on from a state has to have in the end."""
        state = self.state()
        own = state.pop("edgc", {})
        kept = own["engine"]["compressor"] if "engine" in own else [own.get("shared"), own.get("own")]
        return {name: digest(each) for name, each in {**state, "edgc": without_times(kept)}.items()}

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def without_times(value: Any) -> Any:
    """A state without what was measured by the clock."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key != "times"}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def alive() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "tensors": sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
        "threads": threading.active_count(),
        "groups": len(dist.distributed_c10d._world.pg_names),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 (by name alone)
    }


def run(case: Case, group: dist.ProcessGroup, traffic: Traffic, at: Callable[[int], None]) -> Counter[str]:
    """Train a case, and again from where its state was saved.

    Args:
        at: told every step.
    """
    trained, state, marks = Trained(case, group, traffic), b"", []
    for step in range(case.steps):
        at(step)
        if step == case.saved:
            state = saved(trained.state())
        trained.checked(step)
        if step + 1 in MARKS:
            marks.append(alive())
    bits, counts = trained.bits(), trained.counts
    trained.close()
    if case.saved is not None:
        resumed = Trained(case, group, traffic, seed=1)
        resumed.load(loaded(state))
        for step in range(case.saved, case.steps):
            at(step)
            resumed.checked(step)
        differs = [name for name, each in resumed.bits().items() if each != bits[name]]
        counts += resumed.counts + Counter({"resumed": 1})
        resumed.close()
        if any(gather_objects(differs, group)):
            raise Wrong(f"after state was loaded, {', '.join(differs) or 'nothing'} of this rank differs at the end")
    if len(marks) == len(MARKS):
        more = marks[1]["tensors"] - marks[0]["tensors"]
        if max(more := gather_objects(more, group)) > TENSORS:
            raise Wrong(f"{more} more tensors are alive after {MARKS[1]} steps than after {MARKS[0]}")
        counts["long"] += 1
    return counts


def work(seed: int, first: int, steps: int, longest: int, ends: float, folder: str) -> dict[str, Any]:
    """Train cases on this rank until ``steps`` have been taken in all, or until the clock of rank 0 says ``ends``.

    Args:
        first: number of the first case.
        longest: steps of a case at most.
        folder: where every rank notes what it does, for whoever finds it standing still.

    Returns:
        Counts of every subject; memory after every case, in bytes; what was alive after the third case and at the end.

    Raises:
        Wrong: on every rank, with seed, case and step.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group, traffic, note = dist.new_group(timeout=TIMEOUT), Traffic(), Path(folder) / f"{world}-{rank}"
    counts: dict[str, Counter[str]] = {}
    memory, living, number, taken = list[int](), list[dict[str, int]](), first, 0
    with traffic.counted(), warnings.catch_warnings(), note.with_suffix(".stacks").open("w") as stacks:
        warnings.simplefilter("ignore")
        while taken < steps and gather_objects(time.time() < ends, group)[0]:
            case = case_of(seed, world, number, longest=longest)
            again = case.again if longest == LONG else f"{case.again} --longest {longest}"
            where = ""

            def at(step: int, case: Case = case, again: str = again) -> None:
                nonlocal where
                where = f"case {case.number} ({case.name}), step {step} of {case.steps}; again: {again}"
                note.write_text(where, encoding="utf-8")
                faulthandler.dump_traceback_later(STILL_SECONDS, exit=True, file=stacks)

            at(0)
            try:
                torch.use_deterministic_algorithms(case.poisoned, warn_only=True)
                with masked_path(case.masked):
                    found = run(case, group, traffic, at)
                found["cases"] += 1
                counts.setdefault(case.subject.name, Counter()).update(found)
                memory.append(psutil.Process().memory_info().rss)
                # The first cases load what is loaded once.
                living.append(alive())
                if len(living) > 3 and any(living[-1][key] > living[2][key] for key in living[2]):
                    raise Wrong(f"left behind: {living[2]} after the third case, {living[-1]} now")
            except Exception as error:
                line = " ".join(str(error).split()) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
                raise Wrong(f"{line}; {where}") from error
            number += 1
            taken += found["steps"]
        faulthandler.cancel_dump_traceback_later()
    return {"counts": counts, "memory": memory, "alive": [living[:3][-1], living[-1]] if living else []}
