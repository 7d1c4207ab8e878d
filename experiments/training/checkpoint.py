"""Checkpoints of a run in Megatron's distributed format: the weights at its end, and its whole state on the way there.

What a run needs to go on exactly lies in ``.checkpoints/iter_<iteration>/`` in its folder: model and optimizer as
Megatron saves them, EDGC's state (:mod:`edgc.megatron.checkpoint`), and ``trainer/`` with what else differs between
ranks: learning-rate schedule, random generators, probe rows, error feedback of the pipeline's traffic.
``metrics.jsonl`` is the run's log so far, from which the history is read; ``run.yaml`` holds the settings, which have
to be the same. The data need no state: batches follow from the seed and the iteration.
"""

from __future__ import annotations

import queue
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from edgc.checkpoints import manifest, rank_files
from edgc.errors import UserError
from edgc.megatron import checkpoint
from edgc.optimizers import MuonAndAdamW
from edgc.runtime.groups import together
from experiments.common.files import atomic_write
from experiments.common.yaml_settings import load_yaml
from experiments.spec.settings import RunConfig
from experiments.training.lineage import FREE_IN_WARM_UP, checkpoint_settings, refuse_other
from experiments.training.outputs import CHECKPOINTS, LOG, WARM_UP

KEEP = 2
TRAINER = "trainer"
# Each rank writes and reads its own part; may be read with another data-parallel size.
SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def save_model(chunks: Sequence[DistributedDataParallel], run: RunConfig, folder: Path) -> None:
    """Write the weights of all ranks to ``folder`` and the run's settings beside them, those last.

    ``run.yaml`` marks the checkpoint as whole. Called by every rank.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    _save(_model_state(chunks), folder)
    dist.barrier()
    if dist.get_rank() == 0:
        atomic_write(folder / "run.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


@dataclass(frozen=True)
class Progress:
    """Position of a run, and the state of everything but its session that it needs to go on."""

    iteration: int  # the last one that was completed
    seconds: float  # that all of them took, with everything between them
    resumed_at: list[int]  # iterations after which the run was resumed so far, at loading this time included
    metrics: Path  # the log up to there, on rank 0
    branched_from: str | None = None  # the run whose warm-up this was
    sums: list[torch.Tensor] = field(default_factory=list)  # of the weights at final evaluations, on this rank


class Checkpoints:
    """States that a killed run goes on from. Every method is called by every rank, between two iterations.

    Args:
        session: this rank's part of the job; of another kind where a subclass says what is saved of it.
        folder: of the run.
        fingerprint: of the prepared data, which have to stay the same.
    """

    def __init__(self, session: Any, folder: Path, fingerprint: str) -> None:
        self.session, self.folder = session, folder
        self.interval = session.run.train.checkpoint_interval
        self.settings = checkpoint_settings(session.run, fingerprint)

    def due(self, iteration: int) -> bool:
        """Say if the state after ``iteration`` is to be saved; the last one is followed by the end of the run."""
        last = self.session.run.train.iterations
        return self.interval > 0 and iteration % self.interval == 0 and iteration < last

    def save(self, progress: Progress, name: str = CHECKPOINTS) -> None:
        """Publish the state after an iteration in the folder of that name; the newest ones are kept."""
        session, iteration = self.session, progress.iteration
        state = {
            "iteration": iteration,
            "seconds": progress.seconds,
            "resumed_at": progress.resumed_at,
            "scheduler": session.scheduler.state_dict(),
            "recorders": {recorder.file: recorder.state_dict() for recorder in session.recorders},
            "random": _random_state(),
            "sums": progress.sums,
        }
        with checkpoint.publish(self.folder / name, iteration, keep=KEEP) as folder:
            self._write(folder, iteration)
            rank_files.write(folder / TRAINER, state, dict)
            if dist.get_rank() == 0:
                shutil.copyfile(progress.metrics, folder / LOG)
                (folder / "run.yaml").write_text(yaml.safe_dump(self.settings, sort_keys=False))

    def resume(self) -> Progress | None:
        """Load the newest whole checkpoint, saying which are damaged; ``UserError``: of other settings or data."""
        folder = checkpoint.latest(self.folder / CHECKPOINTS, report=_say)
        if folder is None:
            return None
        refuse_other(load_yaml(folder / "run.yaml"), self.settings, folder)
        return self._load(folder)

    def branch(self) -> Progress | None:
        """Load the state of the run that this one branches from, at the end of its warm-up.

        Raises:
            UserError: there is none, or it is of other settings or data.
        """
        run = self.session.run
        if run.branch is None:
            return None
        trunk = f"{run.branch}-s{run.seed}"
        root = self.folder.with_name(trunk) / WARM_UP
        folder = checkpoint.latest(root, report=_say)
        if folder is None:
            fix = f"delete the folder {root.parent} and train that run again: snakemake -c2 {run.study}"
            raise UserError(f"{run.name} branches from {trunk}, which has kept no state", where=root, fix=fix)
        refuse_other(load_yaml(folder / "run.yaml"), self.settings, folder, FREE_IN_WARM_UP)
        return self._load(folder, trunk)

    def _load(self, folder: Path, trunk: str | None = None) -> Progress:
        """Go on from ``folder``, a checkpoint of this run or of its ``trunk``."""
        session = self.session
        self._read(folder, changed_settings=trunk is not None)
        inner, name = folder / TRAINER, rank_files.file_of(dist.get_rank())
        state = together(lambda: rank_files.load(inner, manifest.read(inner), name))
        session.scheduler.load_state_dict(state["scheduler"])
        for recorder in session.recorders:
            recorder.load_state_dict(state["recorders"][recorder.file])
        _set_random_state(state["random"])
        run, iteration = session.run, int(state["iteration"])
        how = f"branches from {trunk}" if trunk else "goes on"
        if dist.get_rank() == 0:
            _say(f"{run.study}/{run.name} {how} after iteration {iteration} of {run.train.iterations}")
        resumed_at = [] if trunk else [*state["resumed_at"], iteration]
        return Progress(iteration, float(state["seconds"]), resumed_at, folder / LOG, trunk, state.get("sums", []))

    def _write(self, folder: Path, iteration: int) -> None:
        """Save model, optimizer and EDGC's state."""
        _save(self._sharded(is_loading=False), folder)
        checkpoint.save(folder, self.session.attachment, iteration=iteration)

    def _read(self, folder: Path, *, changed_settings: bool) -> None:
        """Load them."""
        together(lambda: self._load_megatron(folder))
        checkpoint.load(folder, self.session.attachment, changed_settings=changed_settings)

    def _load_megatron(self, folder: Path) -> None:
        chunks, optimizer = self.session.chunks, self.session.optimizer
        _allocate(optimizer)
        with checkpoint.readable(folder, "remove it to go on from an older one, or start anew with --fresh"):
            state = dist_checkpointing.load(self._sharded(is_loading=True), str(folder))
            for key, chunk in _by_key(chunks):
                chunk.module.load_state_dict(state[key])
            with torch.no_grad():  # a distributed optimizer copies into views of fp32 parameters
                optimizer.load_state_dict(state["optimizer"])
            _restore_steps(optimizer)

    def _sharded(self, *, is_loading: bool) -> dict[str, Any]:
        state = _model_state(self.session.chunks)
        options = {"is_loading": is_loading, "metadata": SHARDING}
        return {**state, "optimizer": self.session.optimizer.sharded_state_dict(dict(state), **options)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _by_key(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Every chunk with its key in Megatron's state."""
    return zip(
        ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))], chunks, strict=True
    )


def _model_state(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    return {key: chunk.module.sharded_state_dict() for key, chunk in _by_key(chunks)}


def _save(state: dict[str, Any], folder: Path) -> None:
    # Megatron takes a queue that a process of its own serves, for saving in the background; starting it imports
    # everything anew, seconds for each checkpoint. A save that is waited for runs in this process.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, str(folder))


def _adam_groups(optimizer: Any) -> Iterator[tuple[torch.optim.Adam, dict[str, Any]]]:
    """Groups of parameters of the distributed optimizers that an optimizer is made of, where they are torch's Adam."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            yield from ((part.optimizer, group) for group in part.optimizer.param_groups)


def _allocate(optimizer: Any) -> None:
    """Give torch's Adam the state that it has after a step: a distributed optimizer loads only into what is there."""
    for adam, group in _adam_groups(optimizer):
        for parameter in group["params"]:
            if not adam.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **zeros}


def _restore_steps(optimizer: Any) -> None:
    """Tell torch's Adam how many steps it has made.

    Megatron reads the number into the groups of parameters alone, and gives all parameters one tensor for it, still at
    zero, to which Adam would add in place. To Muon's matrices it gives a number that they do not have.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, MuonAndAdamW):
            for group in part.optimizer.param_groups:
                for parameter in group["params"] if "betas" not in group else ():
                    part.optimizer.state[parameter].pop("step", None)
    for adam, group in _adam_groups(optimizer):
        steps = float(group.pop("step"))
        for parameter in group["params"]:
            adam.state[parameter]["step"] = torch.tensor(steps)


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["tracker"]))
