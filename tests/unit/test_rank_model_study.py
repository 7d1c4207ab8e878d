"""The study of predicted errors: what the probe writes, against numpy, and what the tables say of planted spectra."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet

from edgc.compressors import Gradient
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig
from edgc.control.rank_model import error
from edgc.errors import UserError
from edgc.measurement.spectral import MatrixSpectrum
from experiments.analyse import rank_model
from experiments.analyse.runs import Run
from experiments.common.yaml_settings import validate
from experiments.spec.settings import ProbeConfig
from experiments.training.probes import SpectraProbe
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd
from tests.unit.conftest import REFERENCE
from tests.unit.invented_runs import run

NAME, SHAPE, RANK = "decoder.layers.0.mlp.linear_fc1.weight", (40, 28), 8
BIAS = "decoder.layers.0.mlp.linear_fc1.bias"
GAUSSIAN = {"method": "powersgd", "rank": RANK, "entropy": {"estimator": "gaussian"}}
NUMBERS = ["abs_log_median", "abs_log_p90", "log_median"]


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
    left_0 = m[0] - basis @ (basis.T @ m[0])
    other = m[1] - basis @ (basis.T @ m[1])
    factor = ((m[0] + m[1]) / 2).T @ basis
    second = [drawn(0, 2).double().numpy() + left_0, drawn(1, 2).double().numpy() + other]
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
    assert resumed.rows == probe.rows and resumed.rows is not probe.rows
    with pytest.raises(UserError, match="give every"):
        validate(ProbeConfig, {"spectra": True}, "study.yaml")


@pytest.fixture(scope="module")
def kept() -> list[Run]:
    """Kept runs of PowerSGD, of ranks 8 and 16, and one without compression: of each the first stage, as if probed
    every 60 iterations."""
    found = list[Run]()
    for name in ("r8-s1", "r16-s1", "none-s1"):
        path = REFERENCE / "workstation" / "rank_model" / "runs" / f"{name}.parquet"
        columns = parquet.read_table(path, columns=["run.yaml", "spectra.parquet"])
        spectra = columns["spectra.parquet"].combine_chunks().drop_null()
        frame = pyarrow.Table.from_struct_array(spectra).to_pandas().query("stage == 0 and iteration % 60 == 0")
        found.append(Run(path, "ok", yaml.safe_load(columns["run.yaml"][0].as_py())))
        found[-1].__dict__.update(spectra=frame, events={})
    return found


@pytest.fixture(scope="module")
def found(kept: list[Run]) -> dict[str, pd.DataFrame]:
    return {name: pd.DataFrame(rows) for name, rows in rank_model.tables(kept).items()}


def test_errors_are_predicted_from_sigma_entropy_and_spectrum(kept: list[Run], found: dict[str, pd.DataFrame]) -> None:
    other = kept[0].spectra.set_index(rank_model.PLACE)["powersgd_error"].dropna()
    gradients = kept[1].spectra.query("of == 'gradient'").set_index(rank_model.PLACE)["entropy"]
    spectra = kept[1].spectra.query("of == 'mean' and parameter.str.contains('layers')")
    logs: dict[tuple[str, str, int], list[float]] = {}
    ratios = []
    for _, rows in spectra.groupby(["stage", "parameter"]):
        start = rows[rows["iteration"] == 60].iloc[0]  # the first that is probed after a tenth of the 400 iterations
        for row in rows[rows["iteration"] > 60].itertuples():
            shape = (row.rows, row.columns)
            best, first = (dict(zip(one.ranks, one.norm * np.array(one.errors), strict=True)) for one in (row, start))
            place, began = ((row.stage, row.parameter, one.iteration) for one in (row, start))
            moved = {"anchored": math.exp(row.entropy - start.entropy)}
            moved["anchored_gradient"] = math.exp(gradients[place] - gradients[began])
            spectrum = MatrixSpectrum(shape, list(row.singular_sq), row.input_sq)
            exact = MatrixSpectrum(shape, list(row.best_sq), row.norm**2)
            for rank in (8, 32):
                share = error(*shape, rank) / error(*shape, 16)
                predicted = {name: first[16] * change * share for name, change in moved.items()}
                predicted["iid"] = row.sigma * error(*shape, rank)
                predicted["spectral"] = math.sqrt(spectrum.errors_sq([rank])[0])
                if rank > 16:
                    predicted["tail"] = math.sqrt(exact.errors_sq([rank])[0])
                anchor = start.norm * start.powersgd_error / first[16]  # on the same kind of error
                for name, value in predicted.items():
                    logs.setdefault(("best", name, rank), []).append(math.log(value / best[rank]))
                    if rank == 8:
                        ratio = value * (anchor if name in moved else 1) / (row.norm * other[place])
                        logs.setdefault(("powersgd", name, rank), []).append(math.log(ratio))
            if row.iteration == 360:
                ratios.append(row.sigma * error(*shape, 32) / best[32])
    table = found["table"].query("variant == 'r16' and of == 'mean' and matrices == '<layers>' and ranks == 'one'")
    table = table.set_index(["actual", "predictor", "rank"])
    for key, expected in logs.items():
        row, size = table.loc[key], np.abs(expected)
        assert row["predictions"] == len(expected) > 30
        assert row["log_median"] == pytest.approx(np.median(expected))
        assert row[["abs_log_median", "abs_log_p90"]].tolist() == pytest.approx(np.percentile(size, (50, 90)).tolist())
    assert ("best", "tail", 8) not in table.index and ("powersgd", "spectral", 16) not in table.index, "no prediction"
    for variant, ranks, rank in (("r16", "below", 8), ("r8", "above", 16)):  # pooled, of the one other run
        where = f"variant == '{variant}' and actual == 'powersgd' and matrices == '<layers>'"
        rows = found["table"].query(where).set_index("predictor")[["ranks", "rank", "predictions", *NUMBERS]]
        assert set(rows.index) == {"iid", "anchored", "anchored_gradient", "spectral"}
        pooled, single = rows[rows["ranks"] == ranks], rows[rows["rank"] == rank]
        pd.testing.assert_frame_equal(pooled[["predictions", *NUMBERS]], single[["predictions", *NUMBERS]])
    where = "variant == 'none' and of == 'gradient' and matrices == '<layers>' and ranks == 'one'"
    rows = found["table"].query(where).set_index(["predictor", "rank"])
    # Ranks around 8, the lower one of the compressed runs; a quarter of it is no multiple of 4.
    assert set(rows.index) == {(name, rank) for name in ("iid", "anchored") for rank in (4, 8, 16, 24)}
    spectra = kept[2].spectra.query("parameter.str.contains('layers') and iteration > 60")
    ratios_8 = [
        row.sigma * error(row.rows, row.columns, 8) / (row.norm * row.errors[list(row.ranks).index(8)])
        for row in spectra.itertuples()
    ]
    assert rows.loc[("iid", 8), "log_median"] == pytest.approx(np.median(np.log(ratios_8)))
    assert set(found["errors"]["kind"]) == {"qkv", "projection", "fc1", "fc2", "other", "<layers>"}
    where = "variant == 'r16' and window == 360 and of == 'mean' and actual == 'best' and predictor == 'iid'"
    rows = found["errors"].query(f"{where} and kind == '<layers>' and ranks == 'one'").set_index("rank")
    assert rows.loc[32, "ratio_median"] == pytest.approx(np.median(ratios))
    above = found["errors"].query(f"{where} and kind == '<layers>' and ranks == 'above'")
    assert above["predictions"].tolist() == [rows.loc[[32, 48], "predictions"].sum()]
    anchored = found["errors"].query("predictor == 'anchored'")
    assert anchored["window"].min() == 80, "nothing is anchored before the end of warm-up"
    written = rank_model.tables([run("none", status="failed")])
    assert [row["status"] for row in written["table"]] == ["failed"], "a run without spectra keeps its row"


def test_stiffness_agrees_with_its_limit_and_with_simulation(found: dict[str, pd.DataFrame]) -> None:
    table = found["stiffness"].set_index(["rows", "columns", "rank"])
    assert table.loc[(1024, 1024, 64), "saturates_nats"] == pytest.approx(0.088, abs=0.0005)
    assert table.loc[(4096, 4096, 64), "saturates_nats"] == pytest.approx(0.022, abs=0.0005)
    # 2 p / (1 + sqrt(lambda))^2 with p = 128 and lambda = 1/4.
    assert table.loc[(512, 128, 8), "limit_ranks_per_nat"] == pytest.approx(256 / 1.5**2)
    assert rank_model.per_nat((4096, 4096), 64.0) == pytest.approx(2 * 4096 / 4, rel=0.1)
    # What it means depends on the share of the rank alone: 16 of 256 is 64 of 1024.
    s = np.linalg.svd(np.random.default_rng(3).standard_normal((256, 256)), compute_uv=False)
    simulated = math.log(np.linalg.norm(s[4:]) / np.linalg.norm(s[16:]))
    assert table.loc[(1024, 1024, 64), "saturates_nats"] == pytest.approx(simulated, rel=0.05)
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
