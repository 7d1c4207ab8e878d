"""EDGC's state in Megatron-Core checkpoints: saved beside Megatron's own, published whole, resumed exactly.

Megatron's state dictionaries know nothing of error feedback, warm starts and the controller. They differ between
ranks, so each rank saves its own: ``<checkpoint>/edgc/rank_00000.pt`` and so on, with a manifest of the layout, the
iteration, and each file's size and checksum. With Megatron-LM, whose tracker file names a checkpoint last of all::

    checkpoint.save(f"{args.save}/iter_{iteration:07d}", attachment, iteration=iteration)  # then save_checkpoint(...)
    checkpoint.load(f"{args.load}/iter_{iteration:07d}", attachment)                       # after load_checkpoint(...)

With a training loop of one's own::

    with checkpoint.publish(root, iteration, keep=2) as folder:
        dist_checkpointing.save(state, str(folder))
        checkpoint.save(folder, attachment, iteration=iteration)

    folder = checkpoint.latest(root)  # the newest that is whole; says which ones are damaged
    if folder is not None:
        state = dist_checkpointing.load(state, str(folder))
        iteration = checkpoint.load(folder, attachment)

All functions are collective: every rank of the world calls them, between two iterations, and folders are on a file
system that all ranks share, as for Megatron. A run goes on from its checkpoint bit for bit as if it had never stopped.

Checksums find damage, no forgery: they lie beside what they are of. What lies in the pickles of a checkpoint is
therefore looked at before anybody reads them (:mod:`edgc.checkpoints.unpickling`).
"""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from torch.distributed.checkpoint.api import CheckpointException  # no Exception, but a BaseException

from edgc.checkpoints import manifest, rank_files, unpickling
from edgc.checkpoints.manifest import DamagedCheckpoint, Manifest
from edgc.checkpoints.saved_state import LOCAL, State, merge
from edgc.errors import UserError
from edgc.megatron.attachment import Attachment, place
from edgc.megatron.strategy import StrategyHandle
from edgc.runtime.groups import gather_objects, on_first_rank, together, world

__all__ = ["DamagedCheckpoint", "check", "latest", "load", "publish", "readable", "save"]

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's
FOLDER = "edgc"  # inside a checkpoint
SHARD, EXPERTS = ("tensor", "pipeline"), ("expert", "expert_tensor")
"""Coordinates of a rank: equal ones hold the same part of the parameters, and both the same part of the experts."""
_NAME = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.iter_\d{7,}\.(partial|old)")


def layout() -> dict[str, int]:
    """Sizes of this job's parallel groups; ``data`` is the number of replicas whose gradients are averaged."""
    return {
        "world": world()[1],
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "data": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def save(folder: str | Path, attachment: Attachment | StrategyHandle, *, iteration: int) -> None:
    """Save EDGC's state of all ranks as ``folder/edgc``, which is there whole or not at all.

    To be called before what makes the checkpoint count: the end of :func:`publish`, or Megatron-LM's tracker file.

    Args:
        folder: of one checkpoint, Megatron's files in it or still to come; made if it is missing.
        iteration: how many iterations the state has behind it.

    Raises:
        UserError: the files cannot be written.
    """
    folder = Path(folder)
    # A checkpoint of `publish` is whole only with its own manifest, see `check`.
    common = {"iteration": iteration, "layout": layout(), "published": _HIDDEN.fullmatch(folder.name) is not None}
    # Replicated over the ranks of an expert only.
    experts = sorted(name for p, name in attachment.names.items() if not getattr(p, "allreduce", True))
    state = {"attachment": attachment.state_dict(), "experts": experts}
    rank_files.write(folder / FOLDER, state, lambda: {**common, "place": place()})


def load(folder: str | Path, attachment: Attachment | StrategyHandle, *, changed_settings: bool = False) -> int:
    """Go on from what :func:`save` left in ``folder``; returns its iteration.

    Every rank takes over its own state. If only the number of replicas differs, error feedback is redistributed so that
    the averaged gradient owes what it owed (:mod:`edgc.checkpoints.saved_state`): the run goes on, but not bit for bit.

    Args:
        changed_settings: see :meth:`~edgc.megatron.attachment.Attachment.load_state_dict`.

    Raises:
        DamagedCheckpoint: on every rank, if any file is missing or altered; an older checkpoint may do.
        UserError: the checkpoint is of another tensor, pipeline or expert layout, or of other settings.

    Warns:
        UserWarning: on rank 0, when error feedback was redistributed.
    """
    folder, job, rank = Path(folder), layout(), place()
    on_first_rank(lambda: manifest.recover(folder / FOLDER))
    content = together(lambda: read(folder))
    state = together(lambda: state_of(folder, content, job, rank))
    first = content.about["ranks"][0]
    if first["layout"]["data"] != job["data"] and world()[0] == 0:
        what = f"edgc: a state of {first['layout']['data']} replicas goes on with {job['data']}"
        loss = (
            "what is a replica's own is left out"
            if "own" in state
            else "error feedback is redistributed, its sum is kept"
        )
        warnings.warn(f"{what}; {loss}", stacklevel=2)
    together(lambda: attachment.load_state_dict(state, changed_settings=changed_settings))
    return int(first["iteration"])


# ------------------------------------------------------------------ the state of a rank


def read(folder: Path) -> Manifest:
    """The manifest of EDGC's part of the checkpoint ``folder``.

    Raises:
        DamagedCheckpoint: it is missing or altered.
    """
    with _within(folder, FOLDER):
        return manifest.read(folder / FOLDER)


@contextlib.contextmanager
def _within(folder: Path, part: str) -> Iterator[None]:
    """Let damage found in ``folder/part`` be told as damage of ``folder``."""
    try:
        yield
    except DamagedCheckpoint as damage:
        raise DamagedCheckpoint(folder, (Path(part) / damage.file).as_posix(), damage.problem) from None


def state_of(folder: Path, content: Manifest, job: Mapping[str, int], rank: Mapping[str, int]) -> dict[str, Any]:
    """The attachment's state for a rank at the place ``rank`` of the layout ``job``; not collective.

    Raises:
        DamagedCheckpoint: a file that this rank needs is missing or altered.
        UserError: the layouts differ in more than the number of replicas.
    """
    saved, places = content.about["ranks"][0]["layout"], [about["place"] for about in content.about["ranks"]]
    # Under other sizes a rank holds other parameters, or parts of them.
    other = [key for key in job if key not in ("world", "data") and saved[key] != job[key]]
    if other:
        sizes = {key: f"{key.replace('_', ' ')} parallel size {saved[key]}" for key in other}
        what = ", ".join(f"{size}, not {job[key]}" for key, size in sizes.items())
        fix = f"start with {', '.join(sizes.values())}"
        raise UserError(f"EDGC's state was saved with {what}", where=folder, fix=fix)

    def state_at(index: int, **options: Any) -> dict[str, Any]:
        return rank_files.load(folder / FOLDER, content, rank_files.file_of(index), **options)

    with _within(folder, FOLDER):
        if saved == job:
            return dict(state_at(places.index(rank))["attachment"])
        replicas = [i for i, other in enumerate(places) if all(other[key] == rank[key] for key in SHARD)]
        replicas.sort(key=lambda index: places[index]["data"])
        states = [(places[index], state_at(index, lazily=True)) for index in replicas]
    # Files may be deleted while the run goes on.
    return {**copy.deepcopy(redistributed(states, rank)), "world": job["data"], "rank": rank["data"]}


def redistributed(states: Sequence[tuple[Mapping[str, int], State]], rank: Mapping[str, int]) -> State:
    """The state for the place ``rank`` from those of all replicas of its shard, with their places, so that error
    feedback owes the same. Of a strategy what all replicas share goes on, without what was each one's own.

    Experts are replicated less often than the rest: theirs comes from the ranks that held the same experts.
    """
    if "own" in (first := states[0][1]["attachment"]):
        return {**first, "own": None}
    everyone = merge([state["attachment"] for _, state in states])
    alike = [state for other, state in states if all(other[key] == rank[key] for key in EXPERTS)]
    if len(alike) == len(states):
        return everyone
    merged = merge([state["attachment"] for state in alike])
    experts = set(alike[0]["experts"])
    engine, dense = merged["engine"], everyone["engine"]["compressor"]
    compressor = dict(engine["compressor"])
    for key in LOCAL.keys() & dense.keys():
        compressor[key] = {name: tensor for name, tensor in dense[key].items() if name not in experts} | {
            name: tensor for name, tensor in compressor[key].items() if name in experts
        }
    return {**merged, "engine": {**engine, "compressor": compressor}}


# ------------------------------------------------------------------ whole checkpoints


@contextlib.contextmanager
def publish(root: str | Path, iteration: int, *, keep: int | None = None) -> Iterator[Path]:
    """Write a checkpoint into the yielded folder; it becomes ``root/iter_<iteration>`` when every rank has finished.

    Until then it has a hidden name, so a job that is killed leaves no checkpoint that looks whole. Its files are
    brought to the disk, and their checksums are written down, work that the ranks share. Megatron-LM's tracker file
    follows.

    Args:
        keep: how many checkpoints to keep, this one and those before it; None keeps all. Those of later iterations,
            from before a run went back to an older one, stay.

    Raises:
        UserError: a file cannot be written.
    """
    root = Path(root)
    target = root / f"iter_{iteration:07d}"
    partial = rank_files.partial_name(target)

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _recover(root)
        for path in root.iterdir():
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path)
        partial.mkdir()

    def finish() -> None:
        files = {name: item for part in parts for name, item in part.items()}
        manifest.write(partial, Manifest({"iteration": iteration}, files))
        manifest.publish(partial, target)
        tracker = root / f".{TRACKER}"
        tracker.write_text(str(iteration))
        manifest.sync(tracker)
        tracker.replace(root / TRACKER)
        earlier = [folder for folder in _folders(root) if _number(folder) <= iteration]
        for old in earlier[keep:] if keep else []:
            hidden = rank_files.partial_name(old)
            old.rename(hidden)
            shutil.rmtree(hidden)

    def settle() -> dict[str, manifest.Entry]:
        for name in names[rank::size]:
            manifest.sync(partial / name)
        return {name: manifest.entry(partial / name) for name in names[rank::size]}

    on_first_rank(prepare)
    yield partial
    together(lambda: None)
    rank, size = world()
    names = on_first_rank(lambda: manifest.files_below(partial))
    parts = gather_objects(together(settle))
    on_first_rank(finish)


def check(folder: str | Path) -> None:
    """Compare every file of a checkpoint with its manifest, shared among the ranks, and look into its pickles.

    Of a checkpoint that :func:`publish` did not make, only EDGC's part can be compared; Megatron-LM's tracker file has
    to have named it or a later one.

    Raises:
        DamagedCheckpoint: on every rank, for a file that is missing, not what was written, or would run code.
    """
    folder = Path(folder)
    content, part = together(lambda: read(folder)), FOLDER
    iteration = int(content.about["ranks"][0]["iteration"])

    def check_tracker() -> None:
        tracker = folder.parent / TRACKER
        named = tracker.read_text().strip() if tracker.exists() else "0"
        if named.isdigit() and int(named) < iteration:
            raise DamagedCheckpoint(folder, f"../{TRACKER}", f"names iteration {named}, so this one is unfinished")

    def check_files() -> None:
        rank, size = world()
        with _within(folder, part):
            manifest.check(folder / part, content, sorted(content.files)[rank::size])

    if any(about["published"] for about in content.about["ranks"]):
        content, part = together(lambda: manifest.read(folder)), ""
    else:
        on_first_rank(check_tracker)
    together(check_files)
    on_first_rank(lambda: unpickling.check(folder))


@contextlib.contextmanager
def readable(folder: Path, fix: str) -> Iterator[None]:
    """Let what ``dist_checkpointing`` raises inside, while it reads ``folder``, be told in one line.

    Raises:
        UserError: with the cause, and with ``fix``.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        cause = (str(error).strip().splitlines() or [""])[-1]
        kind = "" if isinstance(error, CheckpointException) else f"{type(error).__name__}: "
        what = f"the checkpoint does not hold this model: {kind}{cause[:240]}"
        raise UserError(what, where=folder, fix=fix) from None


def latest(root: str | Path, *, report: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint below ``root`` that is whole; None if there is none.

    Args:
        report: called on rank 0 with one line for every newer one that is damaged; by default a warning.
    """
    root = Path(root)
    damaged: list[DamagedCheckpoint] = []
    whole: Path | None = None
    on_first_rank(lambda: _recover(root))
    for folder in on_first_rank(lambda: _folders(root)):
        try:
            check(folder)
        except DamagedCheckpoint as error:
            damaged.append(error)
        else:
            whole = folder
            break
    consequence = f"going on from {whole.name}" if whole else "no older one is whole, starting from the beginning"
    for damage in damaged if world()[0] == 0 else ():
        line = f"checkpoint {damage.folder} is damaged (file {damage.file} {damage.problem}); {consequence}"
        if report is not None:
            report(line)
        else:
            warnings.warn(f"edgc: {line}", stacklevel=2)
    return whole


def _recover(root: Path) -> None:
    """Bring back the checkpoints that a kill has left hidden."""
    for path in root.glob(".iter_*.old"):
        with contextlib.suppress(OSError):  # a reader may not be allowed to
            manifest.recover(root / path.name.removeprefix(".").removesuffix(".old"))


def _folders(root: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    folders = [path for path in (root.iterdir() if root.is_dir() else ()) if _NAME.fullmatch(path.name)]
    return sorted(folders, key=_number, reverse=True)


def _number(folder: Path) -> int:
    """The iteration of a checkpoint."""
    return int(folder.name.removeprefix("iter_"))
