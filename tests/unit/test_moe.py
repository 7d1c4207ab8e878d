"""The study of a mixture of experts: which rank describes which expert, and what its tables say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

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
from experiments.evaluation.export import check_run
from experiments.spec import matrix
from experiments.spec.settings import ProbeConfig
from experiments.training.model import ExpertShare, draw_experts, place_of
from experiments.training.probes import GradientProbe
from tests.unit.invented_runs import run

FC1 = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
DENSE = "decoder.layers.0.self_attention.linear_qkv.weight"


CHANGE = {0: -0.4, 1: -0.2, 2: 0.0, 3: 0.3}  # nats, by which an expert's entropy moves over the run


def probes() -> pd.DataFrame:
    """Expert e of layer l has entropy -5 - l - e/10, moves by ``CHANGE`` and gets 10 (e + 1) tokens."""
    rows = []
    for t in [1, *range(10, 201, 10)]:
        part = t / 200
        for layer in (0, 1):
            found = [(FC1.replace("fc1", kind).format(layer, e), -5 - layer - e / 10 + change * part, e)
                     for e, change in CHANGE.items() for kind in ("fc1", "fc2")]  # fmt: skip
            found.append((DENSE.replace("layers.0", f"layers.{layer}"), -4.0 + 0.1 * part, None))
            for name, entropy, e in found:
                about = {"iteration": t, "stage": 0, "parameter": name, "numel": 36864, "gradient_norm": 1.0}
                tokens = None if e is None else 10 * (e + 1)
                rows.append(about | {"entropy_histogram": entropy, "log_sigma": entropy - 1.42, "tokens": tokens})
        rows.append({**rows[-1], "stage": -1, "parameter": "<model>", "entropy_histogram": 0.0})
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Tables of two runs; experts send 400 of the 1000 bytes, or half of that where they are compressed."""
    made = []
    for name, experts, compression in (("none", 400, None), ("r16", 200, {"method": "powersgd", "rank": 16})):
        events = {"step": [{"iteration": 1, "stages": [{"stage": s, "expert_bytes": experts // 2} for s in (0, 1)]}]}
        made.append(run(name, compression=compression, events=events, bytes_total=1000 if name == "none" else 500))
    made[0].__dict__["tensors"] = probes()
    return moe.tables(made)


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


def test_experts_keep_their_place_in_the_table(found: dict[str, Any]) -> None:
    rows = found["experts"].query("kind == 'fc2'").set_index(["layer", "expert", "window"])
    assert len(rows) == 2 * 4 * 10
    for (layer, expert, window), row in rows.iterrows():
        # Windows hold two probes each, 10 apart; the first also iteration 1.
        times = [window - 10, window] if window > 20 else [1, 10, 20]
        part = sum(times) / len(times) / 200
        assert row["entropy"] == pytest.approx(-5 - layer - expert / 10 + CHANGE[int(expert)] * part)
        assert row["tokens"] == 10 * (expert + 1)


def test_spread_tells_experts_from_layers(found: dict[str, Any]) -> None:
    last = found["spread"].query("window == 200").set_index(["kind", "between"])
    means = [-e / 10 + m * 195 / 200 for e, m in CHANGE.items()]
    assert last.loc[("fc1", "experts"), "sd_nats"] == pytest.approx(pd.Series(means).std())
    assert last.loc[("fc1", "experts"), "sigma_ratio"] == pytest.approx(math.exp(max(means) - min(means)))
    # The two layers are one nat apart in experts, and equal in attention.
    assert last.loc[("fc1", "layers"), "sd_nats"] == pytest.approx(1 / math.sqrt(2))
    assert last.loc[("qkv", "layers"), "sd_nats"] == pytest.approx(0, abs=1e-12)
    assert ("qkv", "experts") not in last.index


def test_rank_of_an_expert_follows_its_own_entropy(found: dict[str, Any]) -> None:
    fc1 = found["fit"].query("kind == 'fc1' and layer == 1").set_index("expert")
    # From the first window after iteration 20 (30 and 40) to the last one (190 and 200).
    part = (195 - 35) / 200
    for expert, move in CHANGE.items():
        row = fc1.loc[expert]
        assert row["change_nats"] == pytest.approx(move * part)
        error = math.exp(-move * part) * error_of(96, 384, moe.RANK)
        assert row["cqm_rank"] == pytest.approx(rank_for_error(96, 384, error))
    # Sixteen expert matrices move by -0.075 on average, two of attention by 0.1; sizes are equal.
    mean = (16 * -0.075 + 2 * 0.1) / 18
    assert fc1["stage_change_nats"].tolist() == pytest.approx([mean * part] * 4)
    assert fc1.loc[0, "correlation_stage"] == pytest.approx(1)
    assert fc1.loc[3, "correlation_stage"] == pytest.approx(-1)
    assert fc1["stage_cqm_rank"].nunique() == 1


def test_table_splits_the_bytes(found: dict[str, Any]) -> None:
    assert found["table"]["expert_share"].tolist() == pytest.approx([0.4, 0.4])
    assert found["table"]["expert_bytes_total"].tolist() == [400, 200]


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
