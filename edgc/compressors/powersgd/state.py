"""State of PowerSGD from step to step: error feedback, and the factor that its power iteration begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgc.checks import need
from edgc.compressors.base import Gradient, clones, seeded, square_sums
from edgc.compressors.powersgd import LowRankConfig
from edgc.compressors.powersgd.passes import RIGHT, TINY_SQ, Group, batch_view
from edgc.errors import UserError

_ROUNDS, _OVERSAMPLING = 3, 8  # of the power iteration that renews a warm start
# Entries of a matrix that is copied, while it is reduced, to lie beside others of its shape: launching what is done
# with it alone takes longer. Not measured: what an H200 copies while its host launches a dozen operations.
_COPIED = 1 << 22
_ERROR_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_factor(seed: int, draw: int, name: str, length: int, rank: int) -> Tensor:
    """Orthonormal columns, length x rank, that depend on the arguments alone: the same on every worker."""
    generator = seeded(seed, draw, name)
    return torch.linalg.qr(torch.randn(length, rank, generator=generator, dtype=torch.float32, device="cpu")).Q


def cut(factor: Tensor, rank: int) -> Tensor:
    """The leading directions of a factor, length x r, by energy.

    The left singular vectors of Q are the right singular vectors of the last approximation P^ Q^T.
    """
    return torch.linalg.svd(factor, full_matrices=False).U[:, :rank]


def extend(factor: Tensor, fresh: Tensor) -> Tensor:
    """``factor`` with the columns of ``fresh`` appended, made orthonormal and orthogonal to it."""
    basis, fresh = torch.linalg.qr(factor).Q, fresh.to(factor.device)
    # Twice is enough: projecting once leaves rounding of the size of eps times the condition number.
    for _ in range(2):
        fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh)).Q
    return torch.cat([factor, fresh], dim=1)


def of_rank(factor: Tensor | None, rank: int, fresh: Callable[[int], Tensor]) -> Tensor:
    """``factor`` cut to ``rank`` columns, or extended by as many ``fresh`` ones as are missing; None has none yet."""
    missing = rank - (0 if factor is None else factor.shape[1])
    if missing > 0:
        return fresh(missing) if factor is None else extend(factor, fresh(missing))
    assert factor is not None
    return factor if missing == 0 else cut(factor, rank)


def leading(matrix: Tensor, rank: int, start: Tensor) -> Tensor:
    """The leading right singular vectors of a matrix m x n, n x r, nearly, and of a norm of one together: as long as
    their singular values have it, by which :func:`cut` knows them. Block power iteration with more columns than r, from
    ``start``, n x q (Halko et al., SIAM Review 2011); on a GPU the host may wait."""
    basis = start
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrix.mT @ torch.linalg.qr(matrix @ basis).Q).Q
    left = torch.linalg.qr(matrix @ basis).Q
    _, values, vectors = torch.linalg.svd(left.mT @ matrix, full_matrices=False)
    return vectors[:rank].mT * (values[:rank] / values[:rank].norm().clamp_min(torch.finfo(torch.float32).tiny))


class State:
    """Error feedback and warm start of one worker, by parameter name.

    While a workspace is in use the tensors are views into it.

    Attributes:
        error_dtype: of E; None for no error feedback.
        errors: E, m x n.
        draws: how often random columns were drawn.
        since: compressed reductions since the warm start was renewed, where it ever is.
    """

    def __init__(self, config: LowRankConfig) -> None:
        self.error_dtype = _ERROR_DTYPES[config.error_dtype] if config.error_feedback else None
        self.seed, self.one_sided = config.seed, config.one_sided
        self.errors: dict[str, Tensor] = {}
        self.draws: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self._factors: dict[str, Tensor] = {}
        self._sides: dict[str, int] = {}
        self._turning: dict[str, tuple[Group, int]] = {}  # one-sided: groups in use, whose side changes

    @property
    def factors(self) -> dict[str, Tensor]:
        """Q, n x r (one-sided: or P, m x r), with a norm of about one."""
        self._look()
        return self._factors

    @property
    def sides(self) -> dict[str, int]:
        """Side of each factor, if one-sided."""
        self._look()
        return self._sides

    def _look(self) -> None:
        """Refer to the factors of the sides that are next. On a GPU the host may wait here, so a step does not ask."""
        for name, (group, i) in self._turning.items():
            self._refer(name, group, i)
            self._sides[name] = group.side

    def _refer(self, name: str, group: Group, i: int) -> None:
        factor = group.factor(group.side)[i]
        self._factors[name] = factor.mT if group.side == RIGHT else factor

    def release(self, names: Iterable[str]) -> None:
        """Groups with these names are used no more."""
        self._look()
        for name in names:
            self._turning.pop(name, None)

    def groups(self, gradients: Sequence[Gradient], rank: int, *, batched: bool) -> list[Group]:
        """Gradients ordered by shape, with their state; ``batched`` puts neighbours of one shape and side together if
        they are one tensor, or small enough to be copied.

        Raises:
            UserError: the state is of matrices of other shapes.
        """
        members: list[list[Gradient]] = []
        sides = self.sides
        for gradient in sorted(gradients, key=lambda g: tuple(g.tensor.shape)):
            last = members[-1] if members and batched else []
            if (
                last
                and last[0].tensor.shape == gradient.tensor.shape
                and sides.get(last[0].name, RIGHT) == sides.get(gradient.name, RIGHT)
                and last[0].tensor.dtype == gradient.tensor.dtype
                and (
                    gradient.tensor.numel() <= _COPIED or batch_view([g.tensor for g in [*last, gradient]]) is not None
                )
            ):
                last.append(gradient)
            else:
                members.append([gradient])
        return [self._group(group, rank, sides.get(group[0].name, RIGHT)) for group in members]

    def _group(self, members: Sequence[Gradient], rank: int, side: int) -> Group:
        """Matrices of one shape with their state, in memory of their own or taken over."""
        rows, columns = members[0].tensor.shape
        rank, device, count = min(rank, rows, columns), members[0].tensor.device, len(members)
        error = None
        if self.error_dtype is not None:
            last = [self.errors.get(gradient.name) for gradient in members]
            for gradient, old in zip(members, last, strict=True):
                if old is not None and old.shape != gradient.tensor.shape:
                    what = f"error feedback of {gradient.name} is {tuple(old.shape)}, its gradient {(rows, columns)}"
                    raise UserError(what, fix="load the compressor's state of this very model")
            if count == 1 and last[0] is not None and last[0].device == device:
                error = last[0][None]
            else:
                error = torch.zeros(count, rows, columns, dtype=self.error_dtype, device=device)
                for gradient, new, old in zip(members, error, last, strict=True):
                    if old is not None:
                        new.copy_(old)
                        # Also where the step is given up: a loss scale that changes then has to reach this memory.
                        self.errors[gradient.name] = new
        right = torch.empty(count, rank, columns, dtype=torch.float32, device=device)
        spare = None if error is None else torch.empty_like(error)
        left = torch.empty(count, rows, rank, dtype=torch.float32, device=device) if self.one_sided else None
        group = Group([gradient.name for gradient in members], (rows, columns), rank, error, spare, right, left, side)
        self._begin(group)
        return group

    def _begin(self, group: Group) -> None:
        """The factors to begin with: the warm start, cut or extended to the rank, or random columns."""
        length, rank, factors = group.shape[group.side], group.rank, self.factors
        for name, factor in zip(group.names, group.factor(group.side), strict=True):
            q, draw = factors.get(name), self.draws.get(name, 0) + 1
            if q is None or q.shape[1] < rank:
                group.drawn.add(name)
            q = of_rank(q, rank, partial(random_factor, self.seed, draw, name, length))
            if q.shape[0] != length:
                what = f"the warm start of {name} is {tuple(q.shape)}, but should have {length} rows"
                raise UserError(what, fix="load the compressor's state of this very model")
            (factor.mT if group.side == RIGHT else factor).copy_(q)

    def commit(self, groups: Sequence[Group]) -> None:
        """Refer to the memory of groups whose first reduction has come to its end."""
        for group in groups:
            for i, name in enumerate(group.names):
                if name in group.drawn:
                    self.draws[name] = self.draws.get(name, 0) + 1
                if group.error is not None:
                    self.errors[name] = group.error[i]
                if self.one_sided:
                    self._turning[name] = group, i
                else:
                    self._refer(name, group, i)
            group.drawn.clear()

    def count(self, groups: Iterable[Group]) -> None:
        """Note a compressed reduction; on a GPU one that was given up counts, too."""
        for name in (name for group in groups for name in group.names):
            self.since[name] = self.since.get(name, 0) + 1

    def leading(self, means: Iterable[Gradient], rank: int, ok: Tensor) -> dict[str, Tensor]:
        """Warm starts from exact means by name; the last one where the mean is zero, or not ``ok``;
        random ones there, one-sided, where that was of the other side."""
        found = {}
        for gradient in means:
            name, matrix = gradient.name, torch.where(ok, gradient.tensor.float(), 0)
            columns, most = min(rank, *matrix.shape), min(rank + _OVERSAMPLING, *matrix.shape)
            fresh = partial(random_factor, self.seed, 0, name, matrix.shape[1])
            new = leading(matrix, columns, fresh(most).to(matrix.device))
            known = self.factors.get(name) if self.sides.get(name, RIGHT) == RIGHT else None  # else it has m rows
            last = of_rank(known, columns, fresh).to(matrix.device)
            found[name] = torch.where(square_sums([matrix[None]])[0].to(matrix.device) > TINY_SQ, new, last)
        return found

    def renew(self, names: Iterable[str], factors: dict[str, Tensor]) -> None:
        """Begin with ``factors`` after an exact reduction of ``names``."""
        for name in names:
            self.since.pop(name, None)
        self._factors |= factors
        self._sides |= dict.fromkeys(factors, RIGHT) if self.one_sided else {}

    def to_dict(self) -> dict[str, Any]:
        """A copy of everything."""
        return {
            "errors": clones(self.errors),
            "factors": clones(self.factors),
            "sides": dict(self.sides),
            "draws": dict(self.draws),
            "since": dict(self.since),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Copy everything from :meth:`to_dict`; workspaces made before are no longer of use.

        Without error feedback no errors are taken over, and factors only of as many sides as this state has.

        Raises:
            UserError: the state is of another method.
        """
        need(state, ("errors", "factors", "sides", "draws"), "compressor")
        errors = {} if self.error_dtype is None else state["errors"]
        self.errors.clear()
        self.errors.update({name: tensor.to(self.error_dtype, copy=True) for name, tensor in errors.items()})
        both = self.one_sided or not any(side != RIGHT for side in state["sides"].values())
        self._factors = clones(state["factors"]) if both else {}
        self._sides = dict(state["sides"]) if self.one_sided else {}
        self._turning = {}
        self.draws, self.since = dict(state["draws"]), dict(state.get("since", {}))
