"""Parameters on each pipeline stage and tensor-parallel shard of a Megatron GPT, by formula.

Everything is integer arithmetic: no torch, no allocation, so the 12.1 B model takes milliseconds. The names,
the order and the local shapes are those of Megatron-Core's ``GPTModel`` with the local layer spec and learned
positions; the tests compare them with models that Megatron itself builds. Source of the method: ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.spec.matrix import load_study, study_path
from experiments.spec.settings import RunConfig, layer_matrices, padded_vocabulary, resolve

FP32_BYTES = 4
MIN_COMPRESSION_ELEMENTS = EDGCConfig().min_compression_elements


@dataclass(frozen=True)
class GPTShape:
    """Size of a GPT and how it is split. Raises ``UserError`` where Megatron could not split it evenly.

    Attributes:
        layers, hidden, heads, ffn_hidden, sequence_length: of the model.
        vocab_size: entries of the tokenizer, before padding.
        tensor, pipeline, data: parallel sizes.
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
    tied: bool = True
    where: str | None = None

    def __post_init__(self) -> None:
        if not self.ffn_hidden:
            object.__setattr__(self, "ffn_hidden", 4 * self.hidden)
        for key, value, divisor_key, divisor in (
            ("model.hidden", self.hidden, "model.heads", self.heads),
            ("model.heads", self.heads, "parallel.tensor", self.tensor),
            ("model.ffn_hidden", self.ffn_hidden, "parallel.tensor", self.tensor),
            ("model.layers", self.layers, "parallel.pipeline", self.pipeline),
        ):
            if value % divisor:
                message = f"{key} = {value} is not divisible by {divisor_key} = {divisor}"
                fix = f"change {key} or {divisor_key} so that it divides evenly"
                raise UserError(message, where=self.where, fix=fix)

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def padded_vocab(self) -> int:
        return padded_vocabulary(self.vocab_size, self.tensor)

    def _parameters(self, embedding_rows: int) -> int:
        h, f = self.hidden, self.ffn_hidden
        layer = 4 * h * h + 2 * h * f + (3 * h + h + f + h) + 4 * h  # matrices, biases, two layernorms
        return self.layers * layer + (embedding_rows + self.sequence_length + 2) * h

    @property
    def unique_parameters(self) -> int:
        """Parameters of the model on one device: vocabulary not padded, tied embedding counted once."""
        return self._parameters(self.vocab_size * (1 if self.tied else 2))

    @property
    def allocated_parameters(self) -> int:
        """Parameters of one replica as allocated, with vocabulary padding and the last stage's embedding copy.

        Whole tensors, so tensors that tensor parallelism replicates count once.
        """
        return self._parameters(self.padded_vocab * (1 if self.tied and self.pipeline == 1 else 2))


class ParameterTensor(NamedTuple):
    """Parameter on one rank, with the local shape of its shard."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StageShard:
    """Parameters of one pipeline stage on one tensor-parallel process; all these processes look alike.

    A payload is what one replica hands to the data-parallel collectives in a step: the bytes of the reductions, in the
    order in which they depend on each other.
    """

    stage: int
    layer_range: range
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
        return f"{self.layer_range[0]}-{self.layer_range[-1]}"

    @cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Local (rows, columns) of what may be compressed: 2-D tensors, not smaller than the threshold."""
        large = (t.shape for t in self.tensors if len(t.shape) == 2 and t.numel >= MIN_COMPRESSION_ELEMENTS)
        return tuple((rows, columns) for rows, columns in large)

    @cached_property
    def shapes(self) -> Counter[tuple[int, int]]:
        """How many :attr:`matrices` there are of every shape."""
        return Counter(self.matrices)

    @cached_property
    def dense_rest(self) -> int:
        """Entries that no method compresses: layernorms, biases and matrices below the threshold."""
        return self.parameters - sum(m * n for m, n in self.matrices)

    def dense_payload(self, bytes_per_entry: int = FP32_BYTES) -> tuple[int, ...]:
        """One reduction of every gradient entry."""
        return (bytes_per_entry * self.parameters,)

    def factored(self, rank: int, *, always: bool = False) -> list[tuple[int, int, int, int]]:
        """(Rows, columns, rank, number) of the matrices that PowerSGD factors; the rank is at most the smaller side.

        A matrix whose factors are not smaller than itself is sent dense, unless ``always``.
        """
        used = ((m, n, min(rank, m, n), count) for (m, n), count in self.shapes.items())
        return [(m, n, r, count) for m, n, r, count in used if always or r * (m + n) < m * n]

    def powersgd_payload(self, rank: int, *, always: bool = False, factor_bytes: int = FP32_BYTES) -> tuple[int, ...]:
        """First P (m x r) together with everything dense in fp32, then Q (n x r); scales of int8 factors not counted.

        Source: PowerSGD, arXiv 1905.13727, algorithm 1.
        """
        used = self.factored(rank, always=always)
        dense = self.parameters - sum(count * m * n for m, n, _, count in used)
        first = FP32_BYTES * dense + factor_bytes * sum(count * m * r for m, _, r, count in used)
        second = factor_bytes * sum(count * n * r for _, n, r, count in used)
        return (first, second) if second else (first,)


def build(shape: GPTShape) -> tuple[StageShard, ...]:
    """One shard of every pipeline stage, first stage first."""
    return tuple(_stage(shape, stage) for stage in range(shape.pipeline))


def _stage(shape: GPTShape, stage: int) -> StageShard:
    layers, h = shape.layers // shape.pipeline, shape.hidden
    vocabulary = (shape.padded_vocab // shape.tensor, h)
    tensors: list[ParameterTensor] = []
    if stage == 0:
        tensors.append(ParameterTensor("embedding.word_embeddings.weight", vocabulary))
        # Replicated on every tensor-parallel rank.
        tensors.append(ParameterTensor("embedding.position_embeddings.weight", (shape.sequence_length, h)))
    for layer in range(layers):
        tensors.extend(_layer(shape, f"decoder.layers.{layer}."))
    if stage == shape.pipeline - 1:
        tensors.extend(_with_bias("decoder.final_layernorm", (h,)))
        if not shape.tied or shape.pipeline > 1:
            tensors.append(ParameterTensor("output_layer.weight", vocabulary))
    return StageShard(stage, range(stage * layers, (stage + 1) * layers), tuple(tensors))


def _layer(shape: GPTShape, prefix: str) -> Iterator[ParameterTensor]:
    """One transformer layer in Megatron's order; column-parallel weights split rows, row-parallel columns."""
    norm, t, whole = (shape.hidden,), shape.tensor, layer_matrices(shape.hidden, shape.ffn_hidden)
    for name, local in (
        ("input_layernorm", norm),
        ("self_attention.linear_proj", (whole.projection[0], whole.projection[1] // t)),
        ("self_attention.linear_qkv", (whole.qkv[0] // t, whole.qkv[1])),
        ("pre_mlp_layernorm", norm),
        ("mlp.linear_fc1", (whole.fc1[0] // t, whole.fc1[1])),
        ("mlp.linear_fc2", (whole.fc2[0], whole.fc2[1] // t)),
    ):
        yield from _with_bias(prefix + name, local)


def _with_bias(name: str, local: tuple[int, ...]) -> Iterator[ParameterTensor]:
    yield ParameterTensor(f"{name}.weight", local)
    yield ParameterTensor(f"{name}.bias", local[:1])


def shape_of(run: RunConfig) -> GPTShape:
    """Shape of the model of a run and how it is split.

    Raises:
        UserError: another model than a dense GPT, no vocabulary, or another schedule than plain 1F1B.
    """
    model, parallel, where = run.model, run.parallel, str(study_path(run.study))
    if model.architecture != "gpt" or model.experts is not None:
        raise UserError("only dense GPTs have a placement", where=where, fix="use a study with model.architecture: gpt")
    if parallel.virtual_pipeline is not None:
        fix = "remove parallel.virtual_pipeline"
        raise UserError("only the plain 1F1B schedule has a placement", where=where, fix=fix)
    if run.data.vocab_size is None:
        raise UserError("data.vocab_size is not set", where=where, fix="set it, e.g. 50257 for the GPT-2 tokenizer")
    return GPTShape(
        layers=model.layers, hidden=model.hidden, heads=model.heads, ffn_hidden=model.ffn_hidden or 0,
        sequence_length=model.sequence_length, vocab_size=run.data.vocab_size, tensor=parallel.tensor,
        pipeline=parallel.pipeline, data=parallel.data, tied=model.tie_embeddings, where=where,
    )  # fmt: skip


def study_run(study: str) -> RunConfig:
    """Uncompressed run of a paper-scale study: its ``base`` alone, which must be complete."""
    identity = {"study": study, "scale": "paper", "variant": "none", "label": "uncompressed", "seed": 1}
    return resolve({**load_study(study).base, **identity}, study_path(study))


def groups_sharing_a_node(shape: GPTShape, nodes: int, gpus_per_node: int) -> int:
    """Largest number of data-parallel groups that use one node's link at the same time: one for each of its GPUs.

    Raises:
        UserError: if the cluster has not as many GPUs as the job, or if a tensor-parallel group or two
            members of a data-parallel group would not fit the placement that the estimate assumes.
    """
    if nodes * gpus_per_node != shape.world:
        message = f"nodes * gpus_per_node = {nodes * gpus_per_node}, but tensor * pipeline * data = {shape.world}"
        raise UserError(message, where=shape.where, fix="change the cluster or the parallel sizes")
    # Megatron's order: tensor fastest, then data, then pipeline.
    if gpus_per_node % shape.tensor or (shape.data > 1 and gpus_per_node > shape.tensor):
        message = f"gpus_per_node = {gpus_per_node} does not hold one tensor-parallel group of {shape.tensor}"
        fix = "use gpus_per_node = parallel.tensor: the estimate wants replicas on different nodes"
        raise UserError(message, where=shape.where, fix=fix)
    return gpus_per_node
