"""Export of a Megatron checkpoint as a Hugging Face GPT-2 folder that `transformers` and `lm_eval` load.

The checkpoint of any tensor and pipeline split is read in one process, into one unsplit model; that model and
the exported one must give the same logits, or nothing is published.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import check_writable
from experiments.common.yaml_settings import load_yaml
from experiments.data.folder import check_whole, load_info
from experiments.evaluation.gpt2 import largest_difference, to_gpt2
from experiments.evaluation.inputs import READ
from experiments.spec.settings import ParallelConfig, RunConfig, recorded
from experiments.training import outputs

TOLERANCE = 1e-4  # largest absolute difference of a logit, fp32
MARKER = "run.json"  # in every exported folder, also of runs that left no model


def check_run(folder: Path) -> tuple[RunConfig, str]:
    """Settings and status of a finished run folder.

    Raises:
        UserError: unfinished run, another architecture, or a checkpoint that is missing or not as it was written.
    """
    status = outputs.read_status(folder)
    if status == outputs.UNFINISHED:
        raise UserError("the run is not finished: no status file", where=folder, fix="train it first")
    path = folder / "run.yaml"
    config = recorded(load_yaml(path), path)
    for key, value, exportable in (
        ("architecture", config.model.architecture, "gpt"),
        ("experts", config.model.experts, None),
    ):
        if value != exportable:
            message = f"model.{key} = {value!r} cannot be exported"
            raise UserError(message, where=folder, fix="only gpt runs without experts become GPT-2")
    if status == "ok":
        if not (folder / "checkpoint").is_dir():
            fix = "set train.checkpoint: true in the study and train again"
            raise UserError("the run left no checkpoint", where=folder, fix=fix)
        outputs.check(folder, ("checkpoint/", "run.yaml"))
    return config, status


def read_tokenizer(data: Path, config: RunConfig, fingerprint: str | None) -> Any:
    """``PreTrainedTokenizerFast`` of a data folder that must be the run's own, by its ``fingerprint``."""
    from transformers import PreTrainedTokenizerFast

    from experiments.data.tokenizer import END_OF_TEXT, PAD

    info, path = load_info(data), data / "tokenizer.json"
    if fingerprint is not None and info.fingerprint != fingerprint:
        message = "the data's fingerprint is not the one recorded by the run"
        raise UserError(message, where=data / "data.yaml", fix="use the data folder that the run was trained on")
    check_whole(data, info, (path.name,))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=config.model.sequence_length,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # as in training: a special token spelled out in a text is ordinary text
    )


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """A world of one, so that Megatron's model can be built and its checkpoint read without a launcher."""
    import torch.distributed as dist

    from edgc.megatron import cpu_shims

    cpu_shims.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(1, 1)
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def load_model(checkpoint: Path, config: RunConfig, vocab_size: int) -> Any:
    """Unsplit fp32 model of a checkpoint of any split; call it inside :func:`single_process`.

    Raises:
        UserError: the checkpoint is unreadable, of another model or of another vocabulary, or would run code.
    """
    from megatron.core import dist_checkpointing

    from edgc.checkpoints import unpickling
    from edgc.megatron.checkpoint import readable
    from experiments.spec.settings import padded_vocabulary
    from experiments.training.model import build_model

    alone = config.model_copy(
        update={
            "parallel": ParallelConfig(),
            "train": config.train.model_copy(update={"precision": "fp32"}),
            "model": config.model.model_copy(update={"dropout": 0.0}),
        }
    )
    model = build_model(alone, vocab_size)
    unpickling.check(checkpoint)
    with readable(checkpoint, "train the run again"):
        saved = dist_checkpointing.load_tensors_metadata(str(checkpoint))
        # Checked here because Megatron loads an embedding of any number of rows, filling up or cutting off.
        rows = saved["embedding.word_embeddings.weight"].global_shape[0]
        if rows != padded_vocabulary(vocab_size, config.parallel.tensor):
            message = f"{rows} embedding rows do not fit {vocab_size} tokens"
            raise UserError(message, where=checkpoint, fix="use the data folder that the run was trained on")
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))["model"]
    model.load_state_dict(state)
    return model


def export(folder: Path, data: Path, out: Path) -> dict[str, Any]:
    """Export one run folder to ``out``, whole or not at all; returns what is written to its ``run.json``.

    A run that ended as diverged, failed or interrupted gets a folder with ``run.json`` only, so that it keeps
    its rows in the tables.
    """
    config, status = check_run(folder)
    summary = {
        "study": config.study,
        "run": config.name,
        **{key: getattr(config, key) for key in ("variant", "label", "seed", "scale")},
        "method": config.edgc.method,
        "status": status,
        "model": status == "ok",
        "largest_logit_difference": None,
    }
    check_writable(out.parent)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        if status == "ok":
            summary |= _write_model(folder, config, data, temporary)
        (temporary / MARKER).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        manifest.publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return summary


def _write_model(folder: Path, config: RunConfig, data: Path, out: Path) -> dict[str, Any]:
    """Write model and tokenizer; returns the largest difference of a logit, and size and checksum of the files."""
    fingerprint = load_yaml(folder / "run.yaml").get("provenance", {}).get("data_fingerprint")
    tokenizer = read_tokenizer(data, config, fingerprint)
    vocab_size, end_of_text = len(tokenizer), tokenizer.eos_token_id
    model = load_model(folder / "checkpoint", config, vocab_size)
    exported = to_gpt2(model, vocab_size=vocab_size, activation=config.model.activation, end_of_text=end_of_text)
    difference = largest_difference(model, exported)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{folder}: exported logits differ by {difference:.2e} > {TOLERANCE:.0e}; nothing published")
    exported.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    files = {name: asdict(manifest.entry(out / name)) for name in READ}
    return {"largest_logit_difference": difference, "files": files}


@main_guard
def main(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    data: Annotated[Path, typer.Option(help="prepared data that the runs used")],
    out: Annotated[Path, typer.Option(help="each run gets a folder of its name here")],
) -> None:
    """Export run folders, several in one process because its imports take longer than the work."""
    twice = next((run for run in runs if [other.name for other in runs].count(run.name) > 1), None)
    if twice is not None:
        raise UserError(f"two run folders are called {twice.name}", where=twice, fix="export them to different folders")
    for folder in runs:
        check_run(folder)  # all bad input is found before anything is written
    # Deprecations inside Megatron, one screen a model.
    warnings.filterwarnings("ignore", module="megatron|torch")
    from transformers.utils import logging

    logging.disable_progress_bar()
    with single_process():
        for folder in runs:
            summary = export(folder, data, out / folder.name)
            difference = summary["largest_logit_difference"]
            note = f"logits equal within {difference:.1e}" if difference is not None else "no model"
            print(f"{folder} -> {out / folder.name}: {summary['status']}, {note}")


if __name__ == "__main__":
    typer.run(main)
