"""Invented run folders in the agreed format, with planted effects, for tests of the analysis and of the figures."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from experiments.spec.settings import ProbeConfig
from experiments.training.probes import SamplingProbe, SpectraProbe
from tests.lockstep import reduce_together

DENSE_BYTES = 1_000_000
ITERATIONS = 200
STAGES = 2
MATRICES = (
    ("embedding.word_embeddings.weight", 40_000),
    ("decoder.layers.0.self_attention.linear_qkv.weight", 30_000),
    ("decoder.layers.0.self_attention.linear_proj.weight", 10_000),
    ("decoder.layers.0.mlp.linear_fc1.weight", 40_000),
    ("decoder.layers.0.mlp.linear_fc2.weight", 40_000),
)


def entropy_at(iteration: int) -> float:
    """A steep fall of about 1.5 nats, then a slow rise of about 0.4: the shape that small runs show."""
    return -6.0 + 1.5 * math.exp(-iteration / 15) + 0.002 * iteration


def write_run(
    folder: Path,
    *,
    study: str,
    variant: str,
    seed: int = 1,
    label: str | None = None,
    architecture: str = "gpt",
    compression: dict[str, Any] | None = None,
    status: str = "ok",
    loss: float = 5.0,
    bytes_ratio: float = 1.0,
    ranks: list[int | None] | None = None,
    noise: float = 0.02,
    iterations: int = ITERATIONS,
    warmup: int = 20,
    decide_every: int = 0,
    probe_every: int = 0,
    entropy_seconds: float = 0.0,
    lr: float = 1e-3,
    follows: dict[str, Any] | None = None,
) -> Path:
    """Write one run under ``folder/<variant>-s<seed>``.

    ``loss`` is the final validation loss, ``ranks`` the ranks per stage from iteration ``warmup`` on,
    ``noise`` the standard deviation of the sampled entropy around the full one (nats), ``decide_every`` the
    controller's window.
    """
    compression = compression or {"method": "none"}
    path = folder / f"{variant}-s{seed}"
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *variant.encode()])
    stages = STAGES if architecture == "gpt" else 1
    alpha = compression.get("entropy", {}).get("iteration_rate", 0.1)
    period = max(1, round(1 / alpha))
    last = iterations if status == "ok" else iterations // 2
    events: list[dict[str, Any]] = [
        {
            "event": "start",
            "study": study,
            "run": path.name,
            "iterations": iterations,
            "world": 4,
            "stages": stages,
            "params": 100,
            "params_compressible": 90,
            "bytes_dense": DENSE_BYTES,
        }
    ]
    total, decided = 0, 0
    for t in range(1, last + 1):
        on = ranks is not None and t > warmup
        moved = (
            [None if r is None else max(4, r - 4 * decided) for r in (ranks or [None] * stages)]
            if on
            else [None] * stages
        )
        sent = int(DENSE_BYTES * (bytes_ratio if on else 1.0))
        total += sent
        train_loss = loss + 3.0 * math.exp(-t / 40) + rng.normal(0, 0.05)
        if status == "diverged" and t == last:
            train_loss = math.nan
        rows = []
        for stage in range(stages):
            full = entropy_at(t) + 0.1 * stage + rng.normal(0, 0.01)
            r = moved[stage]
            rows.append(
                {
                    "stage": stage,
                    "rank": r,
                    "entropy": full + rng.normal(0, noise) if t % period == 0 else None,
                    "entropy_full": full,
                    "bytes": sent // stages,
                    "worker_error": 0.9 / math.sqrt(r) if r else None,
                    "mean_error": 0.6 / math.sqrt(r) if r and t % 20 == 0 else None,
                    "error_feedback_ratio": 3 / math.sqrt(r) if r else None,
                    "seconds_compress": 0.001 * r if r else 0.0,
                    "seconds_communicate": 0.002 + 0.0005 * r if r else 0.06,
                    "seconds_decompress": 0.0002 * r if r else 0.0,
                    "seconds_entropy": entropy_seconds if t % period == 0 else 0.0,
                }
            )
            if compression.get("pipeline") and stage > 0:  # stage 0 sends nothing backwards
                sent_back = {
                    "pipeline_bytes": 100,
                    "pipeline_bytes_dense": 400,
                    "pipeline_relative_error": 0.8,
                }
                rows[-1] |= sent_back
        norm = 2.0 * math.exp(-t / 60) + 0.8 + 0.05 * abs(rng.normal())
        events.append(
            {
                "event": "step",
                "iteration": t,
                "loss": train_loss if math.isfinite(train_loss) else None,
                "perplexity": math.exp(train_loss) if math.isfinite(train_loss) else None,
                "lr": 1e-3,
                "grad_norm": norm,
                "grad_norm_clipped": min(norm, 1.0),
                "bytes": sent,
                "seconds": 0.1,
                "tokens_per_second": 1e4,
                "stages": rows,
            }
        )
        if t % 50 == 0:
            value = loss + 3.0 * (math.exp(-t / 40) - math.exp(-iterations / 40))
            events.append(
                {
                    "event": "eval",
                    "iteration": t,
                    "split": "validation",
                    "loss": value,
                    "perplexity": math.exp(value),
                }
            )
        if on and decide_every and t % decide_every == 0:
            decided += 1
            events.append(
                {
                    "event": "decision",
                    "iteration": t,
                    "phase": "active",
                    "reason": "window",
                    "ranks": [max(4, r - 4 * decided) for r in ranks or [] if r],
                    "entropy": [entropy_at(t)] * stages,
                    "entropy_full": [entropy_at(t)] * stages,
                    "r_min": 4,
                    "r_max": 64,
                }
            )
    events.append({"event": "end", "status": status, "iterations": last, "seconds": 20.0, "error": None})
    fine = status == "ok"
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = {
        "study": study,
        "run": path.name,
        "variant": variant,
        "seed": seed,
        "scale": "ci",
        "label": label or variant,
        "status": status,
        "error": None if fine else "loss is not finite",
        "iterations": last,
        "train_loss": loss + 0.02 if fine else None,
        "validation_loss": loss if fine else None,
        "validation_perplexity": math.exp(loss) if fine else None,
        "bytes_total": total,
        "bytes_dense_total": DENSE_BYTES * last,
        "bytes_ratio": total / (DENSE_BYTES * last),
        "mean_rank": float(np.mean([r for r in ranks if r])) if ranks else None,
        "final_ranks": moved,
        "seconds_total": 20.0,
        "seconds_per_step_median": 0.1,
        "tokens_per_second_median": 1e4,
        "seconds_compress_per_step": 0.01,
        "seconds_communicate_per_step": 0.02,
        "seconds_decompress_per_step": 0.002,
        "seconds_entropy_per_step": entropy_seconds,
    }
    if status != "failed":  # a failed run may end before it has a summary
        (path / "summary.json").write_text(json.dumps(summary))
    config = {
        "study": study,
        "variant": variant,
        "label": label or variant,
        "seed": seed,
        "scale": "ci",
        "data": {"vocab_size": 512},
        "model": {"architecture": architecture, "layers": 4, "hidden": 96, "sequence_length": 64},
        "parallel": {"tensor": 1, "pipeline": stages, "data": 2},
        "train": {"iterations": iterations, "lr": lr},
        "compression": compression,
        "probe": {"every": probe_every},
        "follows": follows,
        "provenance": {"versions": {"torch": "2.13.0"}, "git_commit": "0" * 40, "hardware": "2 CPU cores"},
    }
    (path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    if probe_every:
        write_tensors(path / "tensors.parquet", rng, stages, last, probe_every, noise)
    (path / "status").write_text(status + "\n")
    return path


def write_tensors(path: Path, rng: np.random.Generator, stages: int, iterations: int, every: int, noise: float) -> None:
    """Probes with a planted fall, a rise of every log sigma afterwards, and a growing share near zero."""
    rows = []
    names = [(stage, name, numel) for stage in range(stages) for name, numel in MATRICES]
    names.append((0, "<model>", sum(numel for _, _, numel in names)))
    for t in range(1, iterations + 1, every):
        for index, (stage, name, numel) in enumerate(names):
            log_sigma = entropy_at(t) - 1.42 + 0.2 * index + rng.normal(0, 0.01)
            entropies = {
                "gaussian": log_sigma + 1.42,
                "histogram": log_sigma + 1.3,
                "vasicek": log_sigma + 1.31,
                "released": 5.0 + rng.normal(0, 0.05),
            }
            rows.append(
                {
                    "iteration": t,
                    "stage": stage,
                    "parameter": name,
                    "numel": numel,
                    "zero_fraction": 0.7 if "embedding" in name else 0.0,
                    "sigma": math.exp(log_sigma),
                    "log_sigma": log_sigma,
                    "skewness": rng.normal(0, 0.3),
                    "excess_kurtosis": 20 * math.exp(-t / 80) + 3 + index,
                    "near_zero": 0.02 * (1 + t / iterations),
                }
                | {f"entropy_{k}": v for k, v in entropies.items()}
                | {f"sampled_{k}": v + rng.normal(0, noise) for k, v in entropies.items()}
                | {
                    "correlation_previous": 0.5 * math.exp(-t / 30) if t > 1 else math.nan,
                    "correlation_layers": 0.3 * math.exp(-t / 50),
                    "gradient_norm": 1.0,
                }
            )
    pd.DataFrame(rows).to_parquet(path)


def edgc(window: int = 40, alpha: float = 0.1, beta: float = 0.25, **more: Any) -> dict[str, Any]:
    entropy = {"estimator": "histogram", "iteration_rate": alpha, "entry_rate": beta, "sampling": "diagonal"}
    return {"method": "edgc", "policy": "cqm", "window": window, "entropy": entropy, **more}


EQUAL_BYTES: dict[str, tuple[dict[str, Any], float, float]] = {
    # variant: settings, share of the bytes, gap in nats
    "none": ({"method": "none"}, 1.0, 0.0),
    "int8": ({"method": "quantize", "bits": 8}, 0.26, 0.001),
    "int2": ({"method": "quantize", "bits": 2}, 0.07, 0.03),
    "r4": ({"method": "powersgd", "rank": 4}, 0.055, 0.14),
    "r16_int4": ({"method": "powersgd", "rank": 16, "factor_dtype": "int4"}, 0.03, 0.05),
    "r16_int8": ({"method": "powersgd", "rank": 16, "factor_dtype": "int8"}, 0.06, 0.04),
    "r32_int4": ({"method": "powersgd", "rank": 32, "factor_dtype": "int4"}, 0.055, 0.02),
    "one_sided": ({"method": "powersgd", "rank": 32, "factor_dtype": "int4", "one_sided": True}, 0.03, 0.08),
    "topk_6": ({"method": "topk", "density": 0.015}, 0.06, 0.2),
    "sign": ({"method": "sign"}, 0.035, 0.06),
    "edgc": ({"method": "edgc", "policy": "cqm", "factor_dtype": "int4"}, 0.10, 0.01),
}


def write_equal_bytes(root: Path) -> Path:
    """Three seeds; at 6 % the rank 32 with int4 factors is best by far, at 12 % no quantised factors exist."""
    folder = root / "equal_bytes"
    for seed in (1, 2, 3):
        for name, (compression, share, gap) in EQUAL_BYTES.items():
            write_run(
                folder,
                study="equal_bytes",
                variant=name,
                seed=seed,
                loss=5.0 + 0.05 * seed + gap * (1 + 0.02 * seed),
                bytes_ratio=share,
                ranks=[compression.get("rank", 1)] * STAGES if share < 1 else None,
                warmup=0,
                compression=compression,
            )
    return folder


def follow(variant: str, order: str, shuffle: int = 0) -> dict[str, Any]:
    return {"variant": variant, "order": order, "shuffle": shuffle}


POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, tuple[float, float, float]]] = {
    # variant: settings, what it follows, gap in nats of each seed
    "cqm": ({"policy": "cqm"}, None, (0.010, 0.020, 0.030)),
    "even": ({"policy": "schedule", "schedule": [[0, 8]]}, follow("cqm", "even"), (0.011, 0.021, 0.0308)),
    "reversed": ({"policy": "schedule", "schedule": [[0, 8]]}, follow("cqm", "reversed"), (0.05, 0.061, 0.072)),
    "shuffled_1": ({"policy": "schedule", "schedule": [[0, 8]]}, follow("cqm", "shuffled", 1), (0.0, 0.0, 0.09)),
    "shuffled_2": ({"policy": "schedule", "schedule": [[0, 8]]}, follow("cqm", "shuffled", 2), (0.0, 0.04, 0.09)),
    "loss": ({"policy": "loss"}, None, (0.03, 0.03, 0.03)),  # never moves
    "loss_even": ({"policy": "schedule", "schedule": [[0, 8]]}, follow("loss", "even"), (0.01, 0.01, 0.01)),
    "fixed_8": ({"policy": "fixed", "rank": 8}, None, (0.02, 0.02, 0.02)),
}


SETTINGS_OF_POLICIES = [f"policies_{name}" for name in ("bert", "four_replicas", "late", "long", "two_stages")]
# Studies with the analysis and the runs of another one: of these, tables alone.
COPIES = {
    **dict.fromkeys(SETTINGS_OF_POLICIES, "policies"),
    **dict.fromkeys(("six_percent", "six_percent_confirmed", "orthonormal_q"), "methods"),
}


def write_policies(root: Path) -> Path:
    """Three seeds: a policy that acts beside four runs that follow it, and one that never moves beside one."""
    folder = root / "policies"
    for place, seed in enumerate((1, 2, 3)):
        common: dict[str, Any] = {"study": "policies", "seed": seed}
        write_run(folder, variant="none", loss=5.0, **common)
        for name, (settings, follows, gaps) in POLICIES.items():
            write_run(
                folder,
                variant=name,
                loss=5.0 + gaps[place],
                bytes_ratio=0.2,
                ranks=[20 if name == "cqm" else 8] * STAGES,
                decide_every=40 if name == "cqm" else 0,
                compression=edgc() | settings,
                follows=follows,
                **common,
            )
    return folder


def write_optimus_cc(root: Path) -> Path:
    """Two seeds: uncompressed, gradients between stages alone compressed, and those of stage 0 alone."""
    folder = root / "optimus_cc"
    backprop: dict[str, Any] = {"method": "none", "pipeline": {"rank": 8}}
    stages: dict[str, Any] = {"method": "powersgd", "rank": 16, "compressed_stages": 0.75}
    for seed in (1, 2):
        common: dict[str, Any] = {"study": "optimus_cc", "seed": seed}
        write_run(folder, variant="none", loss=5.0 + 0.05 * seed, **common)
        write_run(folder, variant="backprop", loss=5.3 + 0.05 * seed, compression=backprop, **common)
        write_run(
            folder,
            variant="stages",
            loss=5.02 + 0.05 * seed,
            compression=stages,
            ranks=[16] + [None] * (STAGES - 1),
            warmup=0,
            bytes_ratio=0.6,
            **common,
        )
    return folder


MOE_CHANGE = {0: -0.4, 1: -0.2, 2: 0.0, 3: 0.3}  # nats, by which an expert's entropy moves over the run


def write_moe(root: Path) -> Path:
    """Two seeds; expert e of layer l has entropy -5 - l - e/10, moves by ``MOE_CHANGE`` and gets 10 (e + 1) tokens.

    Experts send 400 kB of the 1 MB dense, and half of that where they are compressed.
    """
    folder = root / "moe"
    pairs: dict[str, tuple[dict[str, Any], float, float]] = {
        "none": ({"method": "none"}, 1.0, 0.0),
        "r16": ({"method": "powersgd", "rank": 16}, 0.5, 0.05),
        "r16_dense": ({"method": "powersgd", "rank": 16, "compress_experts": False}, 0.7, 0.02),
    }
    for seed in (1, 2):
        for name, (compression, share, gap) in pairs.items():
            path = write_run(
                folder,
                study="moe",
                variant=name,
                seed=seed,
                loss=5.0 + 0.1 * seed + gap * seed,
                bytes_ratio=share,
                ranks=[16] * STAGES if share < 1 else None,
                warmup=0,
                compression=compression,
            )
            compressed = name == "r16"
            lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            for event in lines:
                if event["event"] == "step":
                    for stage in event["stages"]:
                        stage["expert_bytes"] = (200_000 if compressed else 400_000) // STAGES
            (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
            if name == "none":
                pd.DataFrame(moe_probes()).to_parquet(path / "tensors.parquet")
    return folder


def moe_probes() -> list[dict[str, Any]]:
    rows = []
    for t in [1, *range(10, ITERATIONS + 1, 10)]:
        part = t / ITERATIONS
        for layer in (0, 1):
            prefix = f"decoder.layers.{layer}."
            found = [
                (
                    f"{prefix}mlp.experts.local_experts.{e}.linear_{kind}.weight",
                    -5 - layer - e / 10 + m * part,
                    e,
                )
                for e, m in MOE_CHANGE.items()
                for kind in ("fc1", "fc2")
            ]
            found.append((f"{prefix}self_attention.linear_qkv.weight", -4.0 + 0.1 * part, None))
            rows += [
                {
                    "iteration": t,
                    "stage": 0,
                    "parameter": name,
                    "numel": 36864,
                    "entropy_histogram": entropy,
                    "log_sigma": entropy - 1.42,
                    "gradient_norm": 1.0,
                    "tokens": None if e is None else 10 * (e + 1),
                }
                for name, entropy, e in found
            ]
        rows.append({**rows[-1], "stage": -1, "parameter": "<model>", "entropy_histogram": 0.0})
    return rows


RANK_MODEL_SHAPES = {
    "decoder.layers.0.mlp.linear_fc1.weight": (192, 96),
    "decoder.layers.0.self_attention.linear_proj.weight": (96, 96),
}


def rank_model_scale(iteration: int) -> float:
    """By which all matrices are multiplied: their entropy falls by its logarithm."""
    return math.exp(-iteration / 100)


@lru_cache
def rank_model_matrix(shape: tuple[int, int], draw: int) -> torch.Tensor:
    """Independent normal entries; without a ``draw`` (0) the spectrum 1/i."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
    if not draw:
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        x = (u / torch.arange(1, len(s) + 1)) @ v
    return x


def write_rank_model(root: Path) -> Path:
    """One seed: independent entries without compression, a power law under PowerSGD of rank 8 and 16 without error
    feedback, which has found its singular values after a few steps."""
    folder = root / "rank_model"
    about = {"study": "rank_model", "ranks": None}
    common = {
        "record_full_entropy": True,
        "window": 20,
        "entropy": {"iteration_rate": 0.25, "estimator": "gaussian"},
    }
    variants: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "r8": {"method": "powersgd", "rank": 8, "error_feedback": False},
        "r16": {"method": "powersgd", "rank": 16, "error_feedback": False},
    }
    for name, compression in variants.items():
        path = write_run(folder, variant=name, compression=compression | common, **about)
        settings = EDGCConfig.from_dict(compression | common)
        compressor = settings.build()
        probe = SpectraProbe(ProbeConfig(every=20, spectra=True), settings, 0, compressor, reports=True)
        for t in range(1, ITERATIONS + 1):
            if name == "none" and not probe.config.due(t):
                continue
            draw = t if name == "none" else 0
            gradients = [
                Gradient(key, (rank_model_scale(t) * rank_model_matrix(shape, draw)).float())
                for key, shape in RANK_MODEL_SHAPES.items()
            ]
            probe.observe(t, gradients)
            reduce_together([compressor], [gradients], settings.fixed_rank)
            probe.end_iteration(t, skipped=False)
        pd.DataFrame(probe.rows).to_parquet(path / "spectra.parquet")
    return folder


def write_methods(root: Path) -> Path:
    """Two seeds of seven methods; low rank costs most, one run diverged and one failed without a summary."""
    folder = root / "methods"
    for seed in (1, 2):
        base = 5.0 + 0.05 * seed
        common: dict[str, Any] = {"study": "methods", "seed": seed}
        write_run(folder, variant="none", label="uncompressed", loss=base, **common)
        for rank, gap in ((4, 0.12), (8, 0.06), (16, 0.02)):
            write_run(
                folder,
                variant=f"powersgd_r{rank}",
                label=f"PowerSGD r={rank}",
                loss=base + gap + 0.004 * seed,
                compression={"method": "powersgd", "rank": rank},
                ranks=[rank] * 2,
                warmup=0,
                bytes_ratio=0.014 * rank,
                **common,
            )
        for policy, gap in (("cqm", 0.03), ("released", 0.05)):
            write_run(
                folder,
                variant=f"edgc_{policy}",
                label=f"EDGC ({policy})",
                loss=base + gap,
                compression=edgc() | {"policy": policy},
                ranks=[24, 28],
                bytes_ratio=0.2,
                decide_every=40,
                status="diverged" if (policy, seed) == ("released", 2) else "ok",
                **common,
            )
    write_run(
        folder,
        study="methods",
        variant="powersgd_r2",
        seed=1,
        compression={"method": "powersgd", "rank": 2},
        ranks=[2, 2],
        status="failed",
    )
    return folder


def write_entropy_trend(root: Path) -> Path:
    folder = root / "entropy_trend"
    write_run(folder, study="entropy_trend", variant="gpt", label="GPT", probe_every=10)
    write_run(folder, study="entropy_trend", variant="bert", label="BERT", architecture="bert", probe_every=10)
    return folder


def write_rank_sweep(root: Path) -> Path:
    folder = root / "rank_sweep"
    write_run(folder, study="rank_sweep", variant="none", loss=5.0)
    for rank in (4, 8, 16):
        write_run(
            folder,
            study="rank_sweep",
            variant=f"r{rank}",
            label=f"r={rank}",
            loss=5.0 + 0.4 / rank,
            warmup=0,
            compression={"method": "powersgd", "rank": rank},
            ranks=[rank] * 2,
            bytes_ratio=0.014 * rank,
        )
    return folder


def write_window_ablation(root: Path) -> Path:
    """Three seeds, and a run of each that sampled at every iteration."""
    folder = root / "window_ablation"
    for seed in (1, 2, 3):
        for window, alpha in ((10, 0.1), (20, 0.1), (50, 0.1), (20, 1.0)):
            write_run(
                folder,
                study="window_ablation",
                variant=f"w{window}" + "_every" * (alpha == 1),
                seed=seed,
                label=f"w={window}" + ", alpha 1" * (alpha == 1),
                loss=5.03,
                compression=edgc(window, alpha),
                ranks=[24, 28],
                decide_every=window,
                bytes_ratio=0.2,
            )
    return folder


def write_sampling_ablation(root: Path) -> Path:
    folder = root / "sampling_ablation"
    for alpha in (0.1, 1.0):
        for beta in (0.25, 1.0):
            write_run(
                folder,
                study="sampling_ablation",
                variant=f"a{alpha:g}_b{beta:g}",
                loss=5.03,
                compression=edgc(20, alpha, beta),
                ranks=[24, 28],
                decide_every=20 if beta == 1 else 40,
                noise=0.0 if beta == 1 else 0.02,
                bytes_ratio=0.2,
                entropy_seconds=0.01 * beta,
            )
    path = write_run(folder, study="sampling_ablation", variant="grid", loss=5.0)
    write_samplings(path / "sampling.parquet")
    return folder


def write_samplings(path: Path) -> None:
    """Every rule on normal entries of the entropy that all synthetic runs have."""
    config = ProbeConfig(every=1, entry_rates=(0.5, 0.25, 0.05))
    probe = SamplingProbe(config, EDGCConfig(min_compression_elements=64), 0, reports=True)
    for t in range(1, ITERATIONS + 1):
        generator = torch.Generator().manual_seed(t)
        sigma = math.exp(entropy_at(t) - 1.42)
        matrices = {name: sigma * torch.randn(96, 96, generator=generator) for name in ("fc1", "fc2")}
        probe.observe(t, [Gradient(name, matrix) for name, matrix in matrices.items()])
        probe.end_iteration(t, skipped=False)
    for row in probe.rows:
        row["seconds"] = 1e-3 * row["rate"]  # tables of synthetic runs repeat
    pd.DataFrame(probe.rows).to_parquet(path)


def write_tuning(root: Path, study: str = "tuning") -> Path:
    """Three learning rates of which the middle one is best, one diverged run at the highest."""
    for rate, loss in ((0.001, 5.2), (0.002, 5.0), (0.004, 5.1)):
        for seed in (1, 2):
            status = "diverged" if (rate, seed) == (0.004, 2) else "ok"
            about = {"variant": f"lr_{rate:g}".replace(".", ""), "label": "no compression", "lr": rate}
            write_run(root / study, study=study, seed=seed, status=status, loss=loss + seed / 100, **about)
    return root


def write_all(root: Path) -> Path:
    """Every trained study but the copies under ``root`` (the folder of one scale)."""
    for write in (
        write_methods,
        write_equal_bytes,
        write_policies,
        write_optimus_cc,
        write_moe,
        write_entropy_trend,
        write_rank_sweep,
        write_rank_model,
        write_window_ablation,
        write_sampling_ablation,
        write_tuning,
    ):
        write(root)
    write_tuning(root, "budgets")
    return root
