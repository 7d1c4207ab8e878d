"""The site file, what training jobs ask for, and how Slurm's answers are read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgc.errors import UserError
from experiments.cluster import slurm
from experiments.cluster.resources import (
    DEFAULT,
    VARIABLE,
    Resources,
    load_resources,
    nodes_for,
    training_job,
)
from experiments.spec import matrix
from experiments.spec.settings import RunConfig, resolve


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_site.yaml"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def run_of(world: int, **sections: Any) -> RunConfig:
    values = {
        "scale": "ci",
        "study": "rank_sweep",
        "variant": "r4",
        "label": "r4",
        "seed": 1,
        "model": {"layers": 4, "hidden": 96, "heads": 4, "sequence_length": 64},
        "parallel": {"data": world},
        "train": {
            "iterations": 1,
            "micro_batch": 1,
            "global_batch": world,
            "lr": 1e-3,
            "lr_warmup_fraction": 0.0,
            "eval_interval": 1,
            "eval_batches": 1,
        },
    }
    return resolve(values | sections, "the test")


def test_committed_file_and_file_of_comments_are_the_defaults(site_file: Path) -> None:
    site_file.write_text("# nothing yet\n\n")
    assert load_resources() == Resources()
    site_file.write_text(DEFAULT.read_text())
    assert load_resources() == Resources()
    # Every setting is in the file, in use or as a comment.
    text = DEFAULT.read_text()
    assert all(f"{key}: " in text for key in Resources.model_fields)


def test_commented_lines_are_valid_settings(site_file: Path) -> None:
    lines = DEFAULT.read_text().splitlines()
    commented = [
        line[2:] for line in lines if line.startswith("# ") and line[2:].split(":")[0] in Resources.model_fields
    ]
    used = [line for line in lines if line and not line.startswith("#")]
    site_file.write_text("\n".join([*commented, *used]))
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


def test_missing_file_is_named(site_file: Path) -> None:
    with pytest.raises(UserError, match=r"file not found .*my_site\.yaml"):
        load_resources()


@given(world=st.integers(1, 512), gpus=st.integers(1, 16))
def test_nodes_are_the_fewest_with_equally_many_ranks(world: int, gpus: int) -> None:
    nodes = nodes_for(world, gpus)
    assert world % nodes == 0
    assert world // nodes <= gpus
    assert all(world % fewer or world // fewer > gpus for fewer in range(1, nodes))


@given(world=st.sampled_from([1, 2, 4, 6, 16, 64]), gpus=st.integers(0, 8))
def test_job_has_a_rank_on_each_gpu(world: int, gpus: int) -> None:
    job = training_job(run_of(world), Resources(gpus_per_node=gpus, gres="gpu:v100"))
    assert job.nodes * job.ranks == world
    assert job.cpus >= job.ranks
    if gpus:
        assert job.gres == f"gpu:v100:{job.ranks}"
    else:
        assert (job.nodes, job.gres) == (1, None)


def test_every_ci_run_fits_on_a_node_of_4_cores_and_8_gb() -> None:
    runs = [run for study in matrix.studies() for run in matrix.runs(study, "ci")]
    assert len(runs) > 50
    for run in runs:
        job = training_job(run, Resources())
        assert (job.nodes, job.gpus) == (1, 0)
        assert job.cpus <= 4
        assert job.memory <= 8000


def test_memory_grows_with_the_model_and_can_be_given() -> None:
    small, large = (
        run_of(2, model={"layers": layers, "hidden": 96, "heads": 4, "sequence_length": 64}) for layers in (4, 400)
    )
    assert training_job(small, Resources()).memory < training_job(large, Resources()).memory
    assert training_job(large, Resources(memory_gb=3, cpus_per_node=7)).memory == 3000
    assert training_job(large, Resources(memory_gb=3, cpus_per_node=7)).cpus == 7


def test_runtime_grows_with_the_attempt_up_to_the_limit() -> None:
    site = Resources(training_minutes=100)
    assert [slurm.runtime(site, attempt, 250) for attempt in (1, 2, 3)] == [100, 200, 250]
    assert slurm.runtime(site, 3, None) == 300


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("infinite", None), ("2:00:00", 120), ("30:00", 30), ("1-00:00:00", 1440), ("7-12:30:00", 10830)],
)
def test_time_limits(text: str, minutes: int | None) -> None:
    assert slurm.parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("(null)", {}),
        ("gpu:4", {"gpu": 4}),
        ("gpu:v100:4(S:0-1)", {"gpu": 4, "gpu:v100": 4}),
        ("gpu:a100:2(S:0,1),gpu:v100:1,nvme:2", {"gpu": 3, "gpu:a100": 2, "gpu:v100": 1, "nvme": 2}),
    ],
)
def test_gres(text: str, gres: dict[str, int]) -> None:
    assert slurm.parse_gres(text) == gres


SINFO = """gpu*|8|64|500000|1-00:00:00|gpu:v100:4(S:0-1)
gpu*|2|64|500000|1-00:00:00|gpu:v100:2(S:0-1)
cpu|40|32+|128000+|infinite|(null)
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, slurm.Partition]:
    monkeypatch.setattr(slurm, "ask", lambda *command: SINFO if command[0] == "sinfo" else "research\nteaching\n")
    found = slurm.partitions()
    assert found is not None
    return found


def test_partitions_are_read(cluster: dict[str, slurm.Partition]) -> None:
    assert list(cluster) == ["gpu", "cpu"]
    assert (cluster["gpu"].default, cluster["gpu"].minutes) == (True, 1440)
    assert [(nodes.count, nodes.gres["gpu:v100"]) for nodes in cluster["gpu"].nodes] == [(8, 4), (2, 2)]
    assert (cluster["cpu"].minutes, cluster["cpu"].nodes[0].memory) == (None, 128000)
    assert slurm.training_partition(Resources(), cluster) == cluster["gpu"]
    assert slurm.training_partition(Resources(partition="cpu"), cluster) == cluster["cpu"]


@pytest.mark.parametrize("world", [4, 8, 32])
def test_runs_that_fit_are_accepted(cluster: dict[str, slurm.Partition], world: int) -> None:
    slurm.check_runs(Resources(gpus_per_node=4, gres="gpu:v100"), [run_of(world)], cluster)


@pytest.mark.parametrize(
    ("settings", "world", "named"),
    [
        ({"gpus_per_node": 4}, 64, "gpus_per_node = 4: rank_sweep/r4-s1 needs 16 nodes"),
        ({"gpus_per_node": 8}, 8, "the largest with 4 gpu"),
        ({"gpus_per_node": 4, "gres": "gpu:h100"}, 4, "the largest with 0 gpu:h100"),
        ({"memory_gb": 900}, 2, "memory_gb = 900"),
        ({"cpus_per_node": 65}, 2, "cpus_per_node = 65"),
    ],
)
def test_runs_that_fit_nowhere_are_refused(
    cluster: dict[str, slurm.Partition], settings: dict[str, Any], world: int, named: str
) -> None:
    with pytest.raises(UserError) as error:
        slurm.check_runs(Resources(**settings), [run_of(2), run_of(world)], cluster)
    assert named in str(error.value)
    assert "partition gpu" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"partition": "gpus"}, "partition = 'gpus': the cluster has no such partition"),
        ({"cpu_partition": "x"}, "cpu_partition = 'x'"),
        ({"account": "reserch"}, "account = 'reserch'"),
    ],
)
def test_names_that_the_cluster_does_not_know_are_refused(
    cluster: dict[str, slurm.Partition], settings: dict[str, Any], named: str
) -> None:
    slurm.check_resources(Resources(partition="gpu", cpu_partition="cpu", account="research"), cluster)
    with pytest.raises(UserError) as error:
        slurm.check_resources(Resources(**settings), cluster)
    assert named in str(error.value)
    assert ("gpu, cpu" in str(error.value)) == ("account" not in settings)


def test_without_slurm_nothing_is_refused() -> None:
    slurm.check_resources(Resources(partition="gpus", account="nobody"), None)
    slurm.check_runs(Resources(gpus_per_node=1), [run_of(64)], None)
    assert slurm.ask("no-such-program") is None


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
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
    asked = (tmp_path / "srun.args").read_text()
    assert asked.startswith(
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --gres=gpu:2 --kill-on-bad-exit"
    )
    assert slurm.launch_command(None, None) == "python -m experiments.training.launch"
    assert (
        slurm.launch_command(training_job(run_of(4), Resources()), Resources())
        == "python -m experiments.training.launch"
    )


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
    [
        (300, True, "squeue"),
        (300, False, "squeue"),
        (60, True, "sacct"),
        (60, False, "squeue"),
        (None, True, "sacct"),
        (None, False, "squeue"),
    ],
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
