"""Micro-batches: one stream for every layout, resumable, covering the text; and BERT's masks."""

from __future__ import annotations

import multiprocessing
import shutil
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from edgc.errors import UserError
from experiments.data.batches import MicroBatch, train_batches, validation_batches
from experiments.data.folder import INDEX_CACHE, load_info, prepare
from experiments.spec.settings import DataConfig, RunConfig
from tests.unit.test_data import write_corpus

LENGTH = 16
Name = Literal["tokens", "labels", "loss_mask"]
NAMES: tuple[Name, ...] = ("tokens", "labels", "loss_mask")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Path]:
    folder = tmp_path_factory.mktemp("batches")
    config = write_corpus(folder / "corpus", documents=150)
    prepare(config, folder / "toy", show=False)
    return config, folder / "toy"


@pytest.fixture
def folder(corpus: tuple[DataConfig, Path], tmp_path: Path) -> Path:
    shutil.copytree(corpus[1], tmp_path / "toy")
    return tmp_path / "toy"


def run(folder: Path, architecture: str = "gpt", seed: int = 1, **train: Any) -> RunConfig:
    options = {"iterations": 6, "micro_batch": 2, "global_batch": 8, "eval_batches": 3, "eval_interval": 1, "lr": 1.0}
    data = load_info(folder).config
    model = {"architecture": architecture, "layers": 1, "hidden": 8, "heads": 1, "sequence_length": LENGTH}
    names = {"scale": "ci", "study": "s", "variant": "v", "label": "v"}
    return RunConfig(**names, seed=seed, data=data, model=model, train=options | {"lr_warmup_fraction": 0.0} | train)


def joined(batches: list[MicroBatch], name: Name = "tokens") -> numpy.ndarray:
    """All samples of ``batches`` in order, [samples, sequence_length]."""
    return torch.cat([batch[name] for batch in batches]).numpy()


def take(cfg: RunConfig, folder: Path, rank: int = 0, size: int = 1, start: int = 0) -> list[MicroBatch]:
    return list(train_batches(cfg, folder, rank, size, start))


def stored(folder: Path, split: str) -> numpy.ndarray:
    """All tokens of ``split`` in stored order, copied while the dataset (whose end unmaps the file) lives."""
    dataset = IndexedDataset(str(folder / split))
    return numpy.concatenate([dataset[index] for index in range(len(dataset))])


ARCHITECTURES = pytest.mark.parametrize("architecture", ["gpt", "bert"])


@ARCHITECTURES
def test_shapes_and_types(folder: Path, architecture: str) -> None:
    batches = take(run(folder, architecture), folder)
    assert len(batches) == 6 * 4
    kinds = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
    for batch in batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        mask = tensors.pop("attention_mask", None)
        assert {name: tensor.dtype for name, tensor in tensors.items()} == kinds
        assert {tensor.shape for tensor in tensors.values()} == {(2, LENGTH)}
        assert torch.equal(batch["position_ids"], torch.arange(LENGTH).expand(2, LENGTH))
        if architecture == "gpt":
            assert mask is None and bool(batch["loss_mask"].all())
        else:
            assert mask is not None and torch.equal(mask, torch.ones(2, LENGTH, dtype=torch.int64))


@pytest.mark.parametrize(
    ("architecture", "size", "micro"), [("gpt", 1, 8), ("bert", 1, 1), ("gpt", 2, 2), ("bert", 4, 1), ("gpt", 8, 1)]
)
def test_layouts_share_one_stream(folder: Path, architecture: str, size: int, micro: int) -> None:
    reference = take(run(folder, architecture), folder)
    cfg = run(folder, architecture, micro_batch=micro)
    ranks = [take(cfg, folder, rank, size) for rank in range(size)]
    per_iteration = 8 // (size * micro)
    order = [
        batch
        for index in range(6)
        for rank in range(size)
        for batch in ranks[rank][index * per_iteration : (index + 1) * per_iteration]
    ]
    for name in NAMES:
        assert numpy.array_equal(joined(order, name), joined(reference, name))
    if size > 1:
        assert not numpy.array_equal(joined(ranks[0]), joined(ranks[1]))
    assert not numpy.array_equal(joined(take(run(folder, architecture, seed=2), folder)), joined(reference))


@ARCHITECTURES
def test_resuming_equals_continuing(folder: Path, architecture: str) -> None:
    cfg = run(folder, architecture, iterations=400)
    whole = take(cfg, folder, 1, 2)
    for start in (1, 57, 399):
        rest = take(cfg, folder, 1, 2, start)
        for name in NAMES:
            assert numpy.array_equal(joined(rest, name), joined(whole[2 * start :], name))
    assert take(cfg, folder, 1, 2, 400) == []


def test_an_epoch_covers_the_text(folder: Path) -> None:
    tokens = stored(folder, "train")
    blocks = (len(tokens) - 1) // LENGTH
    batches = take(run(folder, iterations=blocks, global_batch=1, micro_batch=1), folder)
    seen = numpy.bincount(joined(batches).ravel(), minlength=300)
    missing = numpy.bincount(tokens, minlength=300) - seen
    assert missing.min() >= 0
    assert 0 < missing.sum() <= LENGTH
    for batch in batches[:50]:
        assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    # A block continues where its document does: every label is the true successor.
    stream = tokens.astype(numpy.int32).tobytes()
    inside = [row for row in joined(batches, "labels")[:200] if 0 not in row]
    assert len(inside) > 20
    assert all(row.astype(numpy.int32).tobytes() in stream for row in inside)


@ARCHITECTURES
def test_validation_is_one_fixed_set(folder: Path, architecture: str) -> None:
    reference = validation_batches(run(folder, architecture), folder, 0, 1)
    assert len(list(reference)) == 3 * 4
    for seed, iterations in ((2, 6), (3, 50)):
        other = validation_batches(run(folder, architecture, seed=seed, iterations=iterations), folder, 0, 1)
        for name in NAMES:
            assert numpy.array_equal(joined(list(other), name), joined(list(reference), name))
    halves = [validation_batches(run(folder, architecture), folder, rank, 2) for rank in range(2)]
    union = [batch for index in range(3) for half in halves for batch in half.iteration(index)]
    assert numpy.array_equal(joined(union), joined(list(reference)))
    longer = joined(list(validation_batches(run(folder, architecture, eval_batches=4), folder, 0, 1)))
    assert numpy.array_equal(longer[:24], joined(list(reference)))


def test_validation_never_repeats_a_block(folder: Path) -> None:
    info = load_info(folder)
    available = (info.tokens["validation"] - 1) // LENGTH
    cfg = run(folder, global_batch=1, micro_batch=1, eval_batches=available)
    tokens = stored(folder, "validation")
    seen = numpy.bincount(joined(list(validation_batches(cfg, folder, 0, 1))).ravel(), minlength=300)
    assert (numpy.bincount(tokens, minlength=300) - seen).min() >= 0
    too_many = run(folder, global_batch=1, micro_batch=1, eval_batches=available + 1)
    with pytest.raises(UserError, match=f"train.eval_batches = {available + 1} needs") as caught:
        validation_batches(too_many, folder, 0, 1)
    assert f"at most train.eval_batches = {available}" in str(caught.value)


def test_bert_masks(folder: Path) -> None:
    info = load_info(folder)
    batches = take(run(folder, "bert", iterations=1000), folder)
    tokens, labels, chosen = (joined(batches, name) for name in NAMES)
    chosen = chosen.astype(bool)
    special = numpy.isin(labels, list(info.special_tokens.values()))
    assert numpy.array_equal(tokens[~chosen], labels[~chosen])
    assert not (chosen & special).any()
    per_row = chosen.sum(axis=1)
    assert set(per_row) <= {max(1, round(0.15 * count)) for count in (~special).sum(axis=1)}
    masked = tokens[chosen] == info.special_tokens["[MASK]"]
    kept = tokens[chosen] == labels[chosen]
    assert chosen.sum() > 10_000
    # 4 standard errors of a share of 0.1 in 1e4 draws are 0.012; a random token hits the original 1 in 295
    # times.
    assert masked.mean() == pytest.approx(0.8, abs=0.016)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 295, abs=0.012)
    replaced = tokens[chosen & (tokens != labels)]
    replaced = replaced[replaced != info.special_tokens["[MASK]"]]
    assert not numpy.isin(replaced, list(info.special_tokens.values())).any()
    assert len(numpy.unique(replaced)) > 200
    # Every position of a block is masked at its fair share.
    assert numpy.ptp(chosen.mean(axis=0)) < 0.05


def test_bad_input(folder: Path) -> None:
    cfg = run(folder)
    with pytest.raises(UserError, match="prepared data is missing"):
        train_batches(cfg, folder / "absent", 0, 1)
    shutil.rmtree(folder / INDEX_CACHE, ignore_errors=True)
    (folder / INDEX_CACHE).write_text("a file in the way")
    with pytest.raises(UserError, match="index cache cannot be written"):
        train_batches(cfg, folder, 0, 1)
    other = cfg.model_copy(update={"data": cfg.data.model_copy(update={"vocab_size": 999})})
    with pytest.raises(UserError, match=r"data.vocab_size = 999, but"):
        train_batches(other, folder, 0, 1)


def test_index_is_built_aside_and_once_and_moves_with_the_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, save = list[Path](), numpy.save

    def recording(file: str, *arguments: Any, **options: Any) -> None:
        written.append(Path(file).parent)
        save(file, *arguments, **options)

    monkeypatch.setattr(numpy, "save", recording)
    cfg = run(folder)
    first = joined(take(cfg, folder))
    assert len(written) == 3 and all(path.name.startswith(".building-") for path in written), "never in place"
    (index,) = (folder / INDEX_CACHE).iterdir()
    stamps = {path.name: path.stat().st_mtime_ns for path in index.iterdir()}
    assert numpy.array_equal(joined(take(cfg, folder)), first)
    assert {path.name: path.stat().st_mtime_ns for path in index.iterdir()} == stamps
    folder.rename(tmp_path / "moved")
    assert numpy.array_equal(joined(take(cfg, tmp_path / "moved")), first)
    assert prepare(cfg.data, tmp_path / "moved", show=False).fingerprint  # the cache is no foreign file


def _worker(rank: int, size: int, store: str | None, folder: Path, results: SimpleQueue[Any]) -> None:
    try:
        if store:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        cfg = run(folder)
        validation = list(validation_batches(cfg, folder, rank, size))
        results.put((rank, [joined(take(cfg, folder, rank, size)), joined(validation)]))
        if store:
            torch.distributed.destroy_process_group()
    except BaseException as error:
        results.put((rank, repr(error)))
        raise


@pytest.mark.parametrize("distributed", [False, True])
def test_processes_start_together(folder: Path, tmp_path: Path, distributed: bool) -> None:
    store = str(tmp_path / "store") if distributed else None
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_worker, args=(rank, 4, store, folder, results)) for rank in range(4)]
    for worker in workers:
        worker.start()
    found = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    assert not [value for value in found.values() if isinstance(value, str)]
    cfg = run(folder)
    for stream, reference in enumerate((take(cfg, folder), list(validation_batches(cfg, folder, 0, 1)))):
        rows = joined(reference).reshape(-1, 4, 2, LENGTH)
        for rank in range(4):
            assert numpy.array_equal(found[rank][stream], rows[:, rank].reshape(-1, LENGTH))
    names = [path.name for path in (folder / INDEX_CACHE).iterdir()]
    assert len(names) == 2
    assert not [name for name in names if name.startswith(".")]
