"""Order of the gradients on every link of Megatron's pipeline schedules: plain counting.

Link i carries gradients from stage i + 1 to stage i; under an interleaved schedule the last link goes from stage 0 to
the last stage. A stage runs its backward steps in one order, the same on every stage, so over a link gradients come in
the order in which the receiver uses them, and "the last n transfers" means the same on both ends.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
    """Order of backward steps under 1F1B (``chunks`` None) or interleaved 1F1B.

    Args:
        stages: pipeline size P.
        chunks: model chunks a stage, V; None without interleaving.
        group: micro-batches that a chunk runs one after another (``microbatch_group_size_per_vp_stage``).
        extra_warmup: warm-up steps besides the usual (1 with ``overlap_moe_expert_parallel_comm``).
    """

    stages: int
    chunks: int | None = None
    group: int = 1
    extra_warmup: int = 0

    def steps(self, micro_batches: int) -> list[int]:
        """Model chunk of every backward step of an iteration, in order."""
        count = self.chunks or 1
        return [
            chunk
            for start in range(0, micro_batches, self.group if self.chunks else micro_batches)
            for chunk in reversed(range(count))
            for _ in range(start, min(start + self.group, micro_batches) if self.chunks else micro_batches)
        ]

    def warmup(self, stage: int, micro_batches: int) -> int:
        """Forward steps before the first backward step: as many backward steps are left for the cool-down."""
        later = self.stages - stage - 1
        if self.chunks is None:
            return min(later, micro_batches)
        steps = 2 * later + (self.chunks - 1) * self.group + self.extra_warmup
        return min(steps, micro_batches * self.chunks)

    def sent(self, stage: int, micro_batches: int) -> list[int]:
        """Model chunk of the sender of every gradient that ``stage`` sends in an iteration, in order."""
        if self.stages == 1:
            return []
        # The model's first chunk, the first one of stage 0, has nobody to send to.
        return [chunk for chunk in self.steps(micro_batches) if stage > 0 or chunk > 0]

    def cooldown(self, receiver: int, micro_batches: int) -> int:
        """Number of the gradients sent to ``receiver`` that it uses in its cool-down; they are the last ones."""
        steps = self.steps(micro_batches)
        last = steps[len(steps) - self.warmup(receiver, micro_batches) :]
        # The model's last chunk, on the last stage, starts from the loss.
        loss = (self.chunks or 1) - 1 if receiver == self.stages - 1 else None
        return sum(chunk != loss for chunk in last)
