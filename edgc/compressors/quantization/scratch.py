"""Memory for the blocks that a quantiser has in work, shared by all quantisers that cannot be at work together."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, fields
from typing import Any

from edgc.lazy import Tensor, torch


class _Own(threading.local):
    """What the current thread has shared; it goes with its last user."""

    def __init__(self) -> None:
        self.scratch: weakref.WeakValueDictionary[tuple[Any, ...], Scratch] = weakref.WeakValueDictionary()


_own = _Own()


@dataclass(eq=False)
class Scratch:
    """Buffers for the blocks in work; the first axis counts blocks, or groups of them where it says so."""

    padded: Tensor
    magnitude: Tensor
    levels: Tensor
    folded: Tensor  # groups
    rest: Tensor  # groups
    digit: Tensor  # groups
    spoiled: Tensor  # groups
    step: Tensor
    inverse: Tensor
    error: Tensor
    least: Tensor
    factor: Tensor
    broken: Tensor
    better: Tensor
    ones: Tensor  # entries of a block
    blocks: int = field(init=False)
    cuts: dict[int, Scratch] = field(init=False, default_factory=dict)  # made so far, by their blocks

    def __post_init__(self) -> None:
        self.blocks = len(self.step)

    @classmethod
    def shared(cls, groups: int, per_word: int, size: int, word: torch.dtype, device: torch.device) -> Scratch:
        """The one scratch of this size, device and thread, on a GPU of its current stream too.

        Two threads, or two streams, may be at work at the same time. Within one, reductions take turns, but only
        where they wait for a collective: whoever uses the scratch is done with it, and with what is in it, before.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        key = (groups, per_word, size, word, device, stream)
        scratch = _own.scratch.get(key)
        if scratch is None:
            scratch = _own.scratch[key] = cls.new(groups, per_word, size, word, device)
        return scratch

    @classmethod
    def new(cls, groups: int, per_word: int, size: int, word: torch.dtype, device: torch.device) -> Scratch:
        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        blocks = groups * per_word
        return cls(
            **{name: buffer(blocks, size) for name in ("padded", "magnitude", "levels")},
            folded=buffer(groups, size),
            **{name: buffer(groups, size, dtype=word) for name in ("rest", "digit")},
            **{name: buffer(blocks) for name in ("step", "inverse", "error", "least", "factor", "broken")},
            better=buffer(blocks, dtype=torch.bool),
            spoiled=buffer(groups),
            ones=buffer(size).fill_(1),
        )

    def cut(self, blocks: int) -> Scratch:
        """The part of it for at most so many blocks, whole groups of them."""
        if blocks >= self.blocks:
            return self
        if blocks not in self.cuts:
            groups = blocks * len(self.folded) // self.blocks
            lengths = dict.fromkeys(("folded", "rest", "digit", "spoiled"), groups) | {"ones": len(self.ones)}
            names = [f.name for f in fields(self) if f.init]
            self.cuts[blocks] = Scratch(**{name: getattr(self, name)[: lengths.get(name, blocks)] for name in names})
        return self.cuts[blocks]
