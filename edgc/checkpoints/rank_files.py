"""Files of all ranks, one each, in a folder that is published whole; reading them runs no code.

The functions that say so are collective: every rank of the world calls them, and what goes wrong on one rank is raised
on all.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from edgc.checkpoints import manifest
from edgc.checkpoints.manifest import DamagedCheckpoint, Entry, Manifest
from edgc.runtime.groups import gather_objects, on_first_rank, together, world


def file_of(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def partial_name(folder: Path) -> Path:
    """Name under which ``folder`` is written before it is renamed."""
    return folder.with_name(f".{folder.name}.partial")


def write(folder: Path, state: Mapping[str, Any], about: Callable[[], Mapping[str, Any]]) -> None:
    """Save the state of every rank in ``folder``, which appears when all have done so. Collective.

    Args:
        state: of this rank: nested dictionaries, lists and tuples of tensors and plain values.
        about: called on every rank; its value is kept in the manifest, under ``ranks``, in rank order.

    Raises:
        TypeError: ``state`` holds something else.
        UserError: a file cannot be written.
    """
    rank, _ = world()
    partial, content = partial_name(folder), portable(state)

    def prepare() -> None:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)

    on_first_rank(prepare)
    rows = gather_objects((together(lambda: save(partial / file_of(rank), content)), dict(about())))

    def finish() -> None:
        files = {file_of(index): item for index, (item, _) in enumerate(rows)}
        manifest.write(partial, Manifest({"ranks": [place for _, place in rows]}, files))
        manifest.publish(partial, folder)

    on_first_rank(finish)


# ------------------------------------------------------------------ one file


def save(path: Path, state: Mapping[str, Any]) -> Entry:
    """Write ``state`` to ``path`` and to the disk; its size and checksum."""
    dump(path, state)
    return manifest.entry(path)


def dump(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path`` and to the disk; a full disk is an ``OSError``."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer hides what the disk said
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def load(folder: Path, content: Manifest, name: str, *, lazily: bool = False) -> dict[str, Any]:
    """A state from ``folder``, on this rank's device where it was on a GPU, after its file was checked.

    Args:
        lazily: leave tensors in the file until they are used; for states that are not kept.

    Raises:
        DamagedCheckpoint: the file is not what was written, or holds more than tensors and plain values.
    """
    manifest.check(folder, content, [name])

    def here(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda()

    state = load_plain(folder / name, folder, name, map_location=here, mmap=lazily)
    if not isinstance(state, dict):
        raise DamagedCheckpoint(folder, name, f"holds {type(state).__name__} instead of a state")
    return state


def load_plain(source: Path | BinaryIO, folder: Path, name: str, **options: Any) -> Any:
    """Read ``source`` with ``torch.load``, if it holds tensors and plain values.

    Raises:
        DamagedCheckpoint: it does not; of the file ``name`` in ``folder``.
    """
    try:
        return torch.load(source, weights_only=True, **options)
    except Exception as error:  # torch raises many kinds
        raise DamagedCheckpoint(folder, name, unreadable(error)) from None


def unreadable(error: Exception) -> str:
    """Reason why a file cannot be read, to follow its name in a sentence."""
    requested = re.search(r"GLOBAL ([\w.]+)", str(error))
    if requested is not None:
        return f"asks for {requested[1]}, which may run code"
    return f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def portable(value: Any, path: str = "state") -> Any:
    """Copy ``value`` with every tensor in memory of just its own size, and mappings as dictionaries.

    Raises:
        TypeError: for what is neither a tensor nor a plain value, naming its place.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if alone else tensor.clone()
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, float):  # NumPy's, which a mean or a setting may be
        return float(value)
    if isinstance(value, Mapping):
        return {portable(key, path): portable(item, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(portable(item, f"{path}[{index}]") for index, item in enumerate(value))
    raise TypeError(f"{path} is a {type(value).__name__}; a checkpoint holds tensors and plain values")
