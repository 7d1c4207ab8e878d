"""What the ranks of ``test_resume.py`` do: train, save, build anew, load and go on, for several layouts."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from edgc.checkpoints import manifest
from edgc.checkpoints.manifest import Manifest
from edgc.errors import UserError
from edgc.megatron import cpu_shims
from experiments.spec.settings import RunConfig
from tests.integration.megatron_cases import configuration, session_of, steps

with cpu_shims.without_compiler():
    from edgc.megatron import checkpoint
    from experiments.training.build import Session
    from experiments.training.checkpoint import Checkpoints, Progress
    from experiments.training.outputs import CHECKPOINTS, WARM_UP

STEPS, SAVED_AFTER = 8, 4
# Active from the fourth iteration, so that the checkpoint holds error feedback; it lies inside a window.
EDGC = {
    "method": "edgc",
    "policy": "cqm",
    "r_max": 16,
    "r_min": 4,
    "window": 3,
    "stability_tolerance": 10.0,
    "warmup_limit_fraction": 0.1,
}
TRAIN = {"iterations": STEPS, "eval_interval": STEPS, "checkpoint_interval": SAVED_AFTER}
DP2_PP2: dict[str, Any] = {"pipeline": 2, "data": 2}
INTERLEAVED: dict[str, Any] = {**DP2_PP2, "virtual_pipeline": 2}
DP4: dict[str, Any] = {"pipeline": 1, "data": 4}
DP2: dict[str, Any] = {"pipeline": 1, "data": 2}
TP2_DP2: dict[str, Any] = {"tensor": 2, "pipeline": 1, "data": 2}


def run_of(
    name: str, parallel: dict[str, Any], layers: int = 2, iteration_rate: float = 0.5, **train: Any
) -> RunConfig:
    # Dropout, so that the random generators count.
    model = {"dropout": 0.1, "layers": layers}
    edgc = {**EDGC, "entropy": {"iteration_rate": iteration_rate, "entry_rate": 0.5}}
    return configuration(name, edgc, model=model, parallel=parallel, train={**TRAIN, **train})


# The runs that are resumed, by layout.
RUNS = {
    "dp2_pp2": run_of("dp2_pp2", DP2_PP2),
    "tp2_dp2": run_of("tp2_dp2", TP2_DP2),
    # Interleaved, and Megatron reduces buckets in another order in the first iteration, before and after a stop.
    "overlap": run_of("overlap", INTERLEAVED, layers=4, iteration_rate=1.0, overlap_grad_reduce=True),
    "distributed": run_of("distributed", DP2_PP2, distributed_optimizer=True),
    "distributed_bf16": run_of("distributed_bf16", DP2_PP2, distributed_optimizer=True, precision="bf16"),
}


def snapshot(session: Session, losses: list[float]) -> dict[str, Any]:
    """Copies of everything that has to repeat."""
    engine = session.attachment.engine
    return {
        "losses": losses,
        "weights": {n: p.detach().clone() for c in session.chunks for n, p in c.named_parameters()},
        "adam": adam(session.optimizer),
        "edgc": session.attachment.state_dict(),
        "phase": engine.controller.phase,
        "lr": session.optimizer.param_groups[0]["lr"],
        "random": torch.get_rng_state(),
    }


def adam(optimizer: Any) -> list[dict[str, Any]]:
    """The state of every parameter of every optimizer that Megatron has made, in order."""
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    return [
        {name: value.clone() for name, value in torch_optimizer.state[parameter].items()}
        for torch_optimizer in inner
        for group in torch_optimizer.param_groups
        for parameter in group["params"]
    ]


def save(session: Session, root: Path, log: Path) -> None:
    Checkpoints(session, root, "fingerprint").save(Progress(SAVED_AFTER, 1.5, [2], log))


def interrupted(run: RunConfig, root: Path, log: Path) -> dict[str, Any]:
    """Without a stop, and with one after half of the steps, where both save: what is left then and at the end."""
    session = session_of(run)
    begun = steps(session, run, 0, SAVED_AFTER)
    save(session, root, log)
    at_save = snapshot(session, begun)
    undisturbed = snapshot(session, begun + steps(session, run, SAVED_AFTER, STEPS))
    session = session_of(run)
    found = Checkpoints(session, root, "fingerprint").resume()
    assert found is not None
    loaded = snapshot(session, [])
    resumed = snapshot(session, begun + steps(session, run, found.iteration, STEPS))
    return {
        "undisturbed": undisturbed,
        "at_save": at_save,
        "loaded": loaded,
        "resumed": resumed,
        "found": (found.iteration, found.seconds, found.resumed_at),
        "log": found.metrics.read_text(),
    }


def refusal(action: Callable[[], object]) -> tuple[str, str]:
    """Type and text of the error that this rank gets."""
    try:
        action()
    except UserError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def refusals(root: Path) -> dict[str, tuple[str, str]]:
    """What every rank is told of checkpoints that do not fit: other layouts, other settings, damage."""
    damaged = root / "damaged" / CHECKPOINTS / f"iter_{SAVED_AFTER:07d}"
    folder = root / "tp2_dp2" / CHECKPOINTS / f"iter_{SAVED_AFTER:07d}"
    run = run_of("tp2_dp2", TP2_DP2)
    found = {}
    for name, parallel in (("tp2_to_dp4", DP4), ("tp2_to_pp2", DP2_PP2)):
        session = session_of(run_of(name, parallel))
        found[name] = refusal(lambda s=session: checkpoint.load(folder, s.attachment))  # type: ignore[misc]
    session = session_of(run)
    other = Checkpoints(session, root / "tp2_dp2", "fingerprint")
    other.settings["seed"] = 2
    found["settings"] = refusal(other.resume)
    found["data"] = refusal(Checkpoints(session, root / "tp2_dp2", "other").resume)
    # A branch of another learning rate, and one of a run that has kept no state.
    for name, trunk in (("branch", "tp2_dp2"), ("no_state", "dp2_pp2")):
        session.run = run.model_copy(update={"branch": trunk, "seed": 1})
        branch = Checkpoints(session, root / "study" / "mine", "fingerprint")
        warm_up = root / "study" / f"{trunk}-s1" / WARM_UP / folder.name
        if dist.get_rank() == 0 and name == "branch":
            shutil.copytree(folder, warm_up)
        dist.barrier()
        branch.settings["train"]["lr"] = 2e-3
        found[name] = refusal(branch.branch)
    session.run = run
    empty = root / "empty" / CHECKPOINTS / f"iter_{SAVED_AFTER:07d}"
    if dist.get_rank() == 0:
        shutil.copytree(folder, empty)
        (empty / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
        known = manifest.read(empty)
        files = {name: manifest.entry(empty / name) for name in known.files}
        manifest.write(empty, Manifest(known.about, files))
    dist.barrier()
    found["empty"] = refusal(Checkpoints(session, root / "empty", "fingerprint").resume)
    if dist.get_rank() == 0:
        shutil.copytree(folder, damaged)
        file = damaged / "edgc" / "rank_00002.pt"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    found["damage"] = refusal(lambda: checkpoint.load(damaged, session.attachment))
    found["none_left"] = (repr(Checkpoints(session, root / "damaged", "fingerprint").resume()), "")
    return found


def four_ranks(root: str) -> dict[str, Any]:
    """All that needs four ranks; checkpoints are left in ``root``."""
    cpu_shims.install()
    log = Path(root) / "metrics.jsonl"
    if dist.get_rank() == 0:
        log.write_text('{"event": "start"}\n')
    cases: dict[str, Any] = {name: interrupted(run, Path(root) / name, log) for name, run in RUNS.items()}
    session = session_of(run_of("dp4", DP4))
    losses = steps(session, session.run, 0, SAVED_AFTER)
    save(session, Path(root) / "dp4", log)
    dp4 = snapshot(session, losses)
    return {"cases": cases, "dp4": dp4, "refusals": refusals(Path(root))}


def two_replicas(root: str) -> dict[str, Any]:
    """Go on with two replicas from what four have saved."""
    cpu_shims.install()
    session = session_of(run_of("dp2", DP2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iteration = checkpoint.load(Path(root) / "dp4" / CHECKPOINTS / f"iter_{SAVED_AFTER:07d}", session.attachment)
    loaded = snapshot(session, [])
    texts = [str(warning.message) for warning in caught if "edgc" in str(warning.message)]
    more = snapshot(session, steps(session, session.run, iteration, STEPS))
    return {"iteration": iteration, "loaded": loaded, "warnings": texts, "after": more}
