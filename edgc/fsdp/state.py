"""States of all ranks, one object each under a key of its own.

torch's distributed checkpoints take one key on two ranks for one thing, and do not read tensors that are not there yet.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from edgc.checkpoints.rank_files import unreadable
from edgc.errors import UserError
from edgc.fsdp.layout import Layout

Saved = Mapping[str, bytes]


class Place(NamedTuple):
    """Part of the model, and replica, that a rank's state belongs to.

    Attributes:
        part: of the model that this rank holds.
        replica, replicas: number of its replica, and of how many.
    """

    part: str
    replica: int
    replicas: int

    @classmethod
    def of(cls, layout: Layout) -> Place:
        """The place of this rank's part, which several replicas have."""
        group = layout.replicas or layout.shards  # sharded over all, ranks have gradients of their own as replicas do
        return cls(layout.part, group.rank(), group.size())

    def key(self) -> str:
        return f"{self.part}.replica{self.replica}of{self.replicas}"

    def placeholders(self, replicas: int) -> dict[str, bytes]:
        """Keys of this part in a run of so many replicas."""
        return {Place(self.part, replica, replicas).key(): b"" for replica in range(replicas)}

    def packed(self, state: dict[str, Any]) -> dict[str, bytes]:
        """``state``, tensors and plain values, under this place's key."""
        file = io.BytesIO()
        torch.save(state, file)
        return {self.key(): file.getvalue()}

    def found(self, saved: Saved | Sequence[Saved]) -> dict[str, Any] | list[dict[str, Any]]:
        """This place's own state in what was saved, or else those of its part in all replicas.

        Raises:
            UserError: there is none, or only other replicas' of as many; or it cannot be read.
        """
        given = [saved] if isinstance(saved, Mapping) else saved
        for each in given if isinstance(given, Sequence) else [given]:
            if not isinstance(each, Mapping):
                what = f"this is not a saved state of edgc but {type(each).__name__}"
                raise UserError(what, where="edgc.fsdp", fix="load what state_dict() returned")
        every = {str(key): value for each in given for key, value in each.items()}
        mine = {key: value for key, value in every.items() if key.startswith(f"{self.part}.")}
        if not mine:
            what = f"the saved state has {', '.join(sorted(every)) or 'nothing'}, and this rank is {self.part}"
            fix = "give every rank its own state, or all of them; shard over as many ranks as it was saved with"
            raise UserError(what, where="edgc.fsdp", fix=fix)
        if self.key() not in mine and (others := mine.keys() & self.placeholders(self.replicas).keys()):
            what = f"the saved state is of {', '.join(sorted(others))}, and this rank is {self.key()}"
            raise UserError(what, where="edgc.fsdp", fix="save and load one state per rank")
        if self.key() in mine:
            return _read(self.key(), mine[self.key()])
        return [_read(key, each) for key, each in mine.items()]


def _read(key: str, packed: bytes) -> dict[str, Any]:
    try:
        # Of another rank's GPU it would else go there; whoever uses it moves it to its own.
        state: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        what = f"the saved state {key} {unreadable(error)}" if packed else f"the saved state {key} is empty"
        fix = "fill placeholders with dcp.load first, or use an older checkpoint"
        raise UserError(what, where="edgc.fsdp", fix=fix) from None
    return state
