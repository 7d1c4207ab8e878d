"""FSDP2 over all ranks: its reduce-scatter in few bits, with error feedback.

Matrices with enough entries are quantised; vectors and small matrices go as they are, in a message of their own at the
same time, and take along what other settings have left of them. Rank w has the gradient G_w of all parameters and an
error E_w of the same size, in fp32 (which is what it costs). Of each shard, which one rank owns::

    M_w = G_w + E_w   is quantised and sent to the owner, who takes its own as it is
    R = mean_w(what arrived), in the gradients' type ;  E_w = what of M_w did not arrive ; the owner's: + W (mean - R)

so that for every entry R + mean_w(E_w after) = mean_w(G_w + E_w before). Unlike an all-reduce in few bits the mean is
not rounded once more. Low rank does not go here: PowerSGD all-reduces two factors of whole matrices, of which every
rank then has the product, and a reduce-scatter is asked for one block of rows at half the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgc.checkpoints.saved_state import compare_settings
from edgc.checks import need
from edgc.compressors import Channel, Statistics
from edgc.compressors.base import compressible, finite, seeded, square_sums, within
from edgc.compressors.dense import NoCompression
from edgc.compressors.ef21 import Estimates
from edgc.compressors.entrywise.quantize import Quantised, rotate
from edgc.config import EDGCConfig
from edgc.engine import Iteration
from edgc.errors import UserError
from edgc.fsdp.handle import Handle
from edgc.fsdp.layout import Layout
from edgc.fsdp.units import WHERE, Part, Unit
from edgc.runtime.device import host_decides, own_modes


@dataclass(frozen=True)
class Columns:
    """Columns of a parameter in a unit's flat buffer and in the buffer that is quantised, or (``lossy`` False) sent as
    it is; both [W, entries], with a row for every owner."""

    part: Part
    lossy: bool
    first: int

    @property
    def place(self) -> slice:
        return slice(self.first, self.first + self.part.entries)


class ScatterEngine:
    """Counterpart of :class:`~edgc.engine.Engine` for reduce-scatters: of one rank, without ranks to decide.

    Args:
        config: of a method that quantises, or none.

    Attributes:
        errors: what was not sent, by parameter name, [W, entries of a shard] in fp32.
    """

    decision = None
    closes_at_once = False

    def __init__(self, config: EDGCConfig, group: dist.ProcessGroup) -> None:
        self.config, self.group, self.world, self.me = config, group, group.size(), group.rank()
        method = config.build()
        self.method = method if isinstance(method, Quantised) else None
        self.errors: dict[str, Tensor] = {}
        self.iteration, self.scale = 1, 1.0
        self.last: Iteration | None = None
        self._statistics, self._kept = Statistics(), dict[str, Tensor]()
        self._sent = set[str]()  # whose error went along in this iteration, all of it

    @property
    def skips(self) -> int | Tensor:
        return self._statistics.skipped

    def _columns(self, parts: Sequence[Part], bits: int) -> tuple[list[Columns], int, int]:
        """Where everything goes, and how many entries of a row are quantised and not."""
        columns, lossy, dense = [], 0, 0
        align = 1 if self.method is None else math.lcm(self.method.align, 32)
        for part in parts:
            size = part.entries
            if self.method is not None and compressible(part.whole, self.config.min_compression_elements, bits):
                columns.append(Columns(part, True, lossy))
                lossy += -(-size // align) * align
            else:
                columns.append(Columns(part, False, dense))
                dense += size
        return columns, lossy, dense

    @own_modes()
    def reduce(self, parts: Sequence[Part], output: Tensor, source: Tensor, weight: float) -> None:
        """``output`` becomes this rank's part of ``weight`` times the sum over ranks of ``source``, [W, entries]."""
        columns, lossy, dense = self._columns(parts, 8 * source.element_size())
        channel, source = Channel(self.group), source.view(self.world, -1)
        exact = source if not lossy else source.new_empty(self.world, dense)
        for each in columns:
            if each.lossy:
                continue
            if lossy:
                exact[:, each.place] = source[:, each.part.place]
            if each.part.name in self.errors:
                exact[:, each.place] += self._error(each.part.name, exact.device)
                self._sent.add(each.part.name)
        if exact.numel():
            channel.scatter_means([exact.view(-1)])
        work = torch.zeros(self.world, lossy, dtype=torch.float32, device=source.device)
        mean = self._exchange([each for each in columns if each.lossy], work, source, channel, weight)
        for each in columns:
            out = output[each.part.place]
            if not each.lossy:
                out.copy_(exact[self.me, each.place]).mul_(weight * self.world)
                continue
            result = mean[each.place]
            out.copy_(within(result.clone(), out.dtype))
            if self.method is not None and self.method.error_feedback:
                if out.dtype != torch.float32:
                    work[self.me, each.place] += (result - out) / weight
                self._kept[each.part.name] = work[:, each.place]
        own = self._statistics
        ok = finite([output], output.device)
        own.skipped = own.skipped + (int(not ok) if host_decides(ok.device) else (~ok).int())
        own.error_sq = own.error_sq + _square(work)
        own.bytes += channel.bytes
        own.dense_bytes += (self.world - 1) * source.nbytes // self.world

    def _exchange(
        self, columns: Sequence[Columns], work: Tensor, source: Tensor, channel: Channel, weight: float
    ) -> Tensor:
        """This rank's row of ``weight`` times the sum; ``work`` becomes what this rank did not get across."""
        method = self.method
        if method is None or not columns:
            channel.finish()
            return work[self.me]
        for each in columns:
            work[:, each.place] = source[:, each.part.place]
        self._statistics.gradient_sq = self._statistics.gradient_sq + _square(work)
        for each in columns:
            if each.part.name in self.errors:
                work[:, each.place] += self._error(each.part.name, work.device)
        self._statistics.input_sq = self._statistics.input_sq + _square(work)
        if method.hadamard:
            rotate(work.view(-1))
        quantiser, generator = method.quantiser, None
        if quantiser.stochastic:
            seed = seeded("scatter", method.seed, self.iteration, columns[0].part.name, self.me).initial_seed()
            generator = torch.Generator(work.device).manual_seed(seed)
        sent = work.new_empty(self.world, quantiser.bytes(work.shape[1]), dtype=torch.uint8)
        mean = work[self.me] * weight
        for rank, row in enumerate(work):
            if rank == self.me:
                row.zero_()
                sent[rank].zero_()
            else:
                quantiser.pack(row, sent[rank], residual=row, generator=generator)
        received = torch.empty_like(sent)
        channel.all_to_all(received, sent)
        channel.finish()
        for rank, message in enumerate(received):
            if rank != self.me:
                quantiser.unpack(message, mean, weight=weight, add=True)
        mean.masked_fill_(mean.isinf(), torch.nan)  # or it would be clamped to what is finite
        if method.hadamard:
            rotate(mean)
            rotate(work.view(-1))
        return mean

    def _error(self, name: str, device: torch.device) -> Tensor:
        error = self.errors[name] = self.errors[name].to(device)
        if error.is_cuda:  # a state may have been loaded in another stream
            error.record_stream(torch.cuda.current_stream(device))
        return error

    @own_modes()
    def end_iteration(self, *, skipped: bool) -> None:
        """Close the iteration; one that is given up leaves error feedback as it was."""
        if not skipped and self.method is not None:
            decay, reset = self.method.error_decay, self.method.error_reset_every
            for name, kept in self._kept.items():
                if decay:
                    last = self.errors.get(name)
                    torch.lerp(torch.zeros_like(kept) if last is None else last, kept, 1 - decay, out=kept)
                if reset and self.iteration % reset == 0:
                    kept.zero_()
            self.errors = {name: e for name, e in self.errors.items() if name not in self._sent} | self._kept
        if skipped:
            self._statistics.gradient_sq = self._statistics.input_sq = self._statistics.error_sq = 0.0
        self._statistics.unscale(self.scale)
        self.last = Iteration(self.iteration, None, self._statistics, skipped=skipped)
        self.iteration += 1
        self._statistics, self._kept, self._sent = Statistics(), {}, set()

    def rescale(self, scale: float) -> None:
        """Gradients come multiplied by ``scale`` from now on."""
        for error in self.errors.values():
            error.mul_(scale / self.scale)
        self.scale = scale

    def add_loss(self, loss: float | Tensor) -> None:
        """No method here asks for it."""

    def state_dict(self, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Error feedback in the shapes of whole parameters, so that it fits another number of ranks."""
        errors = {}
        for name, error in self.errors.items():
            shape = parts[name].whole
            errors[name] = error.reshape(-1, *shape[1:])[: shape[0]].clone()
        state = {"iteration": self.iteration, "scale": self.scale, "compressor": {"errors": errors}}
        return {"settings": self.config.to_dict(), **state}

    def load_state_dict(self, state: dict[str, Any], parts: Mapping[str, Part], *, changed_settings: bool) -> None:
        need(state, ("settings", "iteration", "scale", "compressor"), "engine")
        compare_settings(state["settings"], self.config, allowed=changed_settings)
        need(state["compressor"], ("errors",), "engine.compressor")
        self.iteration, self.scale = int(state["iteration"]), float(state["scale"])
        self.errors = {}
        keeps = self.method is not None and self.method.error_feedback
        for name, whole in state["compressor"]["errors"].items() if keeps else ():
            rows = self.world * parts[name].padded[0]
            padded = whole.new_zeros(rows, *whole.shape[1:])
            padded[: len(whole)] = whole
            self.errors[name] = padded.view(self.world, -1)


class ReduceScatter:
    """A unit's reduce-scatter, as ``FSDPModule.set_custom_reduce_scatter`` takes one."""

    def __init__(self, handle: ScatterHandle, unit: Unit) -> None:
        self._scatter = partial(handle.scatter, unit)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any) -> None:
        self._scatter(output_tensor, input_tensor, op)


class ScatterHandle(Handle):
    """Handle of a model that is sharded over all ranks."""

    engine: ScatterEngine

    def __init__(
        self, config: EDGCConfig, model: nn.Module, units: Sequence[Unit], layout: Layout, scaler: Any
    ) -> None:
        super().__init__(ScatterEngine(config, layout.shards), model, units, layout, scaler)

    def start(self) -> None:
        for unit in self._units:
            unit.set_reduce_scatter(ReduceScatter(self, unit))

    def _let_go(self, unit: Unit) -> None:
        unit.set_reduce_scatter(None)

    def scatter(self, unit: Unit, output: Tensor, source: Tensor, op: Any) -> None:
        """Reduce-scatter a unit's gradients on torch's stream for that."""
        self._settle()  # what it changes is read below
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._begin(unit)
        world = self.engine.world
        weight = 1 / world if op == dist.ReduceOp.AVG else 1.0
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # torch multiplies beforehand, by a number of the user's
            weight = 1 / (unit.divides_by or 1)
        self.engine.reduce(unit.check(source, world), output, source, weight)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def _parts(self) -> dict[str, Part]:
        return {part.name: part for unit in self._units for part in unit.all_parts}

    def _engine_state(self) -> dict[str, Any]:
        return self.engine.state_dict(self._parts)

    def _load_engine(self, state: dict[str, Any], changed_settings: bool) -> None:
        self.engine.load_state_dict(state, self._parts, changed_settings=changed_settings)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: part.whole for name, part in self._parts.items()}


def refuse_method(config: EDGCConfig, units: Sequence[Unit]) -> None:
    """Refuse what no reduce-scatter can be made of, and what is not measured over one.

    Raises:
        UserError: naming the method or setting and what to write instead.
    """
    method = config.build()
    if isinstance(method, Estimates):
        what = "ef21 keeps the mean on every rank, and a model that is sharded over all ranks has parts of it"
        raise UserError(what, where=WHERE, fix="set ef21: false")
    if not isinstance(method, (Quantised, NoCompression)):
        why = "all-reduces factors of whole matrices, and a" if method.has_rank else "is made for all-reduces; a"
        what = f"method {config.method} {why} model that is sharded over all ranks is reduce-scattered"
        fix = "shard over a 2-D mesh, replicas by shards, to compress between replicas; or set method: quantize"
        raise UserError(what, where=WHERE, fix=fix)
    for key in ("cost_gate", "record_full_entropy"):
        if getattr(config, key, False):
            what = f"{key} = True cannot be used with a model that is sharded over all ranks"
            raise UserError(what, where=WHERE, fix=f"it is not measured over a reduce-scatter; set {key}: false")
    for unit in units:
        if not unit.by_rows:
            what = f"the unit of {unit.name} is sharded along another dimension than the first"
            raise UserError(what, where=WHERE, fix="leave shard_placement_fn out")


def _square(tensor: Tensor) -> float | Tensor:
    """The squared norm; on a GPU a tensor, so that nobody waits for it."""
    if not tensor.numel():
        return 0.0
    total = square_sums([tensor.view(1, 1, -1)])[0][0]
    return float(total) if host_decides(tensor.device) else total
