"""What the ranks of ``test_adapters.py`` do: ``python -m tests.gpu.adapters FOLDER RANK WORLD CASES``.

Both adapters on this process's device: the GPU, shared by all ranks, or the CPU. gloo has every collective that we use
for tensors on a GPU, too; NCCL takes one rank of a communicator for each GPU, so with one GPU it is tried alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from edgc import EDGCConfig, buckets
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides, masked_path
from experiments.bench.engines import Mirror
from tests.integration.ddp_runs import METHODS as USUAL
from tests.integration.ddp_runs import SMALL, Case, Run, copied
from tests.workers import same


def low_rank(factors: str) -> dict[str, Any]:
    return {"method": "powersgd", "rank": 4, "factor_dtype": factors, **SMALL}


DDP: dict[str, dict[str, Any]] = {
    **{name: USUAL[name] for name in ("none", "bf16", "edgc", "quantize", "sign")},
    "topk": {"method": "topk", "density": 0.1, **SMALL},
    "powersgd fp32": low_rank("fp32"),
    "powersgd int8": low_rank("int8"),
    "powersgd int4": low_rank("int4"),
}
# What they do hangs on times, which are of the device.
TIMED = {name: USUAL[name] for name in ("search", "gate")}
RESUMED = ("powersgd fp32", "edgc", "quantize")
GATHERED = (*RESUMED, "powersgd int4")
STEPS, SAVED, POISONED = 10, 5, 4
MEGATRON: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "powersgd": {"method": "powersgd", "rank": 4},
    "int8 factors": {"method": "powersgd", "rank": 4, "factor_dtype": "int8"},
    "edgc": {
        "method": "edgc",
        "policy": "cqm",
        "r_max": 16,
        "r_min": 4,
        "window": 2,
        "stability_tolerance": 10.0,
        "entropy": {"iteration_rate": 0.5, "entry_rate": 0.5},
    },
    "topk": {"method": "topk", "density": 0.1},
}
OVERLAP = {"overlap_grad_reduce": True}
SHARDS = {**OVERLAP, "distributed_optimizer": True}
MEGATRON_RUNS: dict[str, tuple[str, dict[str, bool]]] = {
    "none": ("none", {}),
    "powersgd": ("powersgd", {}),
    "powersgd, overlap": ("powersgd", OVERLAP),
    "powersgd, shards": ("powersgd", SHARDS),
    "int8 factors, shards": ("int8 factors", SHARDS),
    "edgc, overlap": ("edgc", OVERLAP),
    "topk": ("topk", {}),
}
MEGATRON_STEPS = 6


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def started(name: str, case: Case | None = None, **options: Any) -> Run:
    """A small model on the device, with a loss scale, and the data that it has on every device."""
    scaler = torch.amp.GradScaler(device().type, init_scale=4.0, growth_interval=1000)
    config = EDGCConfig.from_dict((DDP | TIMED)[name])
    case = case or Case(steps=STEPS, bucket_cap_mb=5e-3)
    return Run(case, scaler=scaler, config=config, device=device(), **options)


def result(run: Run) -> dict[str, Any]:
    assert run.handle is not None
    keys = ("losses", "weights", "bytes", "ranks")
    return {**{key: getattr(run, key) for key in keys}, "skipped": run.handle.skipped}


def trained_ddp(name: str, resumes: bool, case: Case | None = None) -> dict[str, Any]:
    """A whole run, and whether it goes on from a state saved on the way as it did itself."""
    run = started(name, case).train(0, SAVED)
    state = run.state()
    found = result(run.train(SAVED, STEPS))
    if resumes:
        resumed = started(name, case).load(state).train(SAVED, STEPS)
        found["resumed equal"] = torch.equal(run.weights, resumed.weights)
        found["state equal"] = same(run.state(), resumed.state())
        resumed.close()
    run.close()
    return found


def gathered() -> dict[str, Any]:
    """A model of five buckets: the first one is reduced alone, the others two by two; on the CPU, where the host
    decides, every one alone."""
    found, case, opened = {}, Case(steps=STEPS, unused=True, bucket_cap_mb=1e-3), [0]

    def counted(*options: Any) -> Channel:
        opened[0] += 1
        return Channel(*options)

    with mock.patch.object(buckets, "GATHER", (1, 4000)):
        for name in GATHERED:
            found[name] = trained_ddp(name, resumes=True, case=case)
        run = started("powersgd fp32", case).train(0, 2)
        assert run.handle is not None
        run.handle.engine.open_channel = counted
        run.train(2, 3)
        found["buckets"], found["reductions"] = len(run.handle.state_dict()["layout"]), opened[0]
        run.close()
    return found


def ddp() -> dict[str, Any]:
    """Every method; some of them resumed, and with one step that is given up."""
    results: dict[str, Any] = {name: trained_ddp(name, resumes=name in RESUMED) for name in DDP | TIMED}
    for name in RESUMED:
        run, factor = started(name).train(0, POISONED), [1.0]
        assert run.handle is not None and run.scaler is not None
        run.model.module.second.weight.register_hook(lambda gradient, factor=factor: gradient * factor[0])
        before, weights = copied(run.handle.engine.compressor.state_dict()), run.weights
        factor[0] = float("inf") if dist.get_rank() == 1 else 1.0
        run.train(POISONED, POISONED + 1)
        factor[0] = 1.0
        run.scaler.update(new_scale=4.0)  # so that error feedback stays in its unit
        kept = {
            "state kept": same(before, run.handle.engine.compressor.state_dict()),
            "step skipped": torch.equal(weights, run.weights),
        }
        results[f"{name}, poisoned"] = {**result(run.train(POISONED + 1, STEPS)), **kept}
        run.close()
    return results


def alone() -> dict[str, Any]:
    """One rank by itself, under NCCL on a GPU: the hook does all its work, and its peer is thought."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    groups = [dist.new_group([rank], backend=backend) for rank in range(dist.get_world_size())]
    results = {}
    for name in ("none", "powersgd fp32", "quantize"):
        run = started(name, process_group=groups[dist.get_rank()])
        assert run.handle is not None
        run.handle.engine.open_channel = lambda *_: Mirror()
        results[name] = result(run.train(0, STEPS))
        run.close()
    return results


def megatron() -> dict[str, Any]:
    """Megatron's DDP under every way to reduce, two replicas."""
    from edgc.megatron import cpu_shims
    from tests.integration import megatron_cases

    cpu_shims.install()
    if device().type == "cuda":
        from megatron.core.distributed import param_and_grad_buffer

        # gloo of torch 2.11 takes the tensors of a coalesced all-gather for the CPU's and crashes: one at a time.
        param_and_grad_buffer._coalescing_manager = lambda *_, **__: contextlib.nullcontext()

    def trained(name: str, options: dict[str, bool], **more: Any) -> dict[str, Any]:
        run = megatron_cases.configuration(
            name,
            MEGATRON[name],
            model={"layers": 1},
            parallel={"pipeline": 1, "data": 2},
            train={"iterations": MEGATRON_STEPS, **options},
        )
        return megatron_cases.train(run, iterations=MEGATRON_STEPS, prepare=_same_weights, **more)

    results = {key: trained(name, options) for key, (name, options) in MEGATRON_RUNS.items()}
    results["powersgd, poisoned"] = trained("powersgd", {}, poison=frozenset({3}))
    return results


def _same_weights(session: Any) -> Callable[[], dict[str, Any]]:
    """Begin with the same weights on every device, whose generators differ."""
    for chunk in session.chunks:
        for name, parameter in chunk.module.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = 0.02 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values)
    session.optimizer.reload_model_params()
    return dict


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": ddp,
    "gathered": gathered,
    "alone": alone,
    "megatron": megatron,
}


def on_cpu(value: Any) -> Any:
    """Tensors in nested containers moved off the device, whose process ends."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, list) else value


def run_parts(parts: list[str], masked: bool = False) -> dict[str, Any]:
    """Results of the named parts on this rank of a group, tensors on the CPU; ``masked``: by the path of a GPU."""
    with masked_path(masked):
        found: dict[str, Any] = {"device": device().type, "host decides": host_decides(device())}
        return found | {name: on_cpu(PARTS[name]()) for name in parts}


def main(folder: str, rank: str, world: str, parts: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", int(world))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120))
    torch.save(run_parts(json.loads(parts)), Path(folder) / f"{rank}.pt")
    dist.barrier()  # no rank ends while another still needs it


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
