"""Start one training run: check everything, claim the run folder, start the ranks, publish the result.

A run with ``train.checkpoint_interval`` that was killed goes on from its newest whole checkpoint. Over several nodes
one launcher runs on each; that of node 0 owns the folder and says how the run ended
(:mod:`experiments.training.ranks`).

Exit codes: 0 the run has a status (ok, diverged or failed) and its folder is complete; 1 interrupted, nothing was
published; 2 bad input, nothing was touched; 130 interrupted by Ctrl-C, nothing was published.
"""

from __future__ import annotations

import os

from experiments.common import interrupts

if __name__ == "__main__":
    interrupts.while_starting()

# Before torch is imported: one thread per rank, and no thread pools in the server that forks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# After Ctrl-C the launcher leaves its semaphores to this process, which would warn before it removes them.
os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")

import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from edgc.errors import UserError
from experiments.common.cli import EXIT_BAD_INPUT, main_guard
from experiments.common.files import check_writable, no_space
from experiments.common.yaml_settings import load_yaml
from experiments.data.folder import DataInfo, check_config, check_indices, check_whole, load_info
from experiments.spec.matrix import check_run, find
from experiments.spec.settings import RunConfig, recorded
from experiments.training import lineage, provenance
from experiments.training.outputs import RunFolder, write_manifest
from experiments.training.ranks import (
    EXIT_INTERRUPTED,
    EXIT_LOST_PEER,
    Nodes,
    ending_with_others,
    error_elsewhere,
    error_of,
    follow,
    in_study,
    ranks_per_node,
    start_ranks,
    take_errors,
    warm_up,
)

SOCKET_FOLDER_BYTES = 64  # of a temporary folder in which the path of a socket, at most 107 bytes, has room


def read_data(run: RunConfig, results: Path) -> tuple[Path, DataInfo]:
    """Folder and description of the prepared data of a run, each file as it was written, or a ``UserError``."""
    folder = results / run.scale / "data" / run.data.path
    marker = folder / "data.yaml"
    if not marker.exists():
        fix = f"run `python -m experiments.data prepare --scale {run.scale}` first"
        raise UserError("training data is missing", where=marker, fix=fix)
    info = load_info(folder)
    check_config(info, run.data, folder)
    check_whole(folder, info)
    check_indices(folder)
    return folder, info


def _outcome(run: RunConfig, folder: RunFolder, nodes: Nodes, start: Callable[[], None]) -> dict[str, Any]:
    """Start the ranks and turn their end into a summary; exits when there is nothing to publish."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    name = f"{run.study}/{run.name}"
    try:
        with ending_with_others(folder.attempt, nodes):
            start()
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if first.exitcode == EXIT_BAD_INPUT:
            folder.withdraw()
            raise SystemExit(EXIT_BAD_INPUT) from None
        lost = first.exitcode < 0 or first.exitcode == EXIT_LOST_PEER
        try:
            error = error_elsewhere(folder.attempt, nodes) if lost else error_of(first)
        except UserError:
            folder.discard()
            raise
        if error is not None:
            return _failed(run, error, folder)
        how = f"was killed ({first.signal_name()})" if first.exitcode < 0 else "has gone"
        raise _interrupted(f"a rank of {name} {how}", folder) from None
    except SignalException:
        raise _interrupted(name, folder) from None
    except RendezvousError as problem:
        raise _interrupted(f"{name}: the nodes did not meet ({problem})", folder) from None
    return dict(json.loads((folder.attempt / "summary.json").read_text()))


def _rehearsed(run: RunConfig, folder: RunFolder, data_dir: Path, vocab_size: int) -> dict[str, Any]:
    """Train all replicas in this process, and turn the end into a summary."""
    from experiments.training import preload  # noqa: F401 (before anything imports Megatron)
    from experiments.training.rehearse import work

    try:
        return work(run, data_dir, vocab_size, folder.attempt)
    except UserError as error:
        folder.withdraw()
        raise in_study(error, run) from None
    except Exception as error:
        traceback.print_exc()
        return _failed(run, traceback.format_exception_only(error)[-1].strip().splitlines()[-1], folder)


def _failed(run: RunConfig, error: str, folder: RunFolder) -> dict[str, Any]:
    """Summary of a run that failed by itself; a full disk is no result, so the run goes on when there is space."""
    if no_space(error, folder.path):
        raise _interrupted(f"no space left in {folder.path}", folder) from None
    print(f"failed: {run.study}/{run.name}: {error}", file=sys.stderr)
    return {"status": "failed", "error": error}


def _interrupted(message: str, folder: RunFolder, code: int = EXIT_INTERRUPTED) -> SystemExit:
    """Throw the attempt away, keep the checkpoints, and say so."""
    folder.discard()
    newest = folder.newest_checkpoint()
    future = f"goes on from {newest.name}" if newest else "starts from the beginning"
    print(f"interrupted: {message}; the next launch {future}", file=sys.stderr)
    return SystemExit(code)


def _refuse_other_run(run: RunConfig, data: DataInfo, folder: RunFolder) -> None:
    """Refuse a checkpoint of other settings; the ranks look again at the one that they use."""
    newest = folder.newest_checkpoint()
    if newest is not None:
        try:
            saved = load_yaml(newest / "run.yaml")
        except UserError:
            return  # damaged: the ranks will say so, and use an older one
        lineage.refuse_other(saved, lineage.checkpoint_settings(run, data.fingerprint), newest)


def launch(run: RunConfig, results: Path, nodes: Nodes | None = None, *, fresh: bool = False) -> str:
    """Run one training job and publish its folder; returns its status, and "" on other nodes than 0.

    Args:
        results: root of all results; the run goes to ``<results>/<scale>/<study>/<run>``.
        nodes: by default this one alone.
        fresh: start from the beginning where a killed run has left checkpoints.
    """
    check_writable(results)
    nodes = nodes or Nodes()
    blocked = lineage.blocked_reason(run, results)
    if not blocked:
        run = lineage.with_ranks(run, results)
    folder = RunFolder(results / run.scale / run.study / run.name)
    start = partial(start_ranks, run, folder.attempt, nodes)
    try:
        data_dir, data = read_data(run, results)
    except UserError as refusal:
        if nodes.index > 0:
            follow(partial(start, None), folder.attempt, nodes.index, refusal)
        raise
    start = partial(start, (data_dir, data.vocab_size))
    if nodes.index > 0:
        follow(start, folder.attempt, nodes.index)
        return ""
    if not fresh:
        _refuse_other_run(run, data, folder)
    if not blocked and run.driver == "processes":
        warm_up(nodes)
    ranks_per_node(run, nodes)
    folder.claim()
    try:
        take_errors(folder.attempt)
        if fresh:
            folder.forget()
        if folder.newest_checkpoint() is None:
            folder.forget_warm_up()
        code = provenance.code_so_far(folder.checkpoints, run.driver) if run.train.checkpoint_interval else None
        record = {**run.model_dump(mode="json"), "provenance": provenance.collect(run, data.fingerprint)}
        _write(folder, "run.yaml", record)
        if blocked:
            outcome = _failed(run, blocked, folder)
        elif run.driver == "rehearsal":
            outcome = _rehearsed(run, folder, data_dir, data.vocab_size)
        else:
            outcome = _outcome(run, folder, nodes, start)
        interrupts.ignore()  # the run has ended, and is published in a moment
        if resumed_at := outcome.pop("resumed_at", []):
            record["provenance"] |= {"resumed_at": resumed_at, "code": code}
            _write(folder, "run.yaml", record)
        identity = {key: getattr(run, key) for key in ("study", "variant", "seed", "scale", "label")}
        summary = {"run": run.name, **identity, **outcome}
        (folder.attempt / "metrics.jsonl").touch()
        (folder.attempt / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        write_manifest(folder.attempt)
        (folder.attempt / "status").write_text(summary["status"] + "\n")
        folder.publish()
        if summary["status"] != "failed":
            folder.forget()
    except KeyboardInterrupt:
        raise _interrupted(f"{run.study}/{run.name}", folder, interrupts.EXIT) from None
    except OSError as error:
        if no_space(str(error), folder.path):
            raise _interrupted(f"no space left in {folder.path}", folder) from None
        raise
    finally:
        folder.release()
    return str(summary["status"])


def _write(folder: RunFolder, name: str, values: dict[str, Any]) -> None:
    (folder.attempt / name).write_text(yaml.safe_dump(values, sort_keys=False))


def read_run(path: Path) -> RunConfig:
    """A run from one complete file, such as the ``run.yaml`` of a run folder."""
    run = recorded(load_yaml(path), path)
    check_run(run, path)
    return run


@main_guard
def main(
    study: Annotated[str | None, typer.Option(help="name of a file in experiments/studies")] = None,
    run: Annotated[str | None, typer.Option(help="name of the run: <variant>-s<seed>")] = None,
    config: Annotated[
        Path | None, typer.Option(help="a complete run file instead, e.g. another run's run.yaml")
    ] = None,
    scale: Annotated[str, typer.Option(help="name of a file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="root of all results")] = Path("results"),
    nodes: Annotated[int, typer.Option(help="machines that take part")] = 1,
    node: Annotated[int, typer.Option(help="index of this machine")] = 0,
    rendezvous: Annotated[str, typer.Option(help="host:port of node 0")] = "localhost:0",
    address: Annotated[str | None, typer.Option(help="of this machine for the others; default: its name")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="drop the checkpoints of a killed run")] = False,
) -> None:
    """Train one run of a study, or of a file, and publish its folder."""
    if config is not None:
        job = read_run(config)
    elif study is not None and run is not None:
        job = find(study, scale, run)
    else:
        raise UserError("no run given", where="the command line", fix="give --study and --run, or --config")
    place = Nodes(nodes, node, rendezvous, address)
    if status := launch(job, results, place, fresh=fresh):
        print(f"{job.study}/{job.name}: {status}")


if __name__ == "__main__":
    interrupts.while_training()
    # The sockets of multiprocessing and the logs of the elastic agent.
    if len(os.fsencode(tempfile.gettempdir())) > SOCKET_FOLDER_BYTES:
        tempfile.tempdir = "/tmp"
    code = 0
    try:
        typer.run(main)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    # At once: taking down the libraries takes a second and saves nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
