"""A mixture of experts: weights of its experts, and what knows none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from edgc.errors import UserError
from experiments.evaluation.export import check_run
from experiments.spec import matrix
from experiments.training.model import draw_experts


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
        draw_experts(model, 2 * rank, seed)
        return [parameter.detach() for parameter in model.parameters()]

    (a, b, dense), (c, d, other_dense) = drawn(0), drawn(1)
    weights = [a, b, c, d, drawn(0, seed=2)[0]]
    assert all(not torch.equal(x, y) for i, x in enumerate(weights) for y in weights[:i])
    assert torch.equal(dense, other_dense)
    assert torch.equal(a, drawn(0)[0])
    assert [float(w.std()) for w in weights] == pytest.approx([0.02] * 5, rel=0.1)


def test_export_refuses_experts_in_one_line(tmp_path: Path) -> None:
    values = matrix.runs("methods", "ci")[0].model_dump(mode="json")
    values["model"]["experts"] = 4
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    for status in ("ok", "diverged"):
        (tmp_path / "status").write_text(status + "\n")
        with pytest.raises(UserError, match=r"model\.experts = 4 cannot be exported") as caught:
            check_run(tmp_path)
        assert "\n" not in str(caught.value)
