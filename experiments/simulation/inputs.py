"""The ``cluster:`` section of a study file: inputs of the cluster model, with sources and kinds."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from edgc.errors import UserError
from experiments.common.yaml_settings import Settings, validate
from experiments.spec.matrix import load_study, study_path

T = TypeVar("T")
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Sourced(Settings, Generic[T]):
    """A value, its source, and whether this project measured it, it was published, or it is assumed."""

    value: T
    kind: Literal["measured", "cited", "assumed"]
    source: str = Field(min_length=1)


class Network(Settings):
    """``node_gbits_per_second``: usable bandwidth of a node each way; ``latency_seconds``: of one hop."""

    node_gbits_per_second: Sourced[Annotated[list[PositiveFloat], Field(min_length=1)]]
    latency_seconds: Sourced[Annotated[float, Field(ge=0.0)]]


class Gpu(Settings):
    """Cost of compression on one GPU: peaks, and the shares of them that the operations reach.

    ``memory_bytes`` is what the dry run compares with (:mod:`experiments.simulation.dry_run`).
    """

    name: Sourced[str]
    fp32_flops: Sourced[PositiveFloat]
    memory_bytes_per_second: Sourced[PositiveFloat]
    memory_bytes: Sourced[PositiveInt]
    gemm_efficiency: Sourced[Share]
    memory_efficiency: Sourced[Share]
    orthogonalise_efficiency: Sourced[Share]
    seconds_per_matrix: Sourced[Annotated[float, Field(ge=0.0)]]


class Compute(Settings):
    """Computation of a step: ``step_efficiency`` of the peak, ``backward_ratio`` to forward, and Megatron's buckets."""

    step_efficiency: Sourced[Share]
    backward_ratio: Sourced[PositiveFloat]
    bucket_elements: Sourced[PositiveInt]


class MemoryPasses(Settings):
    """Reads and writes of 4 bytes per gradient entry that compression and decompression take together."""

    bf16: PositiveFloat
    int8: PositiveFloat
    topk: PositiveFloat
    powersgd: PositiveFloat


class Methods(Settings):
    """The methods compared and what is assumed of them."""

    powersgd_ranks: Sourced[Annotated[list[PositiveInt], Field(min_length=1)]]
    topk_fraction: Sourced[Share]
    int8_block: Sourced[PositiveInt]
    quantised_factors_rank: Sourced[PositiveInt]
    warmup_fraction: Sourced[Annotated[float, Field(ge=0.0, lt=1.0)]]
    r_min_divisor: Sourced[Annotated[float, Field(ge=1.0)]]
    mean_rank_position: Sourced[Annotated[float, Field(ge=0.0, le=1.0)]]
    memory_passes: Sourced[MemoryPasses]


class Claim(Settings):
    """Reductions that the paper reports."""

    reduction_percent: Sourced[Annotated[float, Field(gt=0.0, lt=100.0)]]
    time_reduction_percent: Sourced[Annotated[float, Field(gt=0.0, lt=100.0)]]


class ClusterConfig(Settings):
    """The ``cluster:`` section of a study file."""

    nodes: Sourced[PositiveInt]
    gpus_per_node: Sourced[PositiveInt]
    network: Network
    gpu: Gpu
    compute: Compute
    methods: Methods
    paper: Claim


def load_cluster(study: str) -> ClusterConfig:
    """The cluster inputs of ``study``; raises ``UserError`` when there are none."""
    values, path = load_study(study).cluster, study_path(study)
    if values is None:
        fix = "use a study that has one, e.g. gpt2_2p5b_v100"
        raise UserError(f"study {study} has no cluster section", where=path, fix=fix)
    return validate(ClusterConfig, values, f"{path}, cluster")
