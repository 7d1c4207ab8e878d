"""The study of a mixture of experts: which rank describes which expert, and what its tables say."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.control.rank_model import error as error_of
from edgc.control.rank_model import rank_for_error
from edgc.errors import UserError
from experiments.analyse import moe
from experiments.analyse.__main__ import analyse
from experiments.evaluation.export import check_run
from experiments.spec import matrix
from experiments.spec.settings import ProbeConfig
from experiments.training.experts import ExpertShare, draw_experts, place_of
from experiments.training.probes import GradientProbe
from tests.unit import synthetic_runs as synthetic

FC1 = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
DENSE = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = synthetic.write_moe(tmp_path_factory.mktemp("results"))
    analyse("moe", found)
    return found


@given(degree=st.sampled_from([1, 2, 4, 8]), local=st.integers(1, 12), layer=st.integers(0, 30))
def test_every_expert_has_one_number_and_one_rank_that_describes_it(degree: int, local: int, layer: int) -> None:
    shares = [ExpertShare(rank, local, speaks_for_rest=rank == 0) for rank in range(degree)]
    names = [share.in_model(FC1.format(layer, i)) for share in shares for i in range(local)]
    assert [place_of(name) for name in names] == [
        (f"decoder.layers.{layer}.mlp", number) for number in range(degree * local)
    ]
    assert all(share.describes(name) for share in shares for name in names)
    assert [share.describes(DENSE) for share in shares] == [True] + [False] * (degree - 1)
    assert place_of(DENSE) is None
    assert shares[-1].in_model(DENSE) == DENSE


def test_probes_of_two_ranks_hold_each_expert_once_with_its_own_gradient() -> None:
    rows = []
    for rank in (0, 1):
        share = ExpertShare(rank, 2, speaks_for_rest=rank == 0)
        probe = GradientProbe(ProbeConfig(every=1), EDGCConfig(), 0, reports=True, experts=share)
        gradients = [Gradient(DENSE, torch.full((64, 64), 9.0))]
        # Expert e of the model has the gradient e + 1 everywhere.
        gradients += [Gradient(FC1.format(0, i), torch.full((64, 64), 2.0 * rank + i + 1)) for i in (0, 1)]
        probe.observe(1, gradients)
        rows += probe.rows
    norms = {row["parameter"]: row["gradient_norm"] for row in rows}
    assert len(rows) == len(norms) == 5
    assert norms == {DENSE: 9.0 * 64} | {FC1.format(0, e): (e + 1.0) * 64 for e in range(4)}


class Experts(torch.nn.Module):
    """Two experts as Megatron names them, equal on every rank, and a matrix that is no expert."""

    def __init__(self) -> None:
        super().__init__()
        experts = torch.nn.ModuleList(torch.nn.Linear(32, 64, bias=False) for _ in range(2))
        self.experts = torch.nn.ModuleDict({"local_experts": experts})
        self.dense = torch.nn.Linear(32, 32, bias=False)
        for expert in experts:
            torch.nn.init.normal_(expert.weight, std=0.02)
            expert.weight.allreduce = False


def test_experts_of_different_ranks_start_different_and_repeat() -> None:
    def drawn(rank: int, seed: int = 1) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Experts()
        draw_experts(model, ExpertShare(rank, 2, speaks_for_rest=False), seed)
        return [parameter.detach() for parameter in model.parameters()]

    (a, b, dense), (c, d, other_dense) = drawn(0), drawn(1)
    weights = [a, b, c, d, drawn(0, seed=2)[0]]
    assert all(not torch.equal(x, y) for i, x in enumerate(weights) for y in weights[:i])
    assert torch.equal(dense, other_dense)
    assert torch.equal(a, drawn(0)[0])
    assert [float(w.std()) for w in weights] == pytest.approx([0.02] * 5, rel=0.1)


def test_experts_keep_their_place_in_the_table(folder: Path) -> None:
    found = pd.read_csv(folder / "experts.csv")
    found = found[(found["seed"] == 1) & (found["kind"] == "fc2")].set_index(["layer", "expert", "window"])
    assert len(found) == 2 * 4 * 10
    for (layer, expert, window), row in found.iterrows():
        # Windows hold two probes each, 10 apart; the first also iteration 1.
        times = [window - 10, window] if window > 20 else [1, 10, 20]
        part = sum(times) / len(times) / synthetic.ITERATIONS
        expected = -5 - layer - expert / 10 + synthetic.MOE_CHANGE[int(expert)] * part
        assert row["entropy"] == pytest.approx(expected)
        assert row["tokens"] == 10 * (expert + 1)


def test_spread_tells_experts_from_layers(folder: Path) -> None:
    found = pd.read_csv(folder / "spread.csv")
    last = found[(found["seed"] == 1) & (found["window"] == 200)].set_index(["kind", "between"])
    means = [-e / 10 + m * 195 / 200 for e, m in synthetic.MOE_CHANGE.items()]
    assert last.loc[("fc1", "experts"), "sd_nats"] == pytest.approx(pd.Series(means).std())
    assert last.loc[("fc1", "experts"), "sigma_ratio"] == pytest.approx(math.exp(max(means) - min(means)))
    # The two layers are one nat apart in experts, and equal in attention.
    assert last.loc[("fc1", "layers"), "sd_nats"] == pytest.approx(1 / math.sqrt(2))
    assert last.loc[("qkv", "layers"), "sd_nats"] == pytest.approx(0, abs=1e-12)
    assert ("qkv", "experts") not in last.index


def test_rank_of_an_expert_follows_its_own_entropy(folder: Path) -> None:
    found = pd.read_csv(folder / "fit.csv")
    fc1 = found[(found["seed"] == 1) & (found["kind"] == "fc1") & (found["layer"] == 1)].set_index("expert")
    # From the first window after iteration 20 (30 and 40) to the last one (190 and 200).
    part = (195 - 35) / 200
    for expert, move in synthetic.MOE_CHANGE.items():
        row = fc1.loc[expert]
        assert row["change_nats"] == pytest.approx(move * part)
        kept = math.exp(-move * part) * error_of(96, 384, moe.RANK)
        assert row["cqm_rank"] == pytest.approx(rank_for_error(96, 384, kept))
    # Sixteen expert matrices move by -0.075 on average, two of attention by 0.1; sizes are equal.
    mean = (16 * -0.075 + 2 * 0.1) / 18
    assert fc1["stage_change_nats"].tolist() == pytest.approx([mean * part] * 4)
    assert fc1.loc[0, "correlation_stage"] == pytest.approx(1)
    assert fc1.loc[3, "correlation_stage"] == pytest.approx(-1)
    assert fc1["stage_cqm_rank"].nunique() == 1


def test_table_splits_the_bytes(folder: Path) -> None:
    table = pd.read_csv(folder / "table.csv").set_index(["variant", "seed"])
    assert table.loc[("r16", 2), "gap_nats"] == pytest.approx(0.1)
    assert table.loc[("none", 1), "expert_share"] == pytest.approx(0.4)
    assert table.loc[("r16", 1), "expert_share"] == pytest.approx(0.2 / 0.5)
    assert table.loc[("r16_dense", 1), "expert_share"] == pytest.approx(0.4 / 0.7)
    assert str(table.loc[("r16_dense", 1), "compress_experts"]) == "False"


def test_a_study_without_probes_has_tables(tmp_path: Path) -> None:
    synthetic.write_run(tmp_path, study="moe", variant="none", status="failed")
    written = analyse("moe", tmp_path)
    assert {path.name for path in written} >= {"table.csv", "experts.csv", "fit.csv"}
    assert list(pd.read_csv(tmp_path / "table.csv")["status"]) == ["failed"]


def test_export_refuses_experts_in_one_line(tmp_path: Path) -> None:
    run = matrix.runs("moe", "ci")[0]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    for status in ("ok", "diverged"):
        (tmp_path / "status").write_text(status + "\n")
        with pytest.raises(UserError, match=r"model\.experts = 4 cannot be exported") as caught:
            check_run(tmp_path)
        assert "\n" not in str(caught.value)
