"""The site file, what training jobs ask for, and how Slurm's answers are read."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
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


def test_the_committed_file_is_the_defaults(site_file: Path) -> None:
    for text in ("", "\n", "# nothing yet\n\n", DEFAULT.read_text()):
        site_file.write_text(text)
        assert load_resources() == Resources()


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
    assert runs and {(job.nodes, job.gpus, job.gres) for job in jobs} == {(1, 0, None)}
    assert max(job.cpus for job in jobs) <= 4 and max(job.memory for job in jobs) <= 8000


def test_a_job_has_a_rank_on_each_gpu_and_memory_for_its_model() -> None:
    job = training_job(run_of(6), Resources(gpus_per_node=4, gres="gpu:v100"))
    assert (job.nodes, job.ranks, job.gres) == (2, 3, "gpu:v100:3")
    model = run_of(2).model.model_dump()
    small, large = (run_of(2, model={**model, "layers": layers}) for layers in (4, 400))
    assert training_job(small, Resources()).memory < training_job(large, Resources()).memory
    job = training_job(large, Resources(memory_gb=3, cpus_per_node=7))
    assert (job.memory, job.cpus) == (3000, 7)


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


def test_ranks_that_do_not_divide_over_the_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="world size 3 is not divisible by 2 nodes"):
        ranks_per_node(run_of(3), Nodes(2))


@pytest.mark.parametrize(("seconds", "warned"), [(300, False), (60, True), (None, False)])
def test_a_slurm_that_soon_forgets_ended_jobs_is_warned_of(
    seconds: int | None, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = f"MinJobAge               = {seconds} sec\nMpiDefault = none\n" if seconds else None
    monkeypatch.setattr(slurm, "ask", lambda *_: answer)
    monkeypatch.setattr(slurm.shutil, "which", str)
    slurm.require()
    assert ("forgets ended jobs after 60 s" in capsys.readouterr().err) == warned
