"""Which parameter lives on which pipeline stage and tensor-parallel shard of a Megatron GPT, by formula.

Everything is integer arithmetic: no torch, no allocation, so the 12.1 B model takes milliseconds. The names,
the order and the local shapes are those of Megatron-Core's ``GPTModel`` with the local layer spec and learned
positions; the tests compare them with models that Megatron itself builds. Source of the method: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.spec.matrix import load_study, study_path
from experiments.spec.settings import ModelConfig, ParallelConfig, RunConfig, padded_vocabulary, resolve
from experiments.spec.transformer import layer_matrices

FP32_BYTES = 4
MIN_COMPRESSION_ELEMENTS = EDGCConfig().min_compression_elements


@dataclass(frozen=True)
class GPTShape:
    """Size of a GPT and how it is split. Raises ``UserError`` where Megatron could not split it evenly.

    Attributes:
        layers, hidden, heads, ffn_hidden, sequence_length: of the model.
        vocab_size: entries of the tokenizer, before padding.
        tensor, pipeline, data: parallel sizes; ``virtual`` model chunks per stage (interleaved 1F1B).
        tied: the output projection is the word embedding; with pipeline > 1 the last stage holds a copy.
        where: file named in error messages.
    """

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocab_size: int
    ffn_hidden: int = 0
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1
    tied: bool = True
    where: str | None = None

    def __post_init__(self) -> None:
        if not self.ffn_hidden:
            object.__setattr__(self, "ffn_hidden", 4 * self.hidden)
        for key in ("layers", "hidden", "heads", "sequence_length", "vocab_size", "ffn_hidden",
                    "tensor", "pipeline", "data", "virtual"):  # fmt: skip
            if getattr(self, key) < 1:
                what = f"{key} = {getattr(self, key)} is not valid"
                raise UserError(what, where=self.where, fix="use 1 or more")
        self._divides("model.hidden", self.hidden, "model.heads", self.heads)
        for key, value in (("model.heads", self.heads), ("model.ffn_hidden", self.ffn_hidden)):
            self._divides(key, value, "parallel.tensor", self.tensor)
        chunks = "parallel.pipeline" + (" * parallel.virtual_pipeline" if self.virtual > 1 else "")
        self._divides("model.layers", self.layers, chunks, self.pipeline * self.virtual)

    def _divides(self, key: str, value: int, by_key: str, by: int) -> None:
        if value % by:
            what = f"{key} = {value} is not divisible by {by_key} = {by}"
            fix = f"change {key} or {by_key} so that it divides evenly"
            raise UserError(what, where=self.where, fix=fix)

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def padded_vocab(self) -> int:
        return padded_vocabulary(self.vocab_size, self.tensor)

    @property
    def unique_parameters(self) -> int:
        """Parameters of the model on one device: vocabulary not padded, tied embedding counted once."""
        h, f = self.hidden, self.ffn_hidden
        layer = 4 * h * h + 2 * h * f + (3 * h + h + f + h) + 4 * h  # matrices, biases, two layernorms
        embeddings = self.vocab_size * h * (1 if self.tied else 2) + self.sequence_length * h
        return self.layers * layer + embeddings + 2 * h


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter on one rank: ``shape`` is the local shard, ``full_shape`` the whole tensor."""

    name: str
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StageShard:
    """The parameters of one pipeline stage on one tensor-parallel process; all these processes look alike.

    A payload is what one replica hands to the data-parallel collectives in a step: the bytes of the reductions, in the
    order in which they depend on each other.
    """

    stage: int
    layer_ranges: tuple[tuple[int, int], ...]  # half-open, one per model chunk
    tensors: tuple[ParameterTensor, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors)

    @cached_property
    def active_weights(self) -> int:
        """Entries of the matrices that a token is multiplied with."""
        return sum(t.numel for t in self.tensors if len(t.shape) == 2 and "embedding" not in t.name)

    @property
    def layers(self) -> str:
        """Zero-based layer numbers, e.g. ``0-12``."""
        return " ".join(f"{first}-{end - 1}" for first, end in self.layer_ranges)

    @property
    def layer_count(self) -> int:
        return sum(end - first for first, end in self.layer_ranges)

    @cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Local (rows, columns) of what may be compressed: 2-D tensors, not smaller than the threshold."""
        large = (t.shape for t in self.tensors if len(t.shape) == 2 and t.numel >= MIN_COMPRESSION_ELEMENTS)
        return tuple((shape[0], shape[1]) for shape in large)

    @cached_property
    def dense_rest(self) -> int:
        """Entries that no method compresses: layernorms, biases and matrices below the threshold."""
        return self.parameters - sum(m * n for m, n in self.matrices)

    def dense_payload(self, bytes_per_entry: int = FP32_BYTES) -> tuple[int, ...]:
        """One reduction of every gradient entry."""
        return (bytes_per_entry * self.parameters,)

    def factored(self, rank: int, *, always: bool = False) -> tuple[tuple[int, int, int], ...]:
        """(rows, columns, rank) of the matrices that PowerSGD factors; the rank is at most the smaller side.

        A matrix whose factors are not smaller than itself is sent dense, unless ``always``.
        """
        if rank < 1:
            raise UserError(f"rank = {rank} is not valid", fix="use 1 or more")
        used = ((m, n, min(rank, m, n)) for m, n in self.matrices)
        return tuple((m, n, r) for m, n, r in used if always or r * (m + n) < m * n)

    def powersgd_payload(self, rank: int, *, always: bool = False, factor_bytes: int = FP32_BYTES) -> tuple[int, ...]:
        """First P (m x r) together with everything dense in fp32, then Q (n x r); scales of int8 factors not counted.

        Source: PowerSGD, arXiv 1905.13727, algorithm 1.
        """
        used = self.factored(rank, always=always)
        dense = self.parameters - sum(m * n for m, n, _ in used)
        first = FP32_BYTES * dense + factor_bytes * sum(m * r for m, _, r in used)
        second = factor_bytes * sum(n * r for _, n, r in used)
        return (first, second) if second else (first,)

    def memory(self, rank: int | None = None) -> dict[str, int]:
        """Bytes of fp32 training with Adam, without activations, which depend on the schedule; ``rank`` adds error
        feedback and the factors P and Q of PowerSGD."""
        dense, used = FP32_BYTES * self.parameters, self.factored(rank) if rank is not None else ()
        feedback = FP32_BYTES * sum(m * n for m, n, _ in used)
        factors = FP32_BYTES * sum((m + n) * r for m, n, r in used)
        kept = {"parameters": dense, "gradients": dense, "adam": 2 * dense}
        return kept | {"error_feedback": feedback, "factors": factors}


def _layer(shape: GPTShape, prefix: str) -> Iterator[ParameterTensor]:
    """One transformer layer in Megatron's order; column-parallel weights split rows, row-parallel columns."""
    h, whole = shape.hidden, layer_matrices(shape.hidden, shape.ffn_hidden)
    by_rows, by_columns = (shape.tensor, 1), (1, shape.tensor)
    yield from _with_bias(prefix + "input_layernorm", (h,), (h,))
    yield from _with_bias(prefix + "self_attention.linear_proj", _part(whole.projection, by_columns), whole.projection)
    yield from _with_bias(prefix + "self_attention.linear_qkv", _part(whole.qkv, by_rows), whole.qkv)
    yield from _with_bias(prefix + "pre_mlp_layernorm", (h,), (h,))
    yield from _with_bias(prefix + "mlp.linear_fc1", _part(whole.fc1, by_rows), whole.fc1)
    yield from _with_bias(prefix + "mlp.linear_fc2", _part(whole.fc2, by_columns), whole.fc2)


def _part(matrix: tuple[int, int], parts: tuple[int, int]) -> tuple[int, int]:
    return matrix[0] // parts[0], matrix[1] // parts[1]


def _with_bias(name: str, local: tuple[int, ...], full: tuple[int, ...]) -> Iterator[ParameterTensor]:
    yield ParameterTensor(f"{name}.weight", local, full)
    yield ParameterTensor(f"{name}.bias", local[:1], full[:1])


def _stage(shape: GPTShape, stage: int) -> StageShard:
    per_chunk = shape.layers // (shape.pipeline * shape.virtual)
    v, h = shape.padded_vocab, shape.hidden
    local_vocab = (v // shape.tensor, h)
    tensors: list[ParameterTensor] = []
    ranges: list[tuple[int, int]] = []
    for chunk in range(shape.virtual):
        prefix = f"chunk{chunk}." if shape.virtual > 1 else ""
        position = chunk * shape.pipeline + stage
        if position == 0:
            tensors.append(ParameterTensor(prefix + "embedding.word_embeddings.weight", local_vocab, (v, h)))
            positions = (shape.sequence_length, h)  # replicated on every tensor-parallel rank
            tensors.append(ParameterTensor(prefix + "embedding.position_embeddings.weight", positions, positions))
        for layer in range(per_chunk):
            tensors.extend(_layer(shape, f"{prefix}decoder.layers.{layer}."))
        ranges.append((position * per_chunk, (position + 1) * per_chunk))
        if position == shape.pipeline * shape.virtual - 1:
            tensors.extend(_with_bias(prefix + "decoder.final_layernorm", (h,), (h,)))
            if not shape.tied or shape.pipeline * shape.virtual > 1:
                tensors.append(ParameterTensor(prefix + "output_layer.weight", local_vocab, (v, h)))
    return StageShard(stage, tuple(ranges), tuple(tensors))


def build(shape: GPTShape) -> tuple[StageShard, ...]:
    """One shard of every pipeline stage, first stage first."""
    return tuple(_stage(shape, stage) for stage in range(shape.pipeline))


def allocated_parameters(shape: GPTShape) -> int:
    """Parameters of one replica as allocated, with vocabulary padding and the last stage's embedding copy.

    Whole tensors, so tensors that tensor parallelism replicates count once.
    """
    return sum(prod(t.full_shape) for stage in build(shape) for t in stage.tensors)


def from_settings(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int | None, where: str | None = None
) -> GPTShape:
    """The shape of a run from its ``model`` and ``parallel`` settings (``experiments.spec.settings``)."""
    if model.architecture != "gpt":
        what = f"model.architecture = {model.architecture!r} has no placement"
        raise UserError(what, where=where, fix="use a study with gpt")
    if vocab_size is None:
        raise UserError("data.vocab_size is not set", where=where, fix="set it, e.g. 50257 for the GPT-2 tokenizer")
    return GPTShape(
        layers=model.layers, hidden=model.hidden, heads=model.heads, ffn_hidden=model.ffn_hidden or 0,
        sequence_length=model.sequence_length, vocab_size=vocab_size, tensor=parallel.tensor,
        pipeline=parallel.pipeline, data=parallel.data, virtual=parallel.virtual_pipeline or 1,
        tied=model.tie_embeddings, where=where,
    )  # fmt: skip


def study_run(study: str) -> RunConfig:
    """The uncompressed run of a paper-scale study: its ``base`` alone, which must be complete."""
    path = study_path(study)
    identity = {"study": study, "scale": "paper", "variant": "none", "label": "uncompressed", "seed": 1}
    return resolve({**load_study(study).base, **identity}, path)


def study_shape(study: str) -> GPTShape:
    """The model of a paper-scale study and how it is split."""
    run = study_run(study)
    return from_settings(run.model, run.parallel, run.data.vocab_size, str(study_path(study)))
