"""The state at the end of a finished run's warm-up, made again where it is lost. Imports no torch.

Archives keep no state, so a run that was restored from one has nothing that others could branch from. Its warm-up is
trained again; the run itself stays as it is. On the same kind of processor, with the same versions, that gives the same
state to the last bit. Elsewhere rounding differs: what branches from it then starts near the kept runs and not with
them, which is said here, and by ``same_start`` in the tables (:mod:`experiments.analyse.policies`).
"""

from __future__ import annotations

from pathlib import Path

from edgc.errors import UserError
from experiments.spec.settings import RunConfig
from experiments.training import outputs
from experiments.training.run_folder import RunFolder


def check(run: RunConfig, folder: RunFolder) -> None:
    """Raises ``UserError`` unless ``run`` has ended well, others branch from it, and it has no state for them."""
    if not run.train.keep_warm_up:
        fix = f"give a run that others branch from (branch: in the file of study {run.study})"
        raise UserError(f"no run branches from {run.name}", where="--warm-up-again", fix=fix)
    status = outputs.read_status(folder.path)
    if status != "ok":
        fix = f"train it: snakemake -c2 {run.study}"
        raise UserError(f"{run.name} is {status}; only a run that has ended has a warm-up", where=folder.path, fix=fix)
    if newest := folder.newest_warm_up():
        raise UserError(f"{run.name} has its state", where=newest, fix="delete it to have it made again")


def report(run: RunConfig, folder: RunFolder, status: str) -> str:
    """How the losses of the warm-up just trained compare with the kept run's, in a line.

    Args:
        status: how that training ended.

    Raises:
        UserError: it ended before the warm-up did.
    """
    newest = folder.newest_warm_up()
    if newest is None:
        what = f"the warm-up of {run.name} did not end again: this time the run is {status}"
        fix = f"if it ends so again, delete the folder and train the run anew: snakemake -c2 {run.study}"
        raise UserError(what, where=folder.path, fix=fix)
    now, kept = _losses(newest / outputs.LOG), _losses(folder.path / outputs.LOG)
    last = max(now)
    differing = [iteration for iteration, loss in now.items() if kept.get(iteration) != loss]
    made = f"{run.study}/{run.name}: the state after iteration {last}, the end of warm-up, is made again"
    if not differing:
        return f"{made}; all losses are those of the kept run, bit for bit"
    apart = abs(now[last] - kept.get(last, float("nan")))
    where = f"losses differ from the kept run's from iteration {differing[0]} on, by {apart:.1g} nats at the end"
    return f"{made}; {where}: another processor or version? What branches from it does not start where kept runs did"


def _losses(log: Path) -> dict[int, float]:
    return {int(step["iteration"]): step["loss"] for step in outputs.read_events(log, "step")}
