"""The Slurm cluster that jobs are sent to: the site file, jobs' resources, Slurm's answers, and the launch command.

The site file is ``workflows/profiles/slurm/site.yaml``, or the one that the environment variable ``EDGC_SITE`` names.
It is read where Slurm is used and nowhere else.

Every question to Slurm may stay unanswered: a plan (``snakemake -n``) is made on machines without Slurm too. Where
there is an answer, what cannot run is refused before anything is submitted, in one line.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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
# Options of Snakemake that make nothing: long ones, and short ones also in a group such as -np.
LOOKS = re.compile(
    r"--(dry-?run|lint|report|unlock|touch|summary|detailed-summary|dag|rulegraph|filegraph|d3dag|help|version"
    r"|list\b.*|list-.*|cleanup-.*|delete-.*)(=.*)?|-[a-zA-Z]*[nltSDhv][a-zA-Z]*"
)
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
        training_minutes, minutes: longest time of a training job and of any other; the n-th attempt gets n times that.
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
    try:
        empty = not path.read_bytes().strip()
    except OSError:
        empty = False  # it is refused below
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
    nodes = nodes_for(parallel.world, resources.gpus_per_node)
    ranks = parallel.world // nodes
    share = parameters(run) / (parallel.tensor * parallel.pipeline)
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


def refuse(key: str, value: Any, message: str, fix: str) -> UserError:
    """The error about a setting of the site file that the cluster does not agree with."""
    return UserError(f"{key} = {value!r}: {message}", where=resources_file(), fix=fix)


def ask(*command: str) -> str | None:
    """Standard output of a Slurm command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def only_looks(arguments: Sequence[str]) -> bool:
    """True of arguments of Snakemake that start no job, so that they work on a machine without Slurm."""
    return any(LOOKS.fullmatch(argument) for argument in arguments)


def require() -> None:
    """Refuse to go on without Slurm's commands; ``UserError`` names those that are missing."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        fix = "start it on a node of the cluster that has them, or leave --profile slurm out; -n plans without Slurm"
        message = f"there is no Slurm here: no {', '.join(missing)} on the PATH"
        raise UserError(message, where="--profile slurm", fix=fix)


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition: how many, and the resources of each (memory in MB)."""

    count: int
    cpus: int
    memory: int
    gres: dict[str, int]  # "gpu" and "gpu:<type>"


@dataclass(frozen=True)
class Partition:
    """One partition; ``minutes`` is its time limit, None without one."""

    name: str
    default: bool
    minutes: int | None
    nodes: list[Nodes]


def parse_gres(text: str) -> dict[str, int]:
    """Counts by name: ``gpu:v100:4(S:0-1),gpu:a100`` as {"gpu": 5, "gpu:v100": 4, "gpu:a100": 1}."""
    counts: Counter[str] = Counter()
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        if match := re.fullmatch(r"(\w+)(:.+?)??(?::(\d+))?", item):
            for key in {match[1], match[1] + (match[2] or "")}:
                counts[key] += int(match[3] or 1)
    return dict(counts)


def parse_minutes(text: str) -> int | None:
    """Slurm's ``days-hours:minutes:seconds`` in whole minutes; None for ``infinite``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):\d+", text)
    days, hours, minutes = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    return 1440 * days + 60 * hours + minutes if match else None


def partitions() -> dict[str, Partition] | None:
    """The cluster's partitions; None where Slurm does not answer."""
    answer = ask("sinfo", "--noheader", "--all", "--format", "%P|%D|%c|%m|%l|%G")
    if answer is None:
        return None
    cluster: dict[str, Partition] = {}
    for line in answer.splitlines():
        name, count, cpus, memory, limit, gres = (field.strip() for field in line.split("|", 5))
        partition = Partition(name.rstrip("*"), name.endswith("*"), parse_minutes(limit), [])
        # Of unequal nodes Slurm gives the smallest, with a plus.
        nodes = Nodes(int(count), int(cpus.rstrip("+")), int(memory.rstrip("+")), parse_gres(gres))
        cluster.setdefault(partition.name, partition).nodes.append(nodes)
    return cluster


def check_resources(resources: Resources, cluster: dict[str, Partition] | None) -> None:
    """Refuse a partition or an account in the site file that the cluster does not have, with a ``UserError``."""
    if cluster is None:
        return
    for key in ("partition", "cpu_partition"):
        name = getattr(resources, key)
        if name is not None and name not in cluster:
            raise refuse(key, name, "the cluster has no such partition", f"it has {', '.join(cluster)}")
    if resources.account is not None:
        user = getpass.getuser()
        answer = ask("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account")
        accounts = sorted(set((answer or "").split()))
        if accounts and resources.account not in accounts:
            message = f"not an account of user {user}"
            raise refuse("account", resources.account, message, f"it has {', '.join(accounts)}")


def training_partition(resources: Resources, cluster: dict[str, Partition] | None) -> Partition | None:
    """The partition that training goes to; None where that is not known."""
    for partition in (cluster or {}).values():
        if partition.name == resources.partition or (resources.partition is None and partition.default):
            return partition
    return None


def check_runs(resources: Resources, runs: Iterable[RunConfig], cluster: dict[str, Partition] | None) -> None:
    """Refuse runs that the partition of training could never start; ``UserError`` names the key and what there is."""
    partition = training_partition(resources, cluster)
    if partition is None:
        return
    for run in runs:
        job, nodes = training_job(run, resources), partition.nodes
        for key, least, counts, unit in (
            ("gpus_per_node", job.gpus, [node.gres.get(resources.gres, 0) for node in nodes], resources.gres),
            ("cpus_per_node", job.cpus, [node.cpus for node in nodes], "cores"),
            ("memory_gb", job.memory, [node.memory for node in nodes], "MB of memory"),
        ):
            enough = sum(node.count for node, count in zip(nodes, counts, strict=True) if count >= least)
            if enough < job.nodes:
                message = (
                    f"{run.study}/{run.name} needs {job.nodes} nodes with {least} {unit} each, partition "
                    f"{partition.name} has {enough} of them ({sum(node.count for node in nodes)} nodes, the largest "
                    f"with {max(counts)} {unit})"
                )
                fix = f"correct {key} or the partition, or use another scale"
                raise refuse(key, getattr(resources, key), message, fix)


def runtime(resources: Resources, attempt: int, limit: int | None) -> int:
    """Minutes of a training job: more at every attempt, but not more than its partition allows."""
    return min(resources.training_minutes * attempt, limit or resources.training_minutes * attempt)


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
    check_resources(resources, partitions())
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
        "status": status_command(),
    }


def status_command() -> str:
    """Name of the command that tells Snakemake the states of its jobs: squeue where it shows ended jobs long enough.

    Else sacct, which answers where there is accounting. But it calls a job ``CANCELLED by <user>``, which Snakemake's
    executor (2.8.0) takes for a running one: after ``scancel`` it would wait for ever.
    """
    answer = ask("scontrol", "show", "config") or ""
    remembered = re.search(r"^MinJobAge\s*=\s*(\d+)", answer, re.MULTILINE)
    if remembered and int(remembered.group(1)) >= REMEMBERED_SECONDS:
        return "squeue"
    return "squeue" if ask("sacct", "-n", "-X", "-S", "now") is None else "sacct"
