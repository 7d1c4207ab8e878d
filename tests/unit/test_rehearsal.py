"""Rehearsal: what a user brings along, what it reports, and its command line. Bits: tests/integration."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgc.rehearsal.__main__ as program
from edgc.config import EDGCConfig
from edgc.rehearsal import Rehearsal
from edgc.runtime.channel import all_reduce_bytes
from edgc.runtime.device import masked_path
from edgc.runtime.local import Room
from edgc.strategies import StrategyConfig
from tests.strategy_cases import ROWS, SHAPES, adamw, batch, distance, loss, network, rehearsal, sgd, train, weights
from tests.workers import refused

LOW = {"method": "powersgd", "rank": 4}
EVERY = {"name": "every_step"}
DILOCO: dict[str, Any] = {"name": "diloco", "every": 2}
ENTRIES = sum(math.prod(shape) for shape in SHAPES)


def plain(model: nn.Module, **options: Any) -> Rehearsal:
    if "optimizer" not in options:
        options["optimizer"] = sgd(model)
    return Rehearsal(model, **({"replicas": 2, "loss": loss} | options))


def batches(step: int, world: int = 2) -> list[Tensor]:
    return [batch(step, rank) for rank in range(world)]


# --------------------------------------------------------------------- models as users have them


def test_frozen_parameters_stay_and_are_not_sent() -> None:
    model = network()
    frozen = next(iter(model.parameters()))
    before = frozen.requires_grad_(False).clone()
    trained = plain(model)
    trained.step(batches(0))
    assert torch.equal(frozen, before)
    assert trained.bytes == trained.dense_bytes == all_reduce_bytes(4 * (ENTRIES - frozen.numel()), 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(tokens)), tokens)


@pytest.mark.parametrize("strategy", ["every_step", DILOCO])
def test_tied_weights_stay_tied_and_are_sent_once(strategy: Any) -> None:
    model = Tied()
    options: dict[str, Any] = {"config": EDGCConfig(), "strategy": StrategyConfig.from_dict(strategy), "replicas": 2}
    trained = Rehearsal(model, optimizer=adamw(model), **options)
    for step in range(2):
        trained.step([torch.arange(32).roll(step + rank) for rank in range(2)])
    assert all(each.head.weight is each.table.weight for each in trained.models)  # type: ignore[union-attr]
    assert trained.report().memory["weights"] == (len(trained.models) * 4 * 512, 4 * 512)
    assert trained.dense_bytes == 4 * 512


def test_buffers_are_the_first_replicas_as_under_ddp() -> None:
    for strategy in ("every_step", {"name": "diloco", "every": 3}):
        model: Any = nn.Sequential(nn.BatchNorm1d(ROWS), nn.Linear(ROWS, 8))
        trained = plain(model, strategy=StrategyConfig.from_dict(strategy))
        averaged, alone = trained.averaged, nn.BatchNorm1d(ROWS)
        for step in range(3):
            trained.step(batches(step))
            alone(batch(step, 0))
        expected = alone.state_dict()["running_mean"]
        assert torch.equal(model[0].running_mean, expected)
        assert torch.equal(averaged().state_dict()["0.running_mean"], expected)


def test_replicas_draw_their_own_numbers_and_leave_the_callers_alone() -> None:
    drawn = []

    def noisy(model: nn.Module, inputs: Tensor) -> Tensor:
        drawn.append(torch.rand(()))
        return loss(model, inputs)

    torch.manual_seed(5)
    trained, before = plain(network(), loss=noisy), torch.get_rng_state()
    for step in range(2):
        trained.step(batches(step))
    assert torch.equal(torch.get_rng_state(), before)
    for rank in range(2):
        torch.manual_seed(5 + rank)
        assert [float(x) for x in drawn[rank::2]] == [float(torch.rand(())) for _ in range(2)]


@pytest.mark.parametrize("strategy", ["every_step", DILOCO])
def test_a_model_in_evaluation_mode_and_one_of_a_pair_that_is_unused(strategy: Any) -> None:
    model: Any = nn.ModuleDict({"used": network().eval(), "spare": nn.Linear(3, 3)})
    options = {"strategy": StrategyConfig.from_dict(strategy), "optimizer": adamw(model)}
    trained = plain(model, loss=lambda pair, inputs: loss(pair["used"], inputs), **options)
    before = model["spare"].weight.clone()
    trained.step(batches(0))
    assert torch.equal(model["spare"].weight, before)  # as under DDP: not even decayed
    assert not model["used"].training


@pytest.mark.parametrize("strategy", ["every_step", DILOCO])
def test_micro_batches_are_one_batch(strategy: Any) -> None:
    options = {"strategy": StrategyConfig.from_dict(strategy)}
    parts, whole = plain(network(), micro_batches=3, **options), plain(network(), **options)
    for step in range(2):
        given = [list(each.chunk(3)) for each in batches(step)]
        assert parts.step(given) == pytest.approx(whole.step(batches(step)), rel=1e-6)
    assert distance(weights(parts), weights(whole)) < 1e-6
    assert parts.bytes == whole.bytes


def test_copies_follow_a_scheduler() -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    trained = plain(model, optimizer=optimizer, strategy=StrategyConfig.from_dict({"name": "diloco", "every": 9}))
    trained.step(batches(0))
    scheduler.step()
    before = [weights(trained, rank) for rank in range(2)]
    trained.step(batches(1))
    assert all(distance(weights(trained, rank), before[rank]) == 0 for rank in range(2))


def test_averaged_weights_are_the_mean_of_replicas() -> None:
    trained = train(rehearsal({"name": "diloco", "every": 5}, world=3), 2)
    mean = dict(trained.averaged().named_parameters())
    for name, p in mean.items():
        assert torch.allclose(p, torch.stack([weights(trained, rank)[name] for rank in range(3)]).mean(0))


@pytest.mark.parametrize(("strategy", "compression"), [(EVERY, LOW), ({"name": "diloco", "every": 3}, None)])
def test_a_state_that_is_kept_in_memory_stays_what_it_was(strategy: Any, compression: Any) -> None:
    trained = train(rehearsal(strategy, compression, make=adamw), 2)
    kept, first = trained.state_dict(), weights(train(trained, 2))
    trained.load_state_dict(kept)
    again = weights(train(trained, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_path_of_a_gpu_gives_what_the_hosts_gives() -> None:
    """A step that is not finite is left out there, too."""
    runs = []
    for masked in (False, True):
        with masked_path(masked):
            trained = train(rehearsal(EVERY, LOW), 3)
            bad = batches(3)
            bad[1][0, 0] = math.nan
            trained.step(bad)
            runs.append(train(trained, 2))
    assert [run.skipped for run in runs] == [1, 1]
    assert distance(weights(runs[0]), weights(runs[1])) < 1e-4


def test_batches_that_are_generated_a_loss_in_one_dimension_and_a_seed_below_zero() -> None:
    torch.manual_seed(-1)
    usual, odd = plain(network()), plain(network(), loss=lambda model, inputs: loss(model, inputs).view(1))
    assert odd.step(batch(0, rank) for rank in range(2)) == usual.step(batches(0))
    assert distance(weights(odd), weights(usual)) == 0


def test_deterministic_algorithms_and_autocast_of_the_caller_are_left_alone() -> None:
    expected = weights(train(rehearsal(EVERY, LOW), 2))
    torch.use_deterministic_algorithms(True)
    try:
        found = weights(train(rehearsal(EVERY, LOW), 2))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], expected[name]) for name in found)


# --------------------------------------------------------------------- reports and mistakes


def test_memory_here_and_of_each() -> None:
    dense, low, local = (
        train(rehearsal(strategy, config, make=adamw, world=4), 2).report().memory
        for strategy, config in ((EVERY, None), (EVERY, LOW), (DILOCO, None))
    )
    size, momenta = 4 * ENTRIES, 2 * 4 * ENTRIES + 4 * len(SHAPES)
    shared = {"weights": (size, size), "optimizer": (momenta, momenta), "strategy": (0, 0)}
    assert dense == {**shared, "compression": (0, 0), "gradients": (4 * size, size)}
    here, each = low["compression"]
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    assert here == 4 * each
    assert each >= 4 * sum(m * n + 4 * n for m, n in matrices)  # error feedback and Q
    assert local["weights"] == (4 * size, size)
    assert local["optimizer"] == (4 * momenta, momenta)
    assert local["strategy"] == (4 * 2 * size, 2 * size)  # anchor and velocity


def test_report_says_what_was_measured() -> None:
    measured = {**LOW, "window": 2, "entropy": {"iteration_rate": 1.0}, "record_full_entropy": True}
    report = train(rehearsal(EVERY, measured), 5).report()
    assert report.rank == 4
    assert 0 < report.mean_error < 1
    assert math.isfinite(report.entropy)
    text = str(report)
    assert all(words in text for words in ("2 replicas, 5 steps, 0 skipped", "all-reduce: ", "rank 4", "gradients:"))
    assert train(rehearsal(DILOCO), 1).report().gap > 0
    resumed = rehearsal(EVERY, measured)
    resumed.load_state_dict(train(rehearsal(EVERY, measured), 4).state_dict())
    again = resumed.report()
    assert math.isfinite(again.entropy) and 0 < again.mean_error < 1
    assert train(resumed, 1).report().bytes == report.bytes


def test_mistakes_are_answered_in_a_line() -> None:
    model, other = network(), network()
    trained, pieces = plain(model), plain(network(), micro_batches=2)
    refused(lambda: trained.step(batches(0, 3)), "3 batches", "give 2")
    refused(lambda: pieces.step([batches(0), batches(0, 3)]), "replica 1", "2 micro-batches but 3")
    refused(lambda: pieces.step(batches(0)), "replica 0", "but Tensor")
    refused(lambda: plain(model, replicas=1), "replicas = 1")
    refused(lambda: plain(model, optimizer=sgd(other)), "4 tensors", "model.parameters()")
    refused(lambda: plain(nn.Tanh(), optimizer=sgd(other)), "no parameter to train")
    refused(lambda: plain(model, optimizer="sgd"), "'sgd' is no optimizer")
    for clip in (-1.0, math.nan, "one"):
        refused(lambda clip=clip: plain(model, clip=clip), f"clip = {clip!r}")
    names = list(dict(model.named_parameters()))
    for buckets, words in (
        ([names[1:]], f"{names[0]} 0 times"),
        ([names, names[:1]], "2 times"),
        ([["x"]], "x, which"),
    ):
        refused(lambda buckets=buckets: plain(model, buckets=buckets), words)
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused(lambda: plain(split), "lies on cpu, meta")
    for settings in ({"method": "edgc"}, {**LOW, "cost_gate": True}):
        config = EDGCConfig.from_dict(settings)
        refused(partial(plain, model, config=config), "a rehearsal has none; ")
    for preset, words in (("optimus_cc", "pipeline.rank = 16"), ("optimus_cc_stages", "compressed_stages = 0.75")):
        config = EDGCConfig.from_dict({"preset": preset})
        refused(partial(plain, model, config=config), f"{words} cannot be used", "a rehearsal has one stage")
    refused(lambda: plain(model, config={"method": "bf16"}), "config is of type dict", "from_dict")
    refused(lambda: plain(model, strategy="diloco"), "strategy is of type str", "from_dict")
    no_loss = Rehearsal(model, optimizer=sgd(model), replicas=2)
    refused(lambda: no_loss.step(batches(0)), "Tensor", "give loss=")
    for answer in (0.5, None, torch.ones(2)):
        own = plain(model, loss=lambda *_, answer=answer: answer)
        refused(partial(own.step, batches(0)), f"loss returned {type(answer).__name__}", "a tensor of one number")
    local, before = rehearsal(DILOCO), weights(trained)
    refused(lambda: trained.load_state_dict(train(local, 1).state_dict()), "another strategy", "this one averages")
    refused(lambda: local.load_state_dict(trained.state_dict()), "another strategy", "averages no gradients")
    assert all(torch.equal(before[name], p) for name, p in weights(trained).items())
    table = nn.Embedding(4, 4, sparse=True)
    sparse = plain(table, loss=lambda net, tokens: net(tokens).sum())
    refused(lambda: sparse.step([torch.tensor([1])] * 2), "sparse")


# --------------------------------------------------------------------- the room


def test_a_room_says_who_is_missing_and_raises_what_a_replica_raised() -> None:
    room = Room(2)

    def one_alone(rank: int) -> None:
        if rank == 0:
            room.opener(rank)().gather(rank)

    def fails(rank: int) -> None:
        if rank == 1:
            raise KeyError("mine")
        room.opener(rank)().gather(rank)

    def differs(rank: int) -> None:
        channel = room.opener(rank)()
        (channel.mean_ if rank else lambda x: channel.all_gather(torch.empty(2), x))(torch.ones(1))
        channel.finish()

    def brings_more(rank: int) -> None:
        channel = room.opener(rank)()
        channel.mean_(torch.ones(1 + rank))
        channel.finish()

    expected: tuple[tuple[Callable[[int], None], type[Exception], str], ...] = (
        (one_alone, RuntimeError, "1 replicas have ended"),
        (fails, KeyError, "mine"),
        (differs, RuntimeError, "different collectives"),
        (brings_more, RuntimeError, "different tensors"),
    )
    for function, kind, words in expected:
        with pytest.raises(kind, match=words):
            room.run(function)
    assert room.run(lambda rank: room.opener(rank)().gather(rank)) == [[0, 1]] * 2


# --------------------------------------------------------------------- python -m edgc.rehearsal


def test_built_in_model_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "runs.csv"
    few = ["--replicas", "2", "--steps", "2", "--table", str(table)]
    assert program.main([*few, "--method", "powersgd", "--rank", "4", "--set", "error_dtype=bf16", "--compare"]) == 0
    assert program.main([*few, "--strategy", "diloco", "every=2", "lr=1"]) == 0
    said = capsys.readouterr()
    assert "step 2/2: loss " in said.err and "(without compression" in said.err and "% of dense" in said.err
    assert "rank 4" in said.out and "held out" in said.out and "last steps without compression" in said.out
    with table.open(encoding="utf-8") as file:
        low, local = csv.DictReader(file)
    assert low["settings"] == "rank=4 error_dtype=bf16" and local["strategy"] == "diloco every=2 lr=1"
    assert float(low["loss"]) < 6 and float(local["share"]) == pytest.approx(0.5)


OWN = """
import typing
import torch

def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 4) * i for i in range(3)], loss

def loss(model, x):
    return model(x).square().mean()

def wrong():
    return 3

def none():
    return (*make()[:2], None)

def swapped():
    model, optimizer, batches, loss = make()
    return model, batches, optimizer, loss

def lossless():
    return (*make()[:3], 3)

class Pair(typing.NamedTuple):
    x: torch.Tensor

def named():
    model, optimizer, batches, _ = make()
    return model, optimizer, [Pair(x) for x in batches], lambda model, pair: loss(model, pair.x)

def short():
    model, optimizer, batches, loss = make()
    return model, optimizer, iter(batches), loss
"""


def test_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    few = ["--replicas", "2", "--steps", "2"]
    assert program.main([f"{file}:make", *few, "--micro-batches", "2"]) == 0
    assert program.main([f"{file}:named", *few]) == 0
    assert "2 replicas, 2 steps" in capsys.readouterr().out
    text, other = tmp_path / "mine.txt", tmp_path / "other.csv"
    text.write_text(OWN, encoding="utf-8")
    other.write_text("a,b\n", encoding="utf-8")
    for arguments, words in (
        ([f"{text}:make"], "no Python file"),
        ([f"{file}:lossless", *few], "a loss that is 3"),
        (["--seed", "-1"], "--seed = -1"),
        (["--seed", "9" * 20], "use a whole number of at least 0"),
        ([f"{file}:none", *few], "batches that are None"),
        ([f"{file}:swapped", *few], "batches that are SGD"),
        ([f"{file}:make", *few, "--table", str(other)], "other columns"),
        ([f"{file}:make", *few, "--table", str(tmp_path / "none" / "x.csv")], "--table cannot be written"),
        (["--set", "entropy=1", "entropy.seed=2"], "--set entropy.seed=2 follows"),
        ([f"{file}:nothing"], "no function nothing"),
        ([str(file)], "give FILE.py:FUNCTION"),
        ([f"{file}:wrong"], "wrong returned int"),
        ([f"{file}:short", *few], "the batches have ended"),
        (["--set", "rank"], "--set rank is not valid"),
        (["--method", "powersgd", "--set", "rank=9"], "give --rank alone"),
        (["--method", "edgc"], "a rehearsal has none"),
        (["--strategy", "dilocoo"], "use one of"),
        (["--device", "nowhere"], "nowhere"),
        (["--unknown"], "see --help"),
    ):
        assert program.main(arguments) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert all(line.startswith("step ") for line in progress)
        assert error.startswith("error: ") and words in error, error
    assert other.read_text(encoding="utf-8") == "a,b\n"


def test_a_table_without_room_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    monkeypatch.setattr(program, "check_table", lambda _: None)  # there was room before the training
    assert program.main([f"{file}:make", "--replicas", "2", "--steps", "2", "--table", "/dev/full"]) == 2
    assert "error: --table cannot be written" in capsys.readouterr().err.splitlines()[-1]


def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    run = [f"{file}:make", "--replicas", "2", "--steps", "1", "--tensorboard", str(tmp_path / "curves")]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert program.main(run) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
