"""Refusal of files of torch's and Megatron-Core's checkpoints that would run code.

A pickle names what is called while it is read. torch and Megatron read ``.metadata`` of a distributed checkpoint, and
the objects in its ``*.distcp``, whatever they name. :func:`check` reads them beforehand with a list of what they need
(https://docs.python.org/3/library/pickle.html#restricting-globals), so that nothing else is left to be called.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from edgc.checkpoints.manifest import DamagedCheckpoint
from edgc.checkpoints.rank_files import load_plain, unreadable

METADATA, COMMON = ".metadata", "common.pt"
_METADATA_TYPES = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_PLAN_TYPES = "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType"
_NEEDED = {
    "pathlib": {"PosixPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": _METADATA_TYPES.split(),
    # The plans of all ranks, which Megatron keeps to compare the next save with.
    "torch.distributed.checkpoint.planner": _PLAN_TYPES.split(),
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NEEDED.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


def check(folder: Path) -> None:
    """Refuse a distributed checkpoint whose pickles hold more than data; a folder without ``.metadata`` holds none.

    Objects may be of the types that ``torch.load`` accepts by default: plain ones, tensors, and what Megatron and the
    program have added with ``torch.serialization.add_safe_globals``.

    Raises:
        DamagedCheckpoint: naming the file and what it asks for.
    """
    if not (folder / METADATA).exists():
        return
    try:
        with (folder / METADATA).open("rb") as file:
            objects = _objects(_Metadata(file).load())
    except Exception as error:  # a foreign pickle fails in any way
        raise DamagedCheckpoint(folder, METADATA, unreadable(error)) from None
    for name, offset, length in objects:
        try:
            with (folder / name).open("rb") as file:
                file.seek(offset)
                content = io.BytesIO(file.read(length))
        except OSError as error:
            raise DamagedCheckpoint(folder, name, unreadable(error)) from None
        load_plain(content, folder, name, map_location="cpu")
    if (folder / COMMON).exists():
        load_plain(folder / COMMON, folder, COMMON, map_location="cpu")


def _objects(metadata: Any) -> list[tuple[str, int, int]]:
    """File, offset and length of every object that is no tensor."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds {type(metadata).__name__} instead of Metadata")
    objects = []
    for key, kind in metadata.state_dict_metadata.items():
        # Looked up as torch does when it reads them.
        stored = (metadata.storage_data or {}).get(MetadataIndex(key))
        if isinstance(kind, BytesStorageMetadata) and stored is not None:
            if stored.transform_descriptors:
                raise ValueError(f"{key} is stored as {stored.transform_descriptors}")
            objects.append((str(stored.relative_path), int(stored.offset), int(stored.length)))
    return objects
