"""The site file, what training jobs ask for, and how Slurm's answers are read."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgc.errors import UserError
from experiments.cluster import slurm
from experiments.cluster.slurm import DEFAULT, VARIABLE, Resources, load_resources, nodes_for, training_job
from experiments.spec import matrix
from experiments.spec.settings import RunConfig, resolve
from experiments.training.ranks import Nodes, ranks_per_node


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_site.yaml"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def run_of(world: int, **sections: Any) -> RunConfig:
    values = matrix.runs("rank_sweep", "ci")[1].model_dump(mode="json")
    train = {**values["train"], "micro_batch": 1, "global_batch": world}
    return resolve(values | {"parallel": {"data": world}, "train": train} | sections, "the test")


def test_the_committed_file_is_the_defaults_and_its_comments_are_settings(site_file: Path) -> None:
    for text in ("", "\n", "# nothing yet\n\n", DEFAULT.read_text()):
        site_file.write_text(text)
        assert load_resources() == Resources()
    keys = tuple(f"# {key}: " for key in Resources.model_fields)
    lines = DEFAULT.read_text().splitlines()
    settings = [line.removeprefix("# ") for line in lines if line.startswith(keys) or line[:1] not in ("#", "")]
    site_file.write_text("\n".join(settings))
    assert set(yaml.safe_load(site_file.read_text())) == set(Resources.model_fields)
    assert load_resources().account == "my_project"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpus_per_nod: 4\n", "did you mean gpus_per_node?"),
        ("gpus_per_node: -1\n", "gpus_per_node = -1"),
        ("gres: gpu v100\n", "gres = 'gpu v100'"),
        ("network_interface: ib0; reboot\n", "network_interface"),
        ("account: [a]\n", "account"),
        ("- a list\n", "not a mapping"),
        ("a: b: c\n", "not valid YAML at line 1"),
    ],
)
def test_mistakes_name_the_key_and_the_file(site_file: Path, text: str, named: str) -> None:
    site_file.write_text(text)
    with pytest.raises(UserError) as error:
        load_resources()
    assert named in str(error.value)
    assert "my_site.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@given(world=st.integers(1, 512), gpus=st.integers(1, 16))
def test_nodes_are_the_fewest_with_equally_many_ranks(world: int, gpus: int) -> None:
    nodes = nodes_for(world, gpus)
    assert world % nodes == 0
    assert world // nodes <= gpus
    assert all(world % fewer or world // fewer > gpus for fewer in range(1, nodes))


def test_every_ci_run_fits_on_a_node_of_4_cores_and_8_gb() -> None:
    runs = [run for study in matrix.studies() for run in matrix.runs(study, "ci")]
    jobs = [training_job(run, Resources()) for run in runs]
    assert len(runs) > 50 and {(job.nodes, job.gpus, job.gres) for job in jobs} == {(1, 0, None)}
    assert max(job.cpus for job in jobs) <= 4 and max(job.memory for job in jobs) <= 8000


def test_a_job_has_a_rank_on_each_gpu_and_memory_for_its_model() -> None:
    job = training_job(run_of(6), Resources(gpus_per_node=4, gres="gpu:v100"))
    assert (job.nodes, job.ranks, job.gres) == (2, 3, "gpu:v100:3")
    model = run_of(2).model.model_dump()
    small, large = (run_of(2, model={**model, "layers": layers}) for layers in (4, 400))
    assert training_job(small, Resources()).memory < training_job(large, Resources()).memory
    job = training_job(large, Resources(memory_gb=3, cpus_per_node=7))
    assert (job.memory, job.cpus) == (3000, 7)


def test_runtime_grows_with_the_attempt_up_to_the_limit() -> None:
    site = Resources(training_minutes=100)
    assert [slurm.runtime(site, attempt, 250) for attempt in (1, 2, 3)] == [100, 200, 250]
    assert slurm.runtime(site, 3, None) == 300


SINFO = """gpu*|8|64|500000|1-00:00:00|gpu:v100:4(S:0-1)
gpu*|2|64|500000|1-00:00:00|gpu:v100:2(S:0-1)
cpu|40|32+|128000+|infinite|(null)
odd|1|8|1000|7-12:30:00|gpu:a100:2(S:0,1),gpu:v100,nvme:2
half|1|8|1000|30:00|gpu:4
hour|1|8|1000|2:00:00|gpu
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, slurm.Partition]:
    monkeypatch.setattr(slurm, "ask", lambda *command: SINFO if command[0] == "sinfo" else "research\nteaching\n")
    found = slurm.partitions()
    assert found is not None
    return found


def test_partitions_are_read_and_runs_that_fit_accepted(cluster: dict[str, slurm.Partition]) -> None:
    assert [(name, partition.minutes) for name, partition in cluster.items()] == [
        ("gpu", 1440),
        ("cpu", None),
        ("odd", 10830),
        ("half", 30),
        ("hour", 120),
    ]
    gres = [nodes.gres for name in ("cpu", "odd", "half", "hour") for nodes in cluster[name].nodes]
    assert gres == [{}, {"gpu": 3, "gpu:a100": 2, "gpu:v100": 1, "nvme": 2}, {"gpu": 4}, {"gpu": 1}]
    assert cluster["gpu"].default
    assert [(nodes.count, nodes.gres["gpu:v100"]) for nodes in cluster["gpu"].nodes] == [(8, 4), (2, 2)]
    assert cluster["cpu"].nodes[0].memory == 128000
    assert slurm.training_partition(Resources(), cluster) == cluster["gpu"]
    assert slurm.training_partition(Resources(partition="cpu"), cluster) == cluster["cpu"]
    slurm.check_runs(Resources(gpus_per_node=4, gres="gpu:v100"), map(run_of, (4, 8, 32)), cluster)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"gpus_per_node": 4},
            "gpus_per_node = 4: rank_sweep/r4-s1 needs 16 nodes with 4 gpu each, partition gpu has 8 of them",
        ),
        ({"gpus_per_node": 4, "gres": "gpu:h100"}, "the largest with 0 gpu:h100"),
        ({"memory_gb": 900}, "memory_gb = 900"),
        ({"cpus_per_node": 65}, "cpus_per_node = 65"),
        ({"partition": "gpus"}, "partition = 'gpus': the cluster has no such partition"),
        ({"cpu_partition": "x"}, "cpu_partition = 'x'"),
        ({"account": "reserch"}, "account = 'reserch': not an account of user"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    cluster: dict[str, slurm.Partition], settings: dict[str, Any], named: str
) -> None:
    slurm.check_resources(Resources(partition="gpu", cpu_partition="cpu", account="research"), cluster)
    with pytest.raises(UserError) as error:
        slurm.check_resources(Resources(**settings), cluster)
        slurm.check_runs(Resources(**settings), [run_of(2), run_of(64)], cluster)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_without_slurm_nothing_is_refused() -> None:
    slurm.check_resources(Resources(partition="gpus", account="nobody"), None)
    slurm.check_runs(Resources(gpus_per_node=1), [run_of(64)], None)
    assert slurm.ask("no-such-program") is None


def test_command_starts_one_launcher_on_each_node(tmp_path: Path) -> None:
    """Run with stand-ins for srun and python that write down what they get."""
    (tmp_path / "srun").write_text(
        '#!/bin/bash\necho "$@" > "$0.args"\nwhile [[ $1 == --* ]]; do shift; done\n'
        'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done\n'
    )
    (tmp_path / "python").write_text('#!/bin/bash\necho "$WHO $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $@"\n')
    for name in ("srun", "python"):
        (tmp_path / name).chmod(0o755)
    job = training_job(run_of(4), Resources(gpus_per_node=2))
    site = Resources(gpus_per_node=2, setup="export WHO=me", network_interface="ib0")
    text = f"{slurm.launch_command(job, site)} --study a --run 'b c'"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
        "SLURM_JOB_ID": "16003",
    }
    done = subprocess.run(["bash", "-euc", text], env=environment, capture_output=True, text=True, check=True)
    where = "--rendezvous 10.0.0.7:15003 --study a --run b c"
    assert done.stdout.splitlines() == [
        f"me ib0 ib0 -m experiments.training.launch --nodes 2 --node {node} {where}" for node in (0, 1)
    ]
    options = (tmp_path / "srun.args").read_text()
    assert options.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --gres=gpu:2")
    for single in (None, training_job(run_of(4), Resources())):
        assert slurm.launch_command(single, Resources()) == "python -m experiments.training.launch"


def test_jobs_of_this_folder_alone_are_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queue = {
        "11": f"11|rule_train_wildcards_a|{tmp_path}",
        "12": f"12|rule_table|{tmp_path}/other",
        "13": f"13|my own job|{tmp_path}",
        "14": f"14|rule_data|{tmp_path}",
    }

    def ask(*command: str) -> str:
        if command[0] == "scancel":
            for number in command[1:]:
                del queue[number]
        return "\n".join(queue.values())

    monkeypatch.setattr(slurm, "ask", ask)
    assert slurm.cancel_jobs(tmp_path) == 2
    assert set(queue) == {"12", "13"}
    assert slurm.cancel_jobs(tmp_path) == 0


@pytest.mark.parametrize(
    ("remembered", "accounting", "expected"),
    [(300, True, "squeue"), (60, True, "sacct"), (60, False, "squeue"), (None, True, "sacct"), (None, False, "squeue")],
)
def test_states_of_jobs_come_from_where_cancelled_ones_are_seen(
    remembered: int | None, accounting: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(program: str, *arguments: str) -> str | None:
        if program == "sacct":
            return "" if accounting else None
        assert (program, *arguments) == ("scontrol", "show", "config")
        return None if remembered is None else f"MinJobAge               = {remembered} sec\nMpiDefault = none\n"

    monkeypatch.setattr(slurm, "ask", ask)
    assert slurm.status_command() == expected


def test_ranks_that_do_not_divide_over_the_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="world size 3 is not divisible by 2 nodes"):
        ranks_per_node(run_of(3), Nodes(2))
