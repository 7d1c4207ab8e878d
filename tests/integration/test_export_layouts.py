"""Export of split models: four gloo processes train and save in one launch, one process gathers and exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from experiments.data.folder import load_info
from experiments.evaluation import export
from experiments.spec.settings import padded_vocabulary
from tests.integration import export_cases
from tests.words import VOCABULARY, prepare_words
from tests.workers import run_workers

pytestmark = pytest.mark.slow

RUNS = export_cases.runs()
Ranks = list[dict[str, torch.Tensor | None]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(root: Path) -> Ranks:
    return run_workers(4, export_cases.train_and_save, str(root))


@pytest.fixture(scope="module")
def world(ranks: Ranks) -> Iterator[None]:
    with export.single_process():
        yield


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("world")
def test_a_split_model_is_exported_with_its_logits(
    name: str, ranks: Ranks, root: Path, prepared: Path, tmp_path: Path
) -> None:
    run, folder = RUNS[name], root / name
    record = run.model_dump(mode="json") | {"provenance": {"data_fingerprint": load_info(prepared).fingerprint}}
    (folder / "run.yaml").write_text(yaml.safe_dump(record))
    (folder / "status").write_text("ok\n")
    export.export(folder, prepared, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        theirs = exported(torch.cat(export_cases.batches(run))).logits
    last = [rank[name] for rank in ranks if rank[name] is not None]
    assert len(last) == 2  # replicas, or tensor ranks after the gather
    for ours in last:
        assert ours is not None
        assert ours.shape[-1] == padded_vocabulary(VOCABULARY, run.parallel.tensor) > VOCABULARY
        assert ours[..., :VOCABULARY].std() > 0.1
        assert (ours[..., :VOCABULARY] - theirs).abs().max() < 1e-4
    biases = [p for key, p in exported.named_parameters() if key.endswith("bias")]
    assert all(bias.abs().max() > 1e-3 for bias in biases), "an untrained bias would hide a wrong place"
