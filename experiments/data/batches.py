"""Micro-batches for GPT and BERT, the same global batches for every layout of processes.

Sample ``k`` of a run is entry ``k`` of a permutation seeded by the run's seed; global batch ``i`` holds samples
``[i*G, (i+1)*G)``; data-parallel rank ``d`` of ``D`` takes the ``d``-th contiguous share of ``G/D`` samples and cuts it
into micro-batches. So neither the data-parallel degree nor the micro-batch size changes what a step learns from.

The blocks are Megatron's ``GPTDataset``: documents in shuffled order, concatenated, cut every ``sequence_length``
tokens. It is opened directly, not through ``BlendedMegatronDatasetBuilder``: the builder holds world-wide barriers that
every rank has to join, and Megatron writes its index files in place, where two runs that start together (or one that is
killed) would leave a half-written index behind. Here an index is built in a private folder and renamed.
"""

from __future__ import annotations

import collections
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from edgc.errors import UserError
from experiments.data.folder import INDEX_CACHE, DataInfo, check_config, check_whole, load_info
from experiments.data.tokenizer import END_OF_TEXT, MASK
from experiments.spec.settings import RunConfig

VALIDATION_SEED = 1234  # of the validation order and masks: one fixed set for every run, method and seed
MASKED_SHARE = 0.15  # BERT (arXiv 1810.04805, section 3.1): of the tokens, 80 % [MASK], 10 % random, 10 % kept
_INDEX_PATIENCE_SECONDS = 1800.0


class MicroBatch(TypedDict):
    """Tensors [micro_batch, sequence_length]; ``attention_mask`` is None for GPT (causal by the model).

    ``position_ids`` and ``attention_mask`` are shared between micro-batches: do not write to them.
    """

    tokens: torch.Tensor  # int64
    labels: torch.Tensor  # int64; GPT: the next token, BERT: the token before masking
    loss_mask: torch.Tensor  # float32
    position_ids: torch.Tensor  # int64
    attention_mask: torch.Tensor | None  # int64, ones: blocks hold no padding


class _Vocabulary:
    """The part of a tokenizer that Megatron's datasets ask for. No ``pad``: blocks are always full."""

    def __init__(self, info: DataInfo) -> None:
        self.vocab_size = info.vocab_size
        self.eod = info.special_tokens[END_OF_TEXT]
        self.mask = info.special_tokens[MASK]
        self.is_special = numpy.zeros(info.vocab_size, dtype=bool)
        self.is_special[list(info.special_tokens.values())] = True
        self.ordinary = numpy.flatnonzero(~self.is_special)
        self.unique_identifiers = collections.OrderedDict(fingerprint=info.fingerprint)


class MaskedDataset(GPTDataset):
    """BERT's masked-language-model samples over the same blocks of text.

    Megatron's ``BERTMaskedWordPieceDataset`` does not fit: it wants documents stored sentence by sentence and a
    word-piece vocabulary, and from a document stored as one item it would use only the first block. Masks depend on the
    seed and the sample's place in the run alone, so they differ between epochs and repeat between layouts.
    """

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """``tokens`` (masked), ``labels`` (original), ``loss_mask`` (1 if predicted), [sequence_length]."""
        assert idx is not None
        labels, _ = self._query_document_sample_shuffle_indices(idx)
        vocabulary = self.config.tokenizer
        key = numpy.array([self.config.random_seed, idx], dtype=numpy.uint64)
        random = numpy.random.Generator(numpy.random.Philox(key=key))
        candidates = numpy.flatnonzero(~vocabulary.is_special[labels])
        chosen = random.permutation(candidates)[: max(1, round(MASKED_SHARE * len(candidates)))]
        fate = random.random(len(chosen))
        replacement = vocabulary.ordinary[random.integers(len(vocabulary.ordinary), size=len(chosen))]
        tokens = labels.copy()
        tokens[chosen] = numpy.where(fate < 0.8, vocabulary.mask, numpy.where(fate < 0.9, replacement, labels[chosen]))
        loss_mask = numpy.zeros(len(labels), dtype=numpy.float32)
        loss_mask[chosen] = 1.0
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Batches:
    """Micro-batches of one replica, iteration by iteration; any iteration is reached at once.

    Args:
        dataset: samples in the order of the run.
        iterations: number of global batches.
        dp_rank, dp_size: this replica and their number.
    """

    def __init__(self, dataset: GPTDataset, cfg: RunConfig, iterations: int, dp_rank: int, dp_size: int) -> None:
        self.iterations, self._dataset = iterations, dataset
        self._global_batch, self._micro_batch = cfg.train.global_batch, cfg.train.micro_batch
        self._share, self._dp_rank = cfg.train.global_batch // dp_size, dp_rank
        length = cfg.model.sequence_length
        self._position_ids = torch.arange(length).repeat(self._micro_batch, 1)
        # BERT's of ones: nothing is padding.
        masked = cfg.model.architecture == "bert"
        self._attention_mask = torch.ones(self._micro_batch, length, dtype=torch.long) if masked else None

    def iteration(self, index: int) -> Iterator[MicroBatch]:
        """Micro-batches of iteration ``index`` (0-based) for this replica."""
        first = index * self._global_batch + self._dp_rank * self._share
        for start in range(first, first + self._share, self._micro_batch):
            samples = [self._dataset[place] for place in range(start, start + self._micro_batch)]
            yield {
                "tokens": torch.stack([sample["tokens"] for sample in samples]),
                "labels": torch.stack([sample["labels"] for sample in samples]),
                "loss_mask": torch.stack([sample["loss_mask"] for sample in samples]),
                "position_ids": self._position_ids,
                "attention_mask": self._attention_mask,
            }

    def start(self, iteration: int = 0) -> Iterator[MicroBatch]:
        """Micro-batches from the first one of ``iteration`` (0-based) to the end."""
        for index in range(iteration, self.iterations):
            yield from self.iteration(index)

    __iter__ = start


def train_batches(
    cfg: RunConfig, data_dir: Path, dp_rank: int, dp_size: int, start_iteration: int = 0
) -> Iterator[MicroBatch]:
    """Micro-batches of one replica for a run's iterations ``start_iteration`` (0-based) to the last.

    Where ``torch.distributed`` is initialised, rank 0 has to call this too: it builds a missing index, others wait.

    Raises:
        UserError: the data folder is missing or was prepared with other settings.
    """
    iterations = cfg.train.iterations
    dataset = _open(cfg, data_dir, "train", iterations * cfg.train.global_batch, cfg.seed)
    return Batches(dataset, cfg, iterations, dp_rank, dp_size).start(start_iteration)


def validation_batches(
    cfg: RunConfig, data_dir: Path, dp_rank: int, dp_size: int, batches: int | None = None
) -> Batches:
    """The first ``batches`` global batches of validation blocks: the same for every seed, method and layout.

    Args:
        batches: their number, by default ``eval_batches``.

    Raises:
        UserError: as :func:`train_batches`, or the validation split is too small (blocks are never repeated).
    """
    train = cfg.train
    dataset = _open(cfg, data_dir, "validation", None, VALIDATION_SEED)
    count = train.eval_batches if batches is None else batches
    key = "train.eval_batches" if count == train.eval_batches else "train.final.batches"
    blocks, available = count * train.global_batch, len(dataset)
    if blocks > available:
        fix = f"use at most {key} = {available // train.global_batch} or prepare more text"
        message = (
            f"{key} = {count} needs {blocks} validation blocks of "
            f"{cfg.model.sequence_length} tokens, the data has {available}"
        )
        raise UserError(message, where=data_dir, fix=fix)
    return Batches(dataset, cfg, count, dp_rank, dp_size)


def _open(cfg: RunConfig, data_dir: Path, split: str, samples: int | None, seed: int) -> GPTDataset:
    """Megatron's dataset over ``split``: at least ``samples`` blocks, or None for each block once."""
    data_dir = data_dir.resolve()
    info = load_info(data_dir)
    check_config(info, cfg.data, data_dir)
    check_whole(data_dir, info, (f"{split}.bin", f"{split}.idx"), checksums=False)
    masked = cfg.model.architecture == "bert"
    kind = MaskedDataset if masked else GPTDataset
    prefix = str(data_dir / split)
    key = json.dumps([kind.__name__, prefix, info.fingerprint, samples, seed, cfg.model.sequence_length])
    cache = data_dir / INDEX_CACHE / hashlib.sha256(key.encode()).hexdigest()[:24]

    def build(path_to_cache: Path) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=cfg.model.sequence_length,
            blend_per_split=[([prefix], None), None, None],
            path_to_cache=str(path_to_cache),
            tokenizer=_Vocabulary(info),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            add_extra_token_to_sequence=not masked,
        )
        documents = kind.build_low_level_dataset(prefix, config)
        indices = numpy.arange(kind.numel_low_level_dataset(documents), dtype=numpy.int32)
        return kind(documents, prefix, indices, samples, Split.train, config)

    if not cache.exists():
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            _wait_for(cache)
        else:
            _publish_index(cache, build)
    return build(cache)


def _publish_index(cache: Path, build: Callable[[Path], GPTDataset]) -> None:
    """Let Megatron write its index files into a private folder and rename it to ``cache``."""
    try:
        cache.parent.mkdir(exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".building-", dir=cache.parent))
    except OSError as error:
        message = f"the index cache cannot be written: {error.strerror}"
        raise UserError(message, where=cache.parent, fix="make the data folder writable") from None
    try:
        build(private)
        private.rename(cache)
    except OSError:
        if not cache.exists():  # else another run has published the same index meanwhile
            raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _wait_for(cache: Path) -> None:
    # Megatron lets only rank 0 write an index; polling needs no collective that every rank would have to join.
    deadline = time.monotonic() + _INDEX_PATIENCE_SECONDS
    while not cache.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has not published {cache} within {_INDEX_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)
