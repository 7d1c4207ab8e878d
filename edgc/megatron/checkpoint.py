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
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException  # no Exception, but a BaseException

from edgc.checkpoints import manifest, rank_files, unpickling
from edgc.checkpoints.manifest import DamagedCheckpoint, Manifest
from edgc.errors import UserError
from edgc.megatron.attachment import Attachment
from edgc.megatron.checkpoint_state import (
    FOLDER,
    Layout,
    Place,
    experts_of,
    iteration_of,
    layout_of,
    read,
    state_of,
    within,
)
from edgc.runtime.groups import gather_objects

__all__ = ["DamagedCheckpoint", "check", "latest", "load", "publish", "readable", "save"]

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's
_NAME = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.iter_\d{7,}\.(partial|old)")


def save(folder: str | Path, attachment: Attachment, *, iteration: int) -> None:
    """Save EDGC's state of all ranks as ``folder/edgc``, which is there whole or not at all.

    To be called before what makes the checkpoint count: the end of :func:`publish`, or Megatron-LM's tracker file.

    Args:
        folder: of one checkpoint, Megatron's files in it or still to come; made if it is missing.
        iteration: how many iterations the state has behind it.

    Raises:
        UserError: the files cannot be written.
    """
    folder = Path(folder)
    common = {"iteration": iteration, "layout": asdict(Layout.current())}
    # A checkpoint of `publish` is whole only with its own manifest, see `check`.
    common["published"] = _HIDDEN.fullmatch(folder.name) is not None
    state = {"attachment": attachment.state_dict(), "experts": experts_of(attachment)}
    rank_files.write(folder / FOLDER, state, lambda: {**common, "place": asdict(Place.current())})


def load(folder: str | Path, attachment: Attachment, *, changed_settings: bool = False) -> int:
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
    folder = Path(folder)
    layout, place = Layout.current(), Place.current()
    content = rank_files.together(lambda: read(folder))
    state = rank_files.together(lambda: state_of(folder, content, layout, place))
    saved = layout_of(content)
    if saved.data != layout.data and rank_files.world()[0] == 0:
        what = f"edgc: a state of {saved.data} replicas goes on with {layout.data}"
        warnings.warn(f"{what}; error feedback is redistributed, its sum is kept", stacklevel=2)
    rank_files.together(lambda: attachment.load_state_dict(state, changed_settings=changed_settings))
    return iteration_of(content)


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
        for left in root.iterdir():
            if _HIDDEN.fullmatch(left.name):
                shutil.rmtree(left)
        partial.mkdir()

    def finish() -> None:
        files = {name: item for part in parts for name, item in part.items()}
        manifest.write(partial, Manifest({"iteration": iteration}, files))
        manifest.publish(partial, target)
        tracker = root / f".{TRACKER}"
        tracker.write_text(str(iteration))
        manifest.sync(tracker)
        tracker.replace(root / TRACKER)
        so_far = [folder for folder in _folders(root) if _number(folder) <= iteration]
        for old in so_far[keep:] if keep else []:
            hidden = old.with_name(f".{old.name}.old")
            old.rename(hidden)
            shutil.rmtree(hidden)

    rank_files.on_first_rank(prepare)
    yield partial
    rank_files.together(lambda: None)
    rank, size = rank_files.world()
    names = rank_files.on_first_rank(lambda: manifest.files_below(partial))
    parts = gather_objects(rank_files.together(lambda: _settle(partial, names[rank::size])))
    rank_files.on_first_rank(finish)


def _settle(folder: Path, names: Sequence[str]) -> dict[str, manifest.Entry]:
    """Bring files to the disk; their sizes and checksums."""
    for name in names:
        manifest.sync(folder / name)
    return {name: manifest.entry(folder / name) for name in names}


def check(folder: str | Path) -> None:
    """Compare every file of a checkpoint with its manifest, shared among the ranks, and look into its pickles.

    Of a checkpoint that :func:`publish` did not make, only EDGC's part can be compared; Megatron-LM's tracker file has
    to have named it or a later one.

    Raises:
        DamagedCheckpoint: on every rank, for a file that is missing, not what was written, or would run code.
    """
    folder = Path(folder)
    inner = rank_files.together(lambda: read(folder))
    if any(about["published"] for about in inner.about["ranks"]):
        content, part = rank_files.together(lambda: manifest.read(folder)), ""
    else:
        content, part = inner, FOLDER
        rank_files.on_first_rank(lambda: _check_tracker(folder, iteration_of(inner)))
    rank, size = rank_files.world()
    rank_files.together(lambda: _check(folder, part, content, sorted(content.files)[rank::size]))
    rank_files.on_first_rank(lambda: unpickling.check(folder))


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
    for folder in rank_files.on_first_rank(lambda: _folders(root)):
        try:
            check(folder)
        except DamagedCheckpoint as found:
            damaged.append(found)
        else:
            whole = folder
            break
    on = f"going on from {whole.name}" if whole else "no older one is whole, starting from the beginning"
    for damage in damaged if rank_files.world()[0] == 0 else ():
        line = f"checkpoint {damage.folder} is damaged (file {damage.file} {damage.problem}); {on}"
        if report is not None:
            report(line)
        else:
            warnings.warn(f"edgc: {line}", stacklevel=2)
    return whole


def _folders(root: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    found = [path for path in (root.iterdir() if root.is_dir() else ()) if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(folder: Path) -> int:
    """The iteration of a checkpoint."""
    return int(folder.name.removeprefix("iter_"))


def _check(folder: Path, part: str, content: Manifest, names: Sequence[str]) -> None:
    with within(folder, part):
        manifest.check(folder / part, content, names)


def _check_tracker(folder: Path, iteration: int) -> None:
    tracker = folder.parent / TRACKER
    named = tracker.read_text().strip() if tracker.exists() else "0"
    if named.isdigit() and int(named) < iteration:
        raise DamagedCheckpoint(folder, f"../{TRACKER}", f"names iteration {named}, so this one is unfinished")
