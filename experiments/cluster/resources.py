"""The cluster that jobs are sent to: one small file, and what a training job asks for on it.

The file is ``workflows/profiles/slurm/site.yaml``, or the one that the environment variable ``EDGC_SITE`` names. It is
read where Slurm is used and nowhere else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from edgc.errors import UserError
from experiments.common.files import ROOT
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.spec.settings import RunConfig

VARIABLE = "EDGC_SITE"
DEFAULT = ROOT / "workflows" / "profiles" / "slurm" / "site.yaml"
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
    """Read and check the site file; ``UserError`` names the key and the file."""
    path = resources_file()
    resources: Resources = validate(Resources, load_yaml(path), path)
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
