"""The Slurm cluster that jobs are sent to: the site file, jobs' resources, the launch command, and jobs that are left.

The site file is ``workflows/profiles/slurm/site.yaml``, or the one that the environment variable ``EDGC_SITE`` names.
It is read where Slurm is used and nowhere else. What the cluster does not have, Slurm itself refuses at submission.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import ROOT
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.spec.settings import RunConfig

VARIABLE = "EDGC_SITE"
DEFAULT = ROOT / "workflows" / "profiles" / "slurm" / "site.yaml"
COMMANDS = ("sbatch", "squeue", "scancel")  # without which nothing can be submitted, watched and ended
ANSWER_SECONDS = 30
REMEMBERED_SECONDS = 240  # Snakemake asks for states every three minutes, or oftener
CANCEL_SECONDS = 180  # Slurm gives an ending job time, and an epilog
# First port of a rendezvous and how many there are: below what systems give away themselves.
PORTS = (15000, 16000)


# Memory of a training job where the site file gives none: Python with torch and Megatron, and per parameter of a rank
# fp32 weight, gradient, two Adam moments, error feedback, and as much again for activations and copies.
MEGABYTES_PER_RANK, BYTES_PER_PARAMETER = 1200, 40


class Resources(Settings):
    """Settings of a cluster; everything has a default.

    Args:
        account, qos: whom jobs are charged to, and their quality of service.
        partition, cpu_partition: of training and evaluation, and of all other jobs (``partition`` where it is not
            given).
        gpus_per_node: 0 trains on the cores of one node.
        gres: name of the GPUs in ``--gres``, with their type where the cluster wants one (``gpu:v100``).
        cpus_per_node: cores that a training job takes on each of its nodes; by default one for each rank.
        memory_gb: memory that it takes on each node, in GB; by default estimated from the model.
        training_minutes, minutes: longest time of a training job, which goes on where it was, and of any other job,
            whose n-th attempt gets n times that.
        network_interface: network card that ranks on several nodes talk over.
        setup: line of shell before a training starts, such as ``module load cuda``.
        jobs: most jobs in the queue at once.
        retries: how often a job that failed or ran out of time is submitted again.
    """

    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    qos: str | None = None
    gpus_per_node: int = Field(0, ge=0)
    gres: str = Field("gpu", pattern=r"^[A-Za-z0-9_]+(:[A-Za-z0-9_.]+)?$")
    cpus_per_node: PositiveInt | None = None
    memory_gb: PositiveInt | None = None
    training_minutes: PositiveInt = 1440
    minutes: PositiveInt = 60
    network_interface: str | None = Field(None, pattern=r"^[A-Za-z0-9_.,:^=-]+$")
    setup: str | None = None
    jobs: PositiveInt = 100
    retries: int = Field(2, ge=0)


@dataclass(frozen=True)
class Job:
    """Resources that one training job asks Slurm for; memory in MB, on each node."""

    nodes: int
    ranks: int  # on each node
    cpus: int  # on each node
    memory: int
    gpus: int  # on each node
    gres: str | None
    partition: str | None


def resources_file() -> Path:
    """The file in use."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


def load_resources() -> Resources:
    """Read and check the site file, which may be empty; ``UserError`` names the key and the file."""
    path = resources_file()
    empty = path.is_file() and not path.read_bytes().strip()
    resources: Resources = validate(Resources, {} if empty else load_yaml(path), path)
    return resources


def nodes_for(world: int, gpus_per_node: int) -> int:
    """The fewest nodes that hold ``world`` ranks, one on a GPU and equally many on each; 1 without GPUs."""
    if not gpus_per_node:
        return 1
    return next(nodes for nodes in range(-(-world // gpus_per_node), world + 1) if world % nodes == 0)


def parameters(run: RunConfig) -> int:
    """Number of parameters of a transformer, to leading order: 12 h^2 a layer (Kaplan 2020, section 2.1) and the
    embedding; each expert has an MLP of its own."""
    model = run.model
    ffn = model.ffn_hidden or 4 * model.hidden
    mlp = 2 * model.hidden * ffn * (model.experts or 1)
    vocabulary = (run.data.vocab_size or 50304) * (1 if model.tie_embeddings else 2)
    return model.layers * (4 * model.hidden**2 + mlp) + (vocabulary + model.sequence_length) * model.hidden


def training_job(run: RunConfig, resources: Resources) -> Job:
    """The nodes of a run, and what it takes on each of them."""
    parallel = run.parallel
    nodes = nodes_for(run.processes, resources.gpus_per_node)
    ranks = run.processes // nodes
    share = parameters(run) / (parallel.tensor * parallel.pipeline)
    share *= parallel.world / run.processes  # replicas that one process holds
    estimate = ranks * (MEGABYTES_PER_RANK + share * BYTES_PER_PARAMETER / 1e6)
    gpus = ranks if resources.gpus_per_node else 0
    return Job(
        nodes=nodes,
        ranks=ranks,
        cpus=resources.cpus_per_node or max(2, ranks),
        memory=resources.memory_gb * 1000 if resources.memory_gb else round(estimate),
        gpus=gpus,
        gres=f"{resources.gres}:{gpus}" if gpus else None,
        partition=resources.partition,
    )


def ask(*command: str) -> str | None:
    """Standard output of a Slurm command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def require() -> None:
    """Refuse to go on without Slurm's commands (``UserError``); warn where ended jobs leave squeue too soon."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        fix = "start it on a node of the cluster that has them, or leave --profile slurm out; -n plans without Slurm"
        message = f"there is no Slurm here: no {', '.join(missing)} on the PATH"
        raise UserError(message, where="--profile slurm", fix=fix)
    seconds = re.search(r"^MinJobAge\s*=\s*(\d+)", ask("scontrol", "show", "config") or "", re.MULTILINE)
    if seconds and int(seconds[1]) < REMEMBERED_SECONDS:
        problem = f"warning: Slurm forgets ended jobs after {seconds[1]} s (MinJobAge), so squeue may miss their ends"
        print(f"{problem}; docs/slurm.md says what to add", file=sys.stderr)


def launch_command(job: Job | None, resources: Resources | None) -> str:
    """Shell words to which the options of ``experiments.training.launch`` are added.

    The line of shell of the site file comes first, and the network card of NCCL and gloo. Over several nodes ``srun``
    starts a launcher on each, which is torchrun's elastic agent through its programming interface. The first task runs
    where ``srun`` does, on the first node of the allocation: that is where the agents meet. When one launcher fails
    ``srun`` ends the others at once; when one has ended well the others have a minute.
    """
    launcher = "python -m experiments.training.launch"
    if job is None or resources is None:
        return launcher
    words = [resources.setup] if resources.setup else []
    if resources.network_interface:
        words += [f"export {kind}_SOCKET_IFNAME={resources.network_interface}" for kind in ("NCCL", "GLOO")]
    if job.nodes > 1:
        first, count = PORTS
        meeting = f'"$SLURM_LAUNCH_NODE_IPADDR:$(({first} + SLURM_JOB_ID % {count}))"'
        task = f'exec {launcher} --nodes {job.nodes} --node "$SLURM_PROCID" --rendezvous {meeting} "$@"'
        gres = f" --gres={job.gres}" if job.gres else ""
        launcher = (
            f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 --cpus-per-task={job.cpus}{gres}"
            f" --kill-on-bad-exit=1 --wait=60 bash -c '{task}' launch"
        )
    return " && ".join([*words, launcher])


def jobs_of(folder: Path) -> list[str]:
    """Numbers of this user's jobs, waiting or running, that a Snakemake in ``folder`` has submitted."""
    answer = ask("squeue", "--me", "--noheader", "--format", "%i|%k|%Z") or ""
    jobs = [line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]
    # The comment is that of Snakemake's executor.
    return [number for number, words, place in jobs if words.startswith("rule_") and Path(place) == folder]


def cancel_jobs(folder: Path) -> int:
    """Cancel the jobs that a killed Snakemake has left in the queue; returns how many there were.

    Raises:
        UserError: they do not end.
    """
    jobs = remaining = jobs_of(folder)
    if jobs:
        ask("scancel", *jobs)
    deadline = time.monotonic() + CANCEL_SECONDS
    while remaining:
        if time.monotonic() > deadline:
            raise UserError(f"jobs of a killed workflow do not end: {', '.join(remaining)}", fix="scancel them")
        time.sleep(1)
        remaining = jobs_of(folder)
    return len(jobs)


@main_guard
def profile() -> dict[str, Any]:
    """The entries of Snakemake's profile that follow from the site file; a mistake is one line and exit code 2."""
    resources = load_resources()
    gres = f"{resources.gres}:1" if resources.gpus_per_node else None
    default = {
        "mem_mb": 4000,
        "runtime": f"{resources.minutes} * attempt",  # an expression of Snakemake's
        "slurm_partition": resources.cpu_partition or resources.partition,
        "slurm_account": resources.account,
        "qos": resources.qos,
    }
    evaluate = {"slurm_partition": resources.partition, "gres": gres}
    return {
        "jobs": resources.jobs,
        "retries": resources.retries,
        "default-resources": {key: value for key, value in default.items() if value is not None},
        "evaluate": {key: value for key, value in evaluate.items() if value is not None},
    }
