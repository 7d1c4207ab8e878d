"""What integrations share: what they refuse, numbers for a log, and states for another number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from edgc import EDGCConfig
from edgc.ddp import Handle
from edgc.errors import UserError
from edgc.integrations import common, metrics, torchtitan
from edgc.integrations.common import load, register, save
from tests.workers import refused, run_workers, said

CONFIG = EDGCConfig(method="powersgd", rank=2)


class DeepSpeedEngine(torch.nn.Module):
    """Called as DeepSpeed's."""


class FullyShardedDataParallel(torch.nn.Module):
    """Called as FSDP1's."""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (DeepSpeedEngine(), "DeepSpeed averages gradients itself"),
        (FullyShardedDataParallel(), "FSDP1 shards the model"),
        (torch.nn.Linear(2, 2), "one process has no gradients to average .*start several"),
    ],
)
def test_what_is_under_neither_ddp_nor_fsdp2_is_refused_with_what_it_is(model: torch.nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words):
        register(model, CONFIG, iterations=9, scaler=None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_parts": [torch.nn.Linear(2, 2)] * 2}, "several pipeline stages .*pipeline_parallel_degree: 1"),
        ({"model_parts": [SimpleNamespace(_skip_lm_head=True)]}, "ChunkedLossWrapper .*CrossEntropyLoss"),
        ({"device": torch.device("cuda")}, "CUDA graph.*disable_cuda_graphs"),
        ({}, "one process has no gradients to average"),
    ],
)
def test_what_torchtitan_is_set_to_and_cannot_be_compressed_is_refused(changed: dict[str, Any], words: str) -> None:
    training = SimpleNamespace(steps=9, disable_cuda_graphs=False)
    usual = {"model_parts": [torch.nn.Linear(2, 2)], "device": torch.device("cpu"), "gradient_accumulation_steps": 1}
    trainer = SimpleNamespace(**{**usual, **changed}, config=SimpleNamespace(training=training))
    with pytest.raises(UserError, match=words):
        torchtitan.register(trainer, CONFIG)


def test_a_torchtitan_trainer_logs_and_saves_what_was_registered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (SimpleNamespace(active=True, sent=sent) for sent in (1.0, 2.0))
    handles, logged = iter((first, second)), list[dict[str, float]]()
    monkeypatch.setattr(common, "register", lambda *_, **__: next(handles))
    monkeypatch.setattr(common, "metrics", lambda handle: {"edgc_bytes": handle.sent})
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(steps=9, disable_cuda_graphs=True)),
        model_parts=[torch.nn.Linear(2, 2)],
        device=torch.device("cpu"),
        gradient_accumulation_steps=1,
        checkpointer=SimpleNamespace(enable=True, states={}),
        metrics_processor=SimpleNamespace(log=lambda step, extra_metrics=None: logged.append(extra_metrics)),
    )
    torchtitan.register(trainer, CONFIG)
    trainer.metrics_processor.log(1)
    first.active = False
    torchtitan.register(trainer, CONFIG)
    trainer.metrics_processor.log(2, extra_metrics={"lr": 0.5})
    assert logged == [{"edgc_bytes": 1.0}, {"lr": 0.5, "edgc_bytes": 2.0}]
    assert trainer.checkpointer.states == {"edgc": second}


def prepared() -> tuple[Any, Handle]:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    return model, register(torch.compile(model), CONFIG, iterations=9, scaler=None)


def step(model: Any) -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(rows).square().sum().backward()


def saved(folder: str) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Numbers before and after a step, and the mean of what the ranks owe after it. Parts of a model that are sharded
    beside each other are refused."""
    parts = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(8, 8)) for _ in range(2)))
    refused(lambda: register(parts, CONFIG, iterations=9, scaler=None), "2 modules of Sequential", "call fully_shard")
    model, handle = prepared()
    before = metrics(handle)
    step(model)
    save(handle, Path(folder) / "both")
    save(handle, Path(folder) / "both", "edgc-2")
    save(handle, Path(folder) / "half")
    if dist.get_rank() == 1:
        (Path(folder) / "half" / "edgc-1-of-2.pt").unlink()
    owed = handle.engine.compressor.state_dict()["errors"]["weight"].clone()
    killed_while_saving(model, handle, Path(folder))
    dist.all_reduce(owed)
    return [before, metrics(handle)], owed / 2


def killed_while_saving(model: Any, handle: Handle, folder: Path) -> None:
    """A file that cannot be written, one that is cut short, or of an older step: all ranks say so, and none waits."""
    for name in ("old", "cut"):
        save(handle, folder / name)
    refused(lambda: save(handle, Path("/dev/null/x") if dist.get_rank() else folder / "full"), "cannot be written")
    step(model)
    if dist.get_rank() == 1:
        file = folder / "cut" / "edgc-1-of-2.pt"
        file.write_bytes(file.read_bytes()[:1000])
    else:
        torch.save(handle.state_dict(), folder / "old" / "edgc-0-of-2.pt")
    dist.barrier()
    refused(lambda: load(handle, folder / "cut"), "edgc-1-of-2.pt cannot be read")
    refused(lambda: load(handle, folder / "old"), "iterations", "older checkpoint")


def loaded(folder: str) -> dict[str, Any]:
    """By folder what is said, and what is owed then."""
    results = {}
    for name in ("both", "half", "none"):
        _, handle = prepared()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            refusal = said(lambda handle=handle, name=name: load(handle, Path(folder) / name))  # type: ignore[misc]
        owed = handle.engine.compressor.state_dict()["errors"].get("weight")
        results[name] = refusal, [str(warning.message) for warning in caught], owed
    save(handle, Path(folder) / "both")
    return results


def test_numbers_for_a_log_and_states_for_another_number_of_ranks(tmp_path: Path) -> None:
    ((before, after), owed), _ = run_workers(2, saved, str(tmp_path))
    assert before == {} and set(after) == {"edgc_bytes", "edgc_rank", "edgc_error"}
    assert 0 < after["edgc_bytes"] < 4 * 64 * 64 and after["edgc_rank"] == 2 and 0 < after["edgc_error"] < 1
    (found,) = run_workers(1, loaded, str(tmp_path))
    assert sorted(file.name for file in (tmp_path / "both").iterdir()) == [
        "edgc-0-of-1.pt", "edgc-2-0-of-2.pt", "edgc-2-1-of-2.pt",
    ]  # fmt: skip
    refusal, said_of_it, here = found["both"]
    assert refusal == "nothing" and any("of 2 ranks goes on with 1" in text for text in said_of_it)
    torch.testing.assert_close(here, owed)
    assert "not those of all ranks of one run: 0 of 2" in found["half"][0]
    refusal, said_of_it, here = found["none"]
    assert refusal == "nothing" and here is None and any("no state in" in text for text in said_of_it)
