"""The study of predicted errors: what the probe writes, against numpy, and what the tables say of planted spectra."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from edgc.compressors import Gradient
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.analyse import rank_model
from experiments.common.yaml_settings import validate
from experiments.spec.settings import ProbeConfig
from experiments.training.probes import SpectraProbe
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd
from tests.unit.invented_runs import run

NAME, SHAPE, RANK = "decoder.layers.0.mlp.linear_fc1.weight", (40, 28), 8
BIAS = "decoder.layers.0.mlp.linear_fc1.bias"
GAUSSIAN = {"method": "powersgd", "rank": RANK, "entropy": {"estimator": "gaussian"}}


def drawn(worker: int, step: int) -> torch.Tensor:
    """A gradient with something in common to all workers and steps."""
    common = torch.randn(SHAPE, generator=torch.Generator().manual_seed(99))
    return 3 * common + torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + worker))


def probe_of(compressor: Any, **more: Any) -> SpectraProbe:
    config = ProbeConfig(every=2, spectra=True)
    return SpectraProbe(config, EDGCConfig.from_dict(GAUSSIAN | more), 1, compressor, reports=True)


class Together(SpectraProbe):
    """One of two probes in one process: averages with what the other has."""

    other: SpectraProbe | None = None

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        if self.other is not None:
            self._pending = {name: (m + self.other._pending[name]) / 2 for name, m in self._pending.items()}
        super().end_iteration(iteration, skipped)


def two_steps() -> SpectraProbe:
    """The probe of worker 0 of two, after two reductions of a matrix and a vector."""
    workers = [power_sgd(min_elements=1000, always_factor=True) for _ in range(2)]
    config, settings = ProbeConfig(every=2, spectra=True), EDGCConfig.from_dict(GAUSSIAN)
    probes = [Together(config, settings, 1, worker, reports=w == 0) for w, worker in enumerate(workers)]
    probes[0].other = probes[1]
    for step in (1, 2):
        gradients = [[Gradient(NAME, drawn(w, step)), Gradient(BIAS, torch.ones(2000))] for w in range(2)]
        for probe, own in zip(probes, gradients, strict=True):
            probe.observe(step, own)
        reduce_together(workers, gradients, RANK)
        for probe in probes:
            probe.end_iteration(step, skipped=False)
    assert probes[1].rows == [], "one replica describes"
    return probes[0]


def errors_of(x: np.ndarray, ranks: list[int]) -> list[float]:
    s = np.linalg.svd(x, compute_uv=False)
    return [float(np.linalg.norm(s[r:]) / np.linalg.norm(s)) for r in ranks]


def test_rows_agree_with_powersgd_and_singular_values_by_hand() -> None:
    probe = two_steps()
    # PowerSGD in float64: the range of P^ is all that its error depends on.
    start = random_factor(0, 1, NAME, SHAPE[1], RANK).double().numpy()
    m = [drawn(w, 1).double().numpy() for w in range(2)]
    basis = np.linalg.qr((m[0] + m[1]) / 2 @ start)[0]
    error = m[0] - basis @ (basis.T @ m[0])
    other = m[1] - basis @ (basis.T @ m[1])
    factor = ((m[0] + m[1]) / 2).T @ basis
    second = [drawn(0, 2).double().numpy() + error, drawn(1, 2).double().numpy() + other]
    basis = np.linalg.qr((second[0] + second[1]) / 2 @ factor)[0]
    mean = (second[0] + second[1]) / 2
    found = basis.T @ mean
    left = mean - basis @ found

    rows = {(row["iteration"], row["of"]): row for row in probe.rows}
    assert list(rows) == [(t, of) for t in (1, 2) for of in ("gradient", "mean")]
    ranks = [4, 8, 12, 16, 20, 24, 28]
    for (t, of), x in {
        (1, "gradient"): m[0],
        (1, "mean"): (m[0] + m[1]) / 2,
        (2, "gradient"): drawn(0, 2).double().numpy(),
        (2, "mean"): mean,
    }.items():
        row = rows[t, of]
        assert (row["parameter"], row["stage"], row["rows"], row["columns"]) == (NAME, 1, *SHAPE)
        assert row["norm"] == pytest.approx(np.linalg.norm(x), rel=1e-5)
        assert row["sigma"] == pytest.approx(x.std(), rel=1e-5)
        assert row["entropy"] == pytest.approx(math.log(x.std()) + 0.5 * math.log(2 * math.pi * math.e), abs=1e-5)
        assert row["ranks"] == ranks
        assert row["errors"] == pytest.approx(errors_of(x, ranks), abs=1e-5)
        assert (row["rank"] is None) == (of == "gradient")
    row = rows[2, "mean"]
    assert row["input_sq"] == pytest.approx(row["norm"] ** 2)
    s = np.linalg.svd(found, compute_uv=False)
    assert row["rank"] == RANK
    assert row["powersgd_error"] == pytest.approx(np.linalg.norm(left) / np.linalg.norm(mean), rel=1e-4)
    assert row["powersgd_error"] > row["errors"][ranks.index(RANK)]
    assert row["singular_sq"] == pytest.approx(s**2, rel=1e-3)
    assert row["best_sq"] == pytest.approx(np.linalg.svd(mean, compute_uv=False)[:RANK] ** 2, rel=1e-4)


def test_only_probed_whole_iterations_of_sound_matrices_have_rows() -> None:
    compressor = power_sgd(always_factor=True)
    probe = probe_of(compressor)

    def step(iteration: int, tensor: torch.Tensor, *, skipped: bool = False, rank: int | None = RANK) -> None:
        gradients = [Gradient(NAME, tensor)]
        probe.observe(iteration, gradients)
        reduce_together([compressor], [gradients], rank)
        probe.end_iteration(iteration, skipped=skipped)

    step(2, drawn(0, 2), skipped=True)
    step(3, drawn(0, 3))
    step(4, torch.zeros(SHAPE))  # M is E, which is not zero
    step(6, torch.full(SHAPE, math.nan))
    step(8, drawn(0, 1), rank=None)  # what is sent dense is described as gradient alone
    assert [(row["iteration"], row["of"]) for row in probe.rows] == [(4, "mean"), (8, "gradient")]
    resumed = probe_of(compressor)
    resumed.load_state_dict(probe.state_dict())
    assert resumed.rows == probe.rows
    assert resumed.rows is not probe.rows


def test_spectra_without_probed_iterations_are_refused() -> None:
    with pytest.raises(UserError, match="give every"):
        validate(ProbeConfig, {"spectra": True}, "study.yaml")


SHAPES = {"decoder.layers.0.mlp.linear_fc1.weight": (192, 96),
          "decoder.layers.0.self_attention.linear_proj.weight": (96, 96)}  # fmt: skip
COMMON = {"record_full_entropy": True, "window": 20, "entropy": {"iteration_rate": 0.25, "estimator": "gaussian"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "r8": {"method": "powersgd", "rank": 8, "error_feedback": False},
    "r16": {"method": "powersgd", "rank": 16, "error_feedback": False},
}


@lru_cache
def planted(shape: tuple[int, int], draw: int) -> torch.Tensor:
    """Independent normal entries; without a ``draw`` (0) the spectrum 1/i."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
    if not draw:
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        x = (u / torch.arange(1, len(s) + 1)) @ v
    return x


@pytest.fixture(scope="module")
def found() -> dict[str, pd.DataFrame]:
    """The tables of one seed: independent entries without compression, a power law under PowerSGD of rank 8 and 16
    without error feedback, which has found its singular values after a few steps. Entropies fall by 0.01 a step."""
    made = []
    for name, compression in VARIANTS.items():
        settings = EDGCConfig.from_dict(compression | COMMON)
        compressor = settings.build()
        probe = SpectraProbe(ProbeConfig(every=20, spectra=True), settings, 0, compressor, reports=True)
        for t in range(1, 201):
            if name != "none" or probe.config.due(t):
                matrices = [(key, planted(shape, t if name == "none" else 0)) for key, shape in SHAPES.items()]
                gradients = [Gradient(key, (math.exp(-t / 100) * matrix).float()) for key, matrix in matrices]
                probe.observe(t, gradients)
                reduce_together([compressor], [gradients], settings.fixed_rank)
                probe.end_iteration(t, skipped=False)
        made.append(run(name, compression=compression | COMMON))
        made[-1].__dict__["spectra"] = pd.DataFrame(probe.rows)
    return {name: pd.DataFrame(rows) for name, rows in rank_model.tables(made).items()}


def rows_of(found: dict[str, pd.DataFrame], **where: Any) -> pd.DataFrame:
    table = found["table"]
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table)
    return table


def test_noise_is_predicted_by_sigma_and_g(found: dict[str, pd.DataFrame]) -> None:
    rows = rows_of(found, variant="none", of="gradient", ranks="one")
    # Ranks around 8, the lower one of the compressed runs; a quarter of it is no multiple of 4.
    assert sorted(rows["rank"].unique()) == [4, 8, 16, 24]
    assert set(rows["predictor"]) == {"iid", "anchored"}
    assert (rows["abs_log_p90"] < 0.02).all()
    # Probes at 1, 20, 40, ...; t0 is 40, after 20 of 200 iterations, and the table begins after it.
    assert (rows["predictions"] == 8 * len(SHAPES)).all()


def test_a_power_law_is_off_by_its_known_factor(found: dict[str, pd.DataFrame]) -> None:
    squares = np.arange(1, 97, dtype=float) ** -2.0
    for rank in (4, 8, 16, 24):
        power = math.sqrt(squares[rank:].sum() / squares.sum())
        # Monte Carlo of the noise that sigma g(r) stands for, one shape after the other.
        noise = [errors_of(np.random.default_rng(5).standard_normal(shape), [rank])[0] for shape in SHAPES.values()]
        expected = np.median(np.log(np.array(noise) / power))
        for of in ("gradient", "mean"):
            row = rows_of(found, variant="r8", of=of, actual="best", predictor="iid", rank=rank).iloc[0]
            assert row["log_median"] == pytest.approx(expected, abs=0.02)
    # The error at the rank in use scales with the entropy, whatever the spectrum.
    row = rows_of(found, variant="r8", of="mean", actual="best", predictor="anchored", rank=8).iloc[0]
    assert row["abs_log_p90"] < 1e-3
    row = rows_of(found, variant="r8", of="mean", actual="best", predictor="spectral", rank=16).iloc[0]
    assert row["abs_log_p90"] < 0.2


def test_powersgd_that_has_converged_is_as_good_as_the_best_at_its_own_and_at_another_runs_rank(
    found: dict[str, pd.DataFrame],
) -> None:
    for predictor, rank in (
        ("iid", 8),
        ("anchored", 8),
        ("anchored_gradient", 8),
        ("iid", 16),
        ("spectral", 16),
    ):
        best, own = (
            rows_of(found, variant="r8", of="mean", actual=kind, predictor=predictor, rank=rank).iloc[0]
            for kind in ("best", "powersgd")
        )
        assert own["log_median"] == pytest.approx(best["log_median"], abs=2e-3)
        assert own["predictions"] == best["predictions"]
    own = rows_of(found, variant="r16", actual="powersgd", predictor="spectral")
    # Cut to the first eight of sixteen values the error is known, and the other run has it.
    assert own.loc[own["ranks"] == "one", "rank"].tolist() == [8]
    assert (own["abs_log_p90"] < 2e-3).all()


def test_the_tail_is_judged_from_exact_values_above_the_rank_in_use(found: dict[str, pd.DataFrame]) -> None:
    exact = rows_of(found, variant="r8", actual="best", predictor="tail")
    assert sorted(exact.loc[exact["ranks"] == "one", "rank"]) == [16, 24]
    other = rows_of(found, variant="r8", actual="best", predictor="spectral", rank=16).iloc[0]
    one = exact[exact["rank"] == 16].iloc[0]
    assert one["log_median"] == pytest.approx(other["log_median"], abs=2e-3)


def test_errors_over_training_pool_kinds_and_ranks(found: dict[str, pd.DataFrame]) -> None:
    errors = found["errors"]
    assert sorted(errors["window"].unique()) == [20 * k for k in range(1, 11)]
    assert set(errors["kind"]) == {"fc1", "projection", "<layers>"}
    rows = errors[(errors["variant"] == "r8") & (errors["of"] == "mean") & (errors["predictor"] == "iid")]
    rows = rows[(rows["actual"] == "best") & (rows["kind"] == "<layers>") & (rows["window"] == 200)]
    rows = rows.set_index(["ranks", "rank"])
    squares = np.arange(1, 97, dtype=float) ** -2.0
    assert rows.loc[("one", 16), "actual_median"] == pytest.approx(
        math.sqrt(squares[16:].sum() / squares.sum()), rel=1e-4
    )
    assert rows.xs("above", level="ranks")["predictions"].tolist() == [2 * len(SHAPES)]
    anchored = errors[errors["predictor"].str.startswith("anchored")]
    assert anchored["window"].min() == 40, "nothing is anchored before the end of warm-up"


def test_a_run_without_spectra_keeps_its_row() -> None:
    written = rank_model.tables([run("none", status="failed")])
    assert [row["status"] for row in written["table"]] == ["failed"]
    assert {row["rows"] for row in written["stiffness"]} == {1024, 4096}


def test_stiffness_agrees_with_its_limit_and_with_simulation(found: dict[str, pd.DataFrame]) -> None:
    table = found["stiffness"].set_index(["rows", "rank"])
    assert table.loc[(1024, 64), "saturates_nats"] == pytest.approx(0.088, abs=0.0005)
    assert table.loc[(4096, 64), "saturates_nats"] == pytest.approx(0.022, abs=0.0005)
    assert table.loc[(1024, 64), "limit_ranks_per_nat"] == pytest.approx(2 * 1024 / 4)
    # 2 p / (1 + sqrt(lambda))^2 with p = 96 and lambda = 1/2.
    assert table.loc[(192, 8), "limit_ranks_per_nat"] == pytest.approx(192 / (1 + math.sqrt(0.5)) ** 2)
    for shape, rank in (((4096, 4096), 64.0), ((192, 96), 1.0)):
        limit = 2 * min(shape) / (1 + math.sqrt(min(shape) / max(shape))) ** 2
        assert rank_model.per_nat(shape, rank) == pytest.approx(limit, rel=0.1)
    # What it means depends on the share of the rank alone: 16 of 256 is 64 of 1024.
    s = np.linalg.svd(np.random.default_rng(3).standard_normal((256, 256)), compute_uv=False)
    simulated = math.log(np.linalg.norm(s[4:]) / np.linalg.norm(s[16:]))
    assert table.loc[(1024, 64), "saturates_nats"] == pytest.approx(simulated, rel=0.05)
    curves = found["cqm"]
    assert curves.groupby(["rows", "columns", "rank_start"]).ngroups == 3
    crossing = curves[(curves["rows"] == 1024) & (curves["rank"] <= 16)]["change_nats"].max()
    assert -0.088 - (curves["change_nats"].iloc[1] - curves["change_nats"].iloc[0]) <= crossing <= -0.0875


def test_noise_of_the_window_mean_is_free_of_the_trend() -> None:
    compression = {"method": "powersgd", "rank": 8, "window": 10, "entropy": {"iteration_rate": 0.5}}
    r8 = run("r8", compression=compression)
    rng = np.random.default_rng(4)
    t = np.arange(1, 2001)
    # Odd iterations are not measured, so what they hold must not matter.
    entropy = 3 - 0.001 * t + np.where(t % 2 == 0, rng.normal(0, 0.1, len(t)), 50.0)
    r8.config["train"]["iterations"] = 2000
    r8.__dict__["stages"] = pd.DataFrame({"iteration": t.astype(float), "stage": 0.0, "entropy_full": entropy})
    [(noise, moved)] = rank_model.noise(r8)
    assert noise == pytest.approx(0.1 / math.sqrt(5), rel=0.15)
    # 180 windows of 10 after warm-up: 179 * 10 iterations apart.
    assert moved == pytest.approx(1.79, abs=0.2)
