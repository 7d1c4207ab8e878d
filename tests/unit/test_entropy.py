"""Estimators of entropy against closed forms, and at the edges; those of a GPU, on CPU tensors, against the host's."""

from __future__ import annotations

import math

import pytest
import torch

from edgc.entropy import on_device
from edgc.entropy.estimators import combine, estimate, moments
from edgc.entropy.on_device import ESTIMATES, estimate_rows
from edgc.sections import ESTIMATORS

DRAWS = 10**6
DIFFERENTIAL = ("histogram", "gaussian", "vasicek")
HALF_LOG_2_PI_E = 0.5 * math.log(2 * math.pi * math.e)


def draw(name: str, count: int, seed: int = 1) -> tuple[torch.Tensor, float]:
    """``count`` seeded draws and the entropy of the density they come from."""
    generator = torch.Generator().manual_seed(seed)
    if name == "normal":
        return torch.randn(count, generator=generator, dtype=torch.float64) * 0.3, math.log(0.3) + HALF_LOG_2_PI_E
    u = torch.rand(count, generator=generator, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)
    if name == "uniform":
        return 3 * u - 1, math.log(3)
    if name == "laplace":
        return torch.distributions.Laplace(0.5, 2.0).icdf(u), 1 + math.log(4)
    assert name == "cauchy"
    return torch.distributions.Cauchy(0.0, 1.0).icdf(u), math.log(4 * math.pi)


@pytest.mark.parametrize(
    ("estimator", "density"),
    [(e, d) for e in ("histogram", "vasicek") for d in ("normal", "uniform", "laplace", "cauchy")]
    + [("gaussian", "normal")],
)
def test_within_0_03_nats_of_the_closed_form(estimator: str, density: str) -> None:
    x, entropy = draw(density, DRAWS)
    assert abs(estimate(x, estimator) - entropy) < 0.03


@pytest.mark.parametrize(("density", "factor"), [("normal", 1e-12), ("laplace", math.pi), ("cauchy", 1e6)])
def test_scaling_adds_its_logarithm(density: str, factor: float) -> None:
    x, _ = draw(density, 100_000)
    for estimator in DIFFERENTIAL:
        shift = estimate(factor * x, estimator) - estimate(x, estimator)
        assert abs(shift - math.log(factor)) < 1e-9, estimator
    assert abs(estimate(factor * x, "released") - estimate(x, "released")) < 1e-9


def test_far_outliers_do_not_coarsen_the_histogram() -> None:
    x, entropy = draw("normal", 200_000)
    x[:5] = torch.tensor([1e12, -1e12, 1.7e308, 1e9, -1.7e308], dtype=torch.float64)
    assert abs(estimate(x, "histogram") - entropy) < 0.01


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_mixture_of_very_different_scales_is_resolved(share: float) -> None:
    # Rare rows of an embedding next to frequent ones: ``share`` of the entries is 10^4 times smaller.
    x, _ = draw("normal", DRAWS)
    small = torch.rand(DRAWS, generator=torch.Generator().manual_seed(5)) < share
    x = torch.where(small, 1e-4 * x, x) / 0.3
    fine = torch.linspace(0, 1e-3, 200_001, dtype=torch.float64)
    grid = torch.cat([fine, torch.linspace(1e-3, 9, 200_001, dtype=torch.float64)])
    density = (1 - share) * torch.exp(-0.5 * grid**2) + share * 1e4 * torch.exp(-0.5 * (1e4 * grid) ** 2)
    density /= math.sqrt(2 * math.pi)
    exact = -2 * float(torch.trapezoid(density * density.clamp(min=1e-300).log(), grid))
    for estimator in ("histogram", "vasicek"):
        assert abs(estimate(x, estimator) - exact) < 0.03, estimator


def test_entries_that_keep_away_from_the_median() -> None:
    # Two narrow peaks: the middle tenth spans the gap between them, sigma does not.
    x, entropy = draw("normal", DRAWS)
    x = x + torch.where(torch.arange(DRAWS) % 2 == 0, 4.0, -4.0)
    assert abs(estimate(x, "histogram") - entropy - math.log(2)) < 0.01


def test_columns_of_different_scale_are_all_seen() -> None:
    # A subsample with the stride of a row would see one column only, here one 10^4 times too large.
    x, entropy = draw("normal", 1 << 21)
    x = x.reshape(-1, 32).clone()
    x[:, 0] *= 1e4
    expected = entropy + math.log(1e4) / 32 + math.log(32) / 32 + 31 / 32 * math.log(32 / 31)
    assert abs(estimate(x, "histogram") - expected) < 0.03


def test_miller_madow_removes_the_bias_of_small_samples() -> None:
    # Laplace: the plug-in alone is 0.03 nats too low at 1000 entries.
    errors = [estimate(x, "histogram") - h for x, h in (draw("laplace", 1000, seed) for seed in range(200))]
    assert abs(sum(errors) / len(errors)) < 0.015


def test_exact_zeros_are_dropped_by_all_but_released() -> None:
    x, _ = draw("normal", 20_000)
    padded = torch.zeros(80_000, dtype=torch.float64)
    padded[::4] = x
    for estimator in DIFFERENTIAL:
        assert estimate(padded, estimator) == estimate(x, estimator), estimator
    assert estimate(padded, "released") < estimate(x, "released") - 1


@pytest.mark.parametrize(
    ("values", "released"),
    [
        ([], math.nan),
        ([0.0, 0.0, 0.0], 0.0),
        ([2.5], 0.0),
        ([2.5] * 9, 0.0),
        ([0.1] * 100_003, 0.0),
        ([1.0, 2.0, math.inf], math.nan),
        ([1.0, -math.inf, math.inf], math.nan),
        ([1.0, math.nan, 3.0], math.nan),
    ],
)
def test_input_without_a_density_gives_nan(values: list[float], released: float) -> None:
    x = torch.tensor(values)
    for estimator in DIFFERENTIAL:
        assert math.isnan(estimate(x, estimator)), estimator
    assert estimate(x, "released") == pytest.approx(released, nan_ok=True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_computes_in_float64_ignores_shape_and_changes_nothing(estimator: str) -> None:
    x = draw("cauchy", 6000)[0].float()
    before = x.clone()
    expected = estimate(x.double(), estimator)
    assert abs(estimate(x, estimator) - expected) < 1e-12
    assert estimate(x.reshape(60, 100), estimator) == estimate(x, estimator)
    assert estimate(x.reshape(60, 100).t().t(), estimator) == estimate(x, estimator)
    assert estimate(x.clone().requires_grad_(), estimator) == estimate(x, estimator)
    assert torch.equal(x, before)
    for count in (2, 3, 4, 17):
        few = estimate(torch.arange(1, count + 1, dtype=torch.float64) ** 2, estimator)
        assert math.isfinite(few) or (estimator == "vasicek" and count < 4)


def test_moments_of_known_densities() -> None:
    x, _ = draw("laplace", DRAWS)
    m = moments(x)
    assert (m.count, m.zero_fraction) == (DRAWS, 0.0)
    assert m.mean == pytest.approx(0.5, abs=0.01)
    assert m.sigma == pytest.approx(2 * math.sqrt(2), rel=0.01)
    assert m.skewness == pytest.approx(0.0, abs=0.05)
    assert m.excess_kurtosis == pytest.approx(3.0, abs=0.3)
    two_values = moments(torch.tensor([1.0, 1.0, 1.0, 5.0]))
    assert two_values.mean == 2.0
    assert two_values.sigma == pytest.approx(math.sqrt(3))
    assert two_values.skewness == pytest.approx(2 / math.sqrt(3))
    assert two_values.excess_kurtosis == pytest.approx(7 / 3 - 3)


def test_moments_leave_out_zeros_and_survive_the_edges() -> None:
    m = moments(torch.tensor([0.0, 0.0, 0.0, -1.0, 1.0]))
    assert m.count == 5
    assert m.zero_fraction == pytest.approx(0.6)
    assert (m.mean, m.sigma) == (0.0, 1.0)
    constant = moments(torch.full((1000,), 0.1))
    assert constant.sigma == 0
    assert math.isnan(constant.skewness)
    assert math.isnan(moments(torch.tensor([1.0, math.nan])).sigma)
    assert moments(torch.zeros(4)).zero_fraction == 1.0
    assert math.isnan(moments(torch.empty(0)).zero_fraction)


def test_combine_weights_by_size_and_ignores_nan() -> None:
    assert combine([1.0, 3.0], [300, 100]) == pytest.approx(1.5)
    assert combine([1.0, math.nan, 3.0], [100, 10**9, 100]) == pytest.approx(2.0)
    assert math.isnan(combine([math.nan], [5]))
    assert math.isnan(combine([], []))


@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.bfloat16, (1.0, 1e-6, 1e-38)), (torch.float16, (1.0, 1e-3, 3e-6))]
)
def test_the_grid_of_a_small_type_moves_no_histogram(dtype: torch.dtype, scales: tuple[float, ...]) -> None:
    """Values on a grid fall into bins unevenly, by how the grid lies to the edges; also where spacings are least."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(5))
    for scale in scales:
        for share in (1.0, 1.2, 1.5, 1.8):
            factor = scale * share
            rounded = estimate((x.double() * factor).to(dtype), "histogram")
            assert rounded - math.log(factor) == pytest.approx(estimate(x, "histogram"), abs=2e-3)


# --------------------------------------------------------------------- of a GPU

estimators = pytest.mark.parametrize("estimator", ESTIMATES)


def assert_alike(rows: torch.Tensor, estimator: str) -> None:
    before = rows.clone()
    found = estimate_rows(rows, estimator)
    assert torch.equal(rows.nan_to_num(7.0), before.nan_to_num(7.0)), "the gradients were changed"
    hosts = torch.tensor([estimate(row, estimator) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, hosts, rtol=0, atol=1e-9, equal_nan=True)


def rows_of(kind: str, count: int) -> torch.Tensor:
    """Three rows of very different scales."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(3, count, generator=generator, dtype=torch.float64)
    if kind == "sparse":
        x *= torch.rand(x.shape, generator=generator) < torch.tensor([[0.3], [1.0], [0.02]])
    if kind == "heavy":
        x = x**5
    if kind == "an outlier":
        x[:, -1] *= 1e4
    return x * torch.tensor([[1e-4], [1.0], [3.0]])


TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COUNTS, KINDS = (2, 3, 50, 4099, 60_000), ("normal", "sparse", "heavy", "an outlier")


@estimators
@pytest.mark.parametrize(
    # Every kind with every number of entries, every type with each of either.
    ("kind", "count", "dtype"),
    [(kind, count, TYPES[(i + j) % 4]) for i, kind in enumerate(KINDS) for j, count in enumerate(COUNTS)],
)
def test_the_estimates_are_the_hosts(kind: str, count: int, dtype: torch.dtype, estimator: str) -> None:
    assert_alike(rows_of(kind, count).to(dtype), estimator)


@estimators
def test_numbers_near_the_limits_of_a_type(estimator: str) -> None:
    values = [[1e299, 1.0, -2.0, 3.0], [1e-300, 2e-300, -1e-300, 0.0], [5.0, 5.0, 5.0, 5.0]]
    assert_alike(torch.tensor(values), estimator)  # too large for this type, and too small
    rows = torch.tensor(values, dtype=torch.float64)
    assert_alike(rows, estimator)
    assert_alike(rows.mul(1e8), estimator)


@estimators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_read_in_parts(estimator: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("sparse", 5000).to(dtype)
    whole = estimate_rows(rows, estimator)
    monkeypatch.setattr(on_device, "MOST", 1024)
    torch.testing.assert_close(estimate_rows(rows, estimator), whole, rtol=0, atol=1e-12)
