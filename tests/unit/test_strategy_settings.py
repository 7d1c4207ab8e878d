"""Strategies, drivers and base optimizers in studies: what is refused, what is on record, what is planned and shown."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from edgc.errors import UserError
from edgc.presets import deep_merge
from experiments.analyse import strategies
from experiments.cluster.slurm import Resources, training_job
from experiments.spec import matrix
from experiments.spec.settings import RunConfig, resolve
from experiments.training.lineage import checkpoint_settings
from tests.unit.invented_runs import edgc, run


def changed(changes: dict[str, Any], study: str = "strategies") -> RunConfig:
    return resolve(deep_merge(matrix.runs(study, "ci")[0].model_dump(mode="json"), changes), "study.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "dilocco"}, "strategy.name = 'dilocco' is not valid (in study.yaml); use one of"),
        ({"strategy": {"name": "diloco", "evry": 3}}, "unknown key strategy.evry (in study.yaml); did you mean every?"),
        ({"strategy": {"name": "diloco", "lr": 0}}, "strategy.lr = 0 is not valid (in study.yaml)"),
        ({"strategy": "diloco", "driver": "processes"}, "strategy.name = 'diloco' needs one process so far"),
        ({"driver": "threads"}, "driver = 'threads'"),
        ({"parallel": {"data": 1, "world": 1}}, "driver = rehearsal needs replicas"),
        (
            {"parallel": {"pipeline": 2, "world": 4}},
            "parallel.pipeline = 2 is not rehearsed (in study.yaml); set it to 1",
        ),
        ({"parallel": {"tensor": 2, "world": 4}}, "parallel.tensor = 2 is not rehearsed"),
        ({"model": {"dropout": 0.1}}, "model.dropout = 0.1 is not rehearsed"),
        ({"model": {"experts": 4}}, "model.experts = 4 is not rehearsed (in study.yaml); leave it out"),
        ({"train": {"precision": "bf16"}}, "train.precision = bf16 is not rehearsed (in study.yaml); set it to fp32"),
        ({"train": {"checkpoint": True}}, "train.checkpoint = True is not rehearsed (in study.yaml); set it to false"),
        ({"probe": {"every": 5}}, "probe.every = 5 is not rehearsed"),
        ({"train": {"optimizer": "adam"}}, "train.optimizer = 'adam'"),
        ({"train": {"matrix_lr": 0.01}}, "train.matrix_lr is not used with train.optimizer = adamw"),
        ({"train": {"optimizer": "muon", "precision": "bf16"}}, "optimizer = muon steps whole matrices in fp32"),
        (
            {"train": {"optimizer": "sgd", "matrix_lr": math.inf}},
            "train.matrix_lr = inf: Input should be a finite",
        ),
        ({"parallel": {"virtual_pipeline": 2}}, "parallel.virtual_pipeline needs parallel.pipeline above 1"),
        ({"strategy": {"every": 5}}, "strategy.name = None is not valid (in study.yaml); use one of"),
        ({"strategy": {"name": ["dion"]}}, "strategy.name = ['dion'] is not valid (in study.yaml); use one of"),
        ({"strategy": {"name": "diloco", "every": 9999}}, "strategy.every = 9999 is longer than the run"),
        ({"strategy": "dion"}, "strategy.name = 'dion' makes the direction of a step itself (in study.yaml); set"),
        (
            {"train": {"optimizer": "muon"}, "compression": {"method": "topk", "momentum": 0.9}},
            "train.optimizer = muon with compression.momentum = 0.9 applies momentum twice",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line_with_key_file_and_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        changed(changes)
    line = str(caught.value)
    assert message in line and "(in study.yaml" in line and "; " in line and "\n" not in line


def test_muon_steps_no_shards_and_no_experts_of_other_ranks() -> None:
    with pytest.raises(UserError, match=r"train.optimizer = muon steps whole matrices .*parallel.tensor: 1"):
        changed({"train": {"optimizer": "muon"}, "parallel": {"tensor": 2, "world": 8}}, "methods")
    with pytest.raises(UserError, match=r"train.optimizer = muon knows no expert parallelism .*parallel.expert: 1"):
        changed({"train": {"optimizer": "muon"}, "parallel": {"expert": 2}, "model": {"experts": 2}}, "methods")
    assert changed({"train": {"optimizer": "muon", "matrix_lr": 0.01}}, "methods").train.matrix_lr == 0.01


def test_momentum_before_the_mean_fits_an_optimizer_without() -> None:
    compression = {"method": "topk", "momentum": 0.9}
    assert changed({"train": {"optimizer": "sgd"}, "compression": compression}).train.adam_beta1 > 0
    assert changed({"strategy": "dion", "train": {"optimizer": "sgd"}}).exchange.directs


def test_runs_from_before_strategies_are_recorded_as_they_were() -> None:
    plain = changed({}, "methods")
    for record in (
        plain.model_dump(mode="json"),
        checkpoint_settings(plain, "text"),
        json.loads(plain.model_dump_json()),
    ):
        assert not {"strategy", "driver"} & record.keys() and not {"optimizer", "matrix_lr"} & record["train"].keys()
    for default in ("every_step", {"name": "every_step"}, {}):
        assert (
            changed({"strategy": default, "driver": "processes", "train": {"optimizer": "adamw"}}, "methods") == plain
        )
    record = changed({"strategy": "diloco"}).model_dump(mode="json")
    assert record["strategy"] == {"name": "diloco"} and record["driver"] == "rehearsal"
    assert resolve(record, "run.yaml").exchange.period == 30
    assert changed({}).exchange.name == "every_step"


def test_a_rehearsed_run_is_one_process_whose_replicas_take_their_memory() -> None:
    runs = matrix.runs("strategies", "ci")
    assert [one.exchange.name for one in runs] == ["every_step", "every_step", "diloco", "sparseloco", "dion"]
    assert {(one.driver, one.parallel.data, one.processes, one.seed) for one in runs} == {("rehearsal", 2, 1, 2)}
    few, many = (changed({"parallel": {"data": n, "world": n}, "train": {"micro_batch": 1}}) for n in (2, 8))
    two, eight = training_job(few, Resources()), training_job(many, Resources())
    assert (two.nodes, two.ranks, eight.ranks) == (1, 1, 1) and eight.memory > two.memory


def test_the_table_names_strategy_replicas_and_bytes_a_step() -> None:
    parallel = {"data": 2}
    runs = [
        run("none", loss=5.0, bytes_total=4_000, parallel=parallel),
        run("cqm", compression=edgc(), loss=5.1, parallel=parallel),
        run("diloco", loss=5.25, bytes_total=400, parallel=parallel, strategy={"name": "diloco", "every": 10}),
        run("lost", status="failed", loss=None, parallel={"data": 4}, strategy={"name": "dion"}),
    ]
    table = strategies.tables(runs)["table"].set_index("variant")
    assert table["strategy"].tolist() == ["every_step", "every_step", "diloco", "dion"]
    assert table["period"].tolist() == [1, 1, 10, 1] and table["replicas"].tolist() == [2, 2, 2, 4]
    assert table.loc["diloco", "gap_nats"] == pytest.approx(0.25) and table.loc["none", "gap_nats"] == 0
    assert table.loc["diloco", "bytes_per_step"] == 2 and table.loc["diloco", "bytes_dense_per_step"] == 20
    assert table.loc["lost", "status"] == "failed" and table.loc["lost", "gap_nats"] != table.loc["lost", "gap_nats"]
