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
from experiments.analyse.runs import load_run
from experiments.evaluation.export import check_run
from experiments.spec import matrix
from experiments.spec.settings import ProbeConfig
from experiments.training.model import ExpertShare, draw_experts, place_of
from experiments.training.probes import GradientProbe
from tests.unit.invented_runs import run

FC1 = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
DENSE = "decoder.layers.0.self_attention.linear_qkv.weight"


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


def test_tables_of_experts_are_those_of_their_probes(kept_results: Path) -> None:
    folder = kept_results / "ci" / "moe"
    tables = {name: pd.read_csv(folder / f"{name}.csv") for name in ("table", "experts", "spread", "fit")}
    for row in tables["table"].itertuples():
        stages = load_run(folder / f"{row.variant}-s{row.seed}").stages
        assert row.expert_bytes_total == stages["expert_bytes"].sum()
        assert row.expert_share == pytest.approx(row.expert_bytes_total / row.bytes_total)
    one = {name: frame.query("variant == 'none' and seed == 1") for name, frame in tables.items() if name != "table"}
    probes = pd.read_parquet(folder / "none-s1" / "tensors.parquet").set_index(["parameter", "iteration"])
    entropy = probes["entropy_histogram"].unstack()
    # Windows hold two probes each, 10 apart; the first also iteration 1.
    first = entropy.loc[:, [1, 10, 20]].mean(axis=1)
    rows = one["experts"].query("window == 20 and kind == 'fc1'").set_index(["layer", "expert"])
    for layer, expert in rows.index:
        row, name = rows.loc[(layer, expert)], FC1.format(layer, int(expert))
        assert row["entropy"] == pytest.approx(first[name])
        assert row["tokens"] == pytest.approx(probes.loc[name]["tokens"].loc[[1, 10, 20]].mean())
    spread = one["spread"].query("window == 20").set_index(["kind", "between"])
    within, between = (rows["entropy"].groupby("layer").agg(how) for how in ("std", "mean"))
    assert spread.loc[("fc1", "experts"), "sd_nats"] == pytest.approx(within.mean())
    assert spread.loc[("fc1", "layers"), "sd_nats"] == pytest.approx(between.std())
    assert ("qkv", "experts") not in spread.index
    # From the first window after iteration 20 (30 and 40) to the last one (190 and 200).
    late, move = entropy.loc[:, 30:], entropy[[190, 200]].mean(axis=1) - entropy[[30, 40]].mean(axis=1)
    size = probes["numel"].groupby("parameter").first().drop("<model>")
    overall = (late.mul(size, axis=0).sum() - late.loc["<model>"] * 0) / size.sum()
    for row in one["fit"].query("kind == 'fc1'").itertuples():
        name = FC1.format(row.layer, int(row.expert))
        assert row.change_nats == pytest.approx(move[name])
        assert row.cqm_rank == pytest.approx(
            rank_for_error(96, 384, math.exp(-move[name]) * error_of(96, 384, moe.RANK)), abs=1e-4
        )
        assert row.correlation_stage == pytest.approx(late.loc[name].corr(overall))


def test_a_study_without_probes_has_tables() -> None:
    written = moe.tables([run("none", status="failed")])
    assert written.keys() >= {"table", "experts", "fit"} and list(written["table"]["status"]) == ["failed"]


def test_export_refuses_experts_in_one_line(tmp_path: Path) -> None:
    run = matrix.runs("moe", "ci")[0]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    for status in ("ok", "diverged"):
        (tmp_path / "status").write_text(status + "\n")
        with pytest.raises(UserError, match=r"model\.experts = 4 cannot be exported") as caught:
            check_run(tmp_path)
        assert "\n" not in str(caught.value)
