"""The passes of :mod:`edgc.compressors.passes` as a GPU is to do them: the host waits for nothing and launches little.

A bucket of gradients is a few matrices of several shapes, each too small to keep a GPU busy for as long as it takes to
launch what is done with it. So everything that is done entry by entry is done with the matrices of all shapes at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgc.compressors.base import square_sums_on_gpu, within
from edgc.compressors.passes import TINY_SQ, Factors, Matrices, Members, Optionals, RowBlocks
from edgc.lazy import Tensor, torch


class Batched(RowBlocks):
    """Whole matrices, those of one shape in one product."""

    @staticmethod
    def square_sums(batches: Sequence[Tensor]) -> list[Tensor]:
        return square_sums_on_gpu(batches)

    def load(self, xs: Sequence[Matrices], gradients: Members, rights: Optionals, lefts: Optionals) -> None:
        for x, g in zip(xs, gradients, strict=True):
            x.bind(g)
            if not x.in_place:
                torch._foreach_copy_(list(x.m), list(x.gradients))
        for x, sums in zip(xs, square_sums_on_gpu([x.m for x in xs]), strict=True):
            x.gradient_sq = x.input_sq = sums
        owing = [x for x in xs if x.error is not None]
        if owing:
            errors = [error for x in owing if x.error is not None for error in x.error]
            torch._foreach_add_([m for x in owing for m in x.m], errors)
            for x, sums in zip(owing, square_sums_on_gpu([x.m for x in owing]), strict=True):
                x.input_sq = sums
        for x, right, left in zip(xs, rights, lefts, strict=True):
            if right is not None and left is not None:
                torch.bmm(x.m, right.mT, out=left)

    def right_factor(self, x: Matrices, left: Tensor, out: Tensor) -> None:
        torch.bmm(left.mT, x.m, out=out)

    def _store(self, x: Matrices, own: Factors, mean: Factors, error_sq: Tensor, finite: Tensor) -> Tensor:
        if x.error is not None:
            x.m.baddbmm_(*own, alpha=-1)
        left, right = mean
        narrow = x.gradients[0].dtype != torch.float32
        if narrow:
            for i, gradient in enumerate(x.gradients):
                result = left[i] @ right[i]
                x.m[i].add_(result)
                gradient.copy_(within(result, gradient.dtype))
                x.m[i].sub_(gradient)
        if x.error is not None:
            kept = x.next_error
            assert kept is not None
            # Another type than fp32 comes through fp32 as it was.
            out = kept if kept.dtype == torch.float32 else x.m
            torch.where(finite, x.m, x.error, out=out)
            if out is not kept:
                kept.copy_(out)
        if not narrow:
            torch.bmm(left, right, out=x.m)
            if not x.in_place:
                torch._foreach_copy_(list(x.gradients), list(x.m))
        return error_sq

    @staticmethod
    def keep(means: Sequence[Tensor], factors: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        counts = [len(mean) for mean in means]
        norms = torch.cat(square_sums_on_gpu(means))
        # The exponents of norms that are not finite or too small do not matter.
        scales = torch.exp2(-norms.log2().mul(0.5).ceil()).float()[:, None, None]
        replaced = (norms > TINY_SQ).logical_and_(finite)
        for mean, factor, scale, good in zip(
            means, factors, scales.split(counts), replaced[:, None, None].split(counts), strict=True
        ):
            torch.where(good, mean * scale, factor, out=factor)
        return list(replaced.split(counts))
