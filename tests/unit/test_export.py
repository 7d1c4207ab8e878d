"""Export: the Hugging Face model computes what the Megatron model computes, or nothing is published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgc.errors import UserError
from experiments.data.folder import load_info
from experiments.evaluation import export
from experiments.evaluation.gpt2 import gpt2_weights, to_gpt2
from experiments.evaluation.inputs import read_model
from experiments.spec.settings import DataConfig, RunConfig
from experiments.training import outputs
from tests.words import VOCABULARY, prepare_words

LENGTH = 16


def settings(**model: Any) -> RunConfig:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": LENGTH}
    train = {"iterations": 1, "micro_batch": 1, "global_batch": 1, "lr": 1e-3, "lr_warmup_fraction": 0.0}
    values = {"scale": "ci", "study": "methods", "variant": "none", "label": "none", "seed": 3}
    return RunConfig(
        **values,
        data=DataConfig(source="folder", vocab_size=VOCABULARY, path="words"),
        model=sizes | model,
        train=train | {"eval_interval": 1, "eval_batches": 1, "checkpoint": True},
        compression={"method": "none"},
    )


def build(run: RunConfig) -> Any:
    """A Megatron model with every parameter random, biases included, and logits of order one."""
    from experiments.training.model import build_model

    model = build_model(run, VOCABULARY)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((1 + 0.3 * noise) if "layernorm.weight" in name else 0.15 * noise)
    return model.eval()


def save(model: Any, run: RunConfig, folder: Path, prepared: Path) -> Path:
    """A finished run folder as training writes it."""
    from megatron.core import dist_checkpointing

    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(checkpoint))
    described = run.model_dump(mode="json")
    (checkpoint / "run.yaml").write_text(yaml.safe_dump(described))
    record = described | {"provenance": {"data_fingerprint": load_info(prepared).fingerprint}}
    (folder / "run.yaml").write_text(yaml.safe_dump(record))
    (folder / "status").write_text("ok\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with export.single_process():
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    return save(build(settings()), settings(), tmp_path_factory.mktemp("runs") / "none-s3", prepared)


@pytest.mark.parametrize(("activation", "tied"), [("gelu", True), ("gelu", False), ("gelu_tanh", True)])
def test_exported_folder_computes_the_same_logits(activation: str, tied: bool, tmp_path: Path, prepared: Path) -> None:
    run = settings(activation=activation, tie_embeddings=tied)
    model = build(run)
    summary = export.export(save(model, run, tmp_path / "run", prepared), prepared, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.activation_function == {"gelu": "gelu", "gelu_tanh": "gelu_new"}[activation]
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(9))
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        ours = model(tokens, torch.arange(LENGTH).expand(4, -1), mask)
        theirs = exported(tokens).logits
    assert ours.shape == (4, LENGTH, 384)
    assert theirs.shape == (4, LENGTH, VOCABULARY)
    assert ours.abs().max() > 1
    assert (ours[..., :VOCABULARY] - theirs).abs().max() < 1e-4
    assert summary["largest_logit_difference"] < 1e-4
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == summary


def test_exported_tokenizer_is_the_training_tokenizer(finished: Path, prepared: Path, tmp_path: Path) -> None:
    from experiments.data.tokenizer import TextTokenizer

    export.export(finished, prepared, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    trained = TextTokenizer(Tokenizer.from_file(str(prepared / "tokenizer.json")))
    texts = ["abc  def\n\thab", "a <|endoftext|> inside [MASK] a text", "Grüße"]
    expected = [ids[:-1] for ids in trained.encode(texts)]
    assert exported(texts)["input_ids"] == expected
    assert exported.eos_token_id == exported.bos_token_id == trained.end_of_text
    assert len(exported) == VOCABULARY


def test_another_gelu_and_a_weight_without_a_place_in_gpt2_are_refused() -> None:
    model = build(settings(activation="gelu"))
    with pytest.raises(UserError, match="but the model computes another"):
        to_gpt2(model, vocab_size=VOCABULARY, activation="gelu_tanh")
    with pytest.raises(UserError, match="GPT-2 has no place for decoder"):
        gpt2_weights(model.state_dict() | {"decoder.layers.0.extra.weight": torch.zeros(1)}, 4, VOCABULARY)


def test_different_logits_publish_nothing(
    finished: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, **options: Any) -> Any:
        exported = to_gpt2(model, **options)
        with torch.no_grad():
            exported.transformer.h[1].attn.c_attn.weight[:, :8] *= 1.5  # queries of the first head
        return exported

    monkeypatch.setattr(export, "to_gpt2", wrong)
    with pytest.raises(RuntimeError, match="nothing published"):
        export.export(finished, prepared, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def edit(path: Path, section: str, **values: Any) -> None:
    content = yaml.safe_load(path.read_text())
    content[section] |= values
    path.write_text(yaml.safe_dump(content))


def both(folder: Path, section: str, **values: Any) -> None:
    edit(folder / "run.yaml", section, **values)
    edit(folder / "checkpoint" / "run.yaml", section, **values)


CODE = b"cposix\nabort\n(tR."  # a pickle that ends the process
BAD = {
    "unfinished": (lambda run: (run / "status").unlink(), "not finished"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoint"), "left no checkpoint"),
    "bert": (lambda run: both(run, "model", architecture="bert"), "architecture = 'bert' cannot be exported"),
    "other size": (lambda run: both(run, "model", hidden=64), "does not hold this model"),
    "torn": (lambda run: (run / "checkpoint" / ".metadata").unlink(), "does not hold this model"),
    "code": (lambda run: (run / "checkpoint" / ".metadata").write_bytes(CODE), "metadata asks for posix.abort"),
    "data": (lambda run: edit(run / "run.yaml", "provenance", data_fingerprint="0"), "fingerprint is not"),
}


def test_run_without_model_keeps_its_place(finished: Path, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint"))
    (tmp_path / "run" / "status").write_text("diverged\n")
    summary = export.export(tmp_path / "run", prepared, tmp_path / "out")
    assert (summary["status"], summary["model"]) == ("diverged", False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_changes_nothing(case: str, finished: Path, prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "none-s3"
    shutil.copytree(finished, run)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    spoil, message = BAD[case]
    spoil(run)
    with pytest.raises(UserError, match=message):
        export.export(run, prepared, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(UserError, match="384 embedding rows do not fit 500 tokens"):
        export.load_model(finished / "checkpoint", settings(), 500)


def test_cut_weights_are_refused_before_they_are_read(
    finished: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "none-s3", tmp_path / "models" / "none-s3"
    shutil.copytree(finished, run)
    (run / "status").unlink()
    outputs.write_manifest(run)
    (run / "status").write_text("ok\n")
    weights = max((run / "checkpoint").glob("*.distcp"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stop:
        export.main([run], prepared, out.parent)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{weights.name} has " in line and f"(in {weights})" in line and f"delete the folder {run} " in line
    assert not out.exists()


def test_a_cut_export_is_refused(finished: Path, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "none-s3"
    export.export(finished, prepared, out)
    assert read_model(out).digest
    for name, problem in (("model.safetensors", "has "), ("run.json", "is cut short")):
        (out / name).write_bytes((out / name).read_bytes()[:-3])
        with pytest.raises(UserError, match=f"exported model is damaged: {name} {problem}") as caught:
            read_model(out)
        assert f"delete the folder {out.parent} " in str(caught.value)
