"""Clusters beyond the paper's: more replicas, a mixture of experts, two sites with a slow link between them.

Everything is simulated, from the assumptions of one of the paper's studies (:mod:`experiments.simulation.cost`) and:

* More GPUs are more replicas: the batch of a replica stays, so the global batch grows. Megatron's buckets grow with
  the replicas as its default does.
* Mixture of experts: every layer's MLP becomes ``experts`` of the same size, ``per_token`` of which a token passes,
  spread evenly over the ``expert_parallel`` neighbouring replicas that exchange tokens: dispatch and return, forward
  and backward, each token's hidden state in fp32, waited for. An expert's gradient is averaged over the replicas that
  hold it. Routing is even and costs nothing, no token is dropped.
* Two sites hold half of the replicas each. Gradients are averaged within the sites, exchanged between them over one
  link that all of them share, and distributed again; compressed ones stay compressed all the way. Pipelines and
  tensor-parallel groups do not cross it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from edgc.errors import UserError
from experiments.common.yaml_settings import Settings, validate
from experiments.simulation.cluster_model import load_model
from experiments.simulation.cost import Model, all_gather_seconds, all_reduce_seconds
from experiments.simulation.placement import FP32_BYTES, ParameterTensor, StageShard
from experiments.spec.matrix import load_study, study_path

# Megatron-Core, DistributedDataParallelConfig.bucket_size
LEAST_BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000


class Experts(Settings):
    """A mixture of experts in every layer; ``expert_parallel`` replicas hold one set of experts together."""

    count: PositiveInt
    per_token: PositiveInt
    expert_parallel: PositiveInt


class Sites(Settings):
    """Two sites: one-way latency of the link between them, and the bandwidth of a node within a site."""

    latency_seconds: Annotated[float, Field(ge=0.0)]
    node_gbits_per_second: PositiveFloat


class Scenario(Settings):
    """One cluster. ``gbits_per_second`` is swept: of a node, or of the link between the sites where there are two.

    ``reference`` is the bandwidth at which assumptions are varied.
    """

    label: str
    data: PositiveInt
    gbits_per_second: Annotated[list[PositiveFloat], Field(min_length=2)]
    reference: PositiveFloat
    experts: Experts | None = None
    sites: Sites | None = None

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        experts = self.experts
        if experts and self.sites:
            raise ValueError("experts over two sites are not modelled; use one of them")
        if self.sites and self.data % 2:
            raise ValueError(f"data = {self.data} is odd; use an even number for two sites")
        if experts and (self.data % experts.expert_parallel or experts.count % experts.expert_parallel):
            raise ValueError(f"expert_parallel = {experts.expert_parallel} does not divide data or count")
        if experts and experts.per_token > experts.count:
            raise ValueError("experts.per_token is more than count; use at most count")
        return self


Shares = list[Annotated[float, Field(gt=0.0, le=1.0)]]


class Case(Settings):
    """Per stage, the share of the bandwidth that its reductions have and of the speed that its devices have; from
    ``start`` to ``end`` of the run, shares of it."""

    label: str
    links: Shares | None = None
    devices: Shares | None = None
    start: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    end: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> Case:
        if self.start >= self.end:
            raise ValueError(f"start = {self.start:g} is not below end = {self.end:g}")
        return self


class Disturbances(Settings):
    """Inputs of ``disturbances.csv``; ``entropy`` names a run of ``recorded_entropy.csv``."""

    gbits_per_second: PositiveFloat
    entropy: str
    cases: Annotated[dict[str, Case], Field(min_length=1)]


class Scenarios(Settings):
    """The ``scenarios:`` section: the study whose model, GPUs and assumptions are used, and what is drawn."""

    of: str
    methods: Annotated[list[str], Field(min_length=1)]
    clusters: Annotated[dict[str, Scenario], Field(min_length=1)]
    disturbances: Disturbances | None = None

    @model_validator(mode="after")
    def _check(self) -> Scenarios:
        if self.disturbances:
            stages = len(load_model(self.of).stages)
            for name, case in self.disturbances.cases.items():
                for key, shares in (("links", case.links), ("devices", case.devices)):
                    if shares is not None and len(shares) != stages:
                        fix = f"give {stages}, one for each pipeline stage of {self.of}"
                        raise ValueError(f"disturbances.cases.{name}.{key} has {len(shares)} numbers; {fix}")
        return self


@dataclass(frozen=True, kw_only=True)
class TwoSites(Model):
    """``gbits`` is the link between the sites."""

    node_gbits: float
    site_latency: float

    @property
    def bandwidth(self) -> float:
        return self.node_gbits * 1e9 / 8 / self.sharing

    @property
    def per_site(self) -> int:
        return self.shape.data // 2

    def _across(self, size: float) -> float:
        """Seconds until both sites have exchanged what every shard of the model has of ``size`` bytes."""
        shards = self.shape.tensor * self.shape.pipeline
        return 2 * self.site_latency + shards * size / (self.gbits * 1e9 / 8)

    def _reduce(self, size: float, stage: StageShard) -> float:
        return all_reduce_seconds(size, self.per_site, self.latency, self.bandwidth) + self._across(size)

    def _gather(self, size: float, stage: StageShard) -> float:
        """Within a site, what all its replicas have to the other one, and that within the site."""
        within = all_gather_seconds(size, self.per_site, self.latency, self.bandwidth)
        return 2 * within + self._across(self.per_site * size)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Model):
    """``stages`` hold the experts of one GPU."""

    experts: Experts

    def parts(self, stage: StageShard) -> Sequence[tuple[Model, StageShard]]:
        """Parameters that all replicas hold, and those that every ``expert_parallel``-th one holds."""
        fewer = replace(self.shape, data=self.shape.data // self.experts.expert_parallel)
        shared = tuple(t for t in stage.tensors if ".experts." not in t.name)
        experts = tuple(t for t in stage.tensors if ".experts." in t.name)
        return (self, replace(stage, tensors=shared)), (replace(self, shape=fewer), replace(stage, tensors=experts))

    def active_weights(self, stage: StageShard) -> float:
        shared, experts = (part.active_weights for _, part in self.parts(stage))
        return shared + experts * self.experts.per_token / (self.experts.count // self.experts.expert_parallel)

    def exchange(self, stage: StageShard) -> float:
        group = self.experts.expert_parallel
        entries = self.micro_batch * self.shape.sequence_length * self.shape.hidden / self.shape.tensor
        size = FP32_BYTES * entries * self.experts.per_token * (group - 1) / group
        return 2 * len(stage.layer_range) * ((group - 1) * self.latency + size / self.bandwidth)


def with_experts(stage: StageShard, local: int) -> StageShard:
    """Every MLP ``local`` times."""
    tensors: list[ParameterTensor] = []
    for tensor in stage.tensors:
        layer, mlp, part = tensor.name.partition(".mlp.")
        names = [f"{layer}.mlp.experts.{i}.{part}" for i in range(local)] if mlp else [tensor.name]
        tensors += [tensor._replace(name=name) for name in names]
    return replace(stage, tensors=tuple(tensors))


def load_scenarios(study: str) -> Scenarios:
    """The ``scenarios`` section of a study.

    Raises:
        UserError: there is none, or a replica count that its experts or its sites do not divide.
    """
    values, path = load_study(study).scenarios, study_path(study)
    if values is None:
        raise UserError(f"study {study} has no scenarios section", where=path, fix="use a study that has one")
    scenarios: Scenarios = validate(Scenarios, values, f"{path}, scenarios")
    return scenarios


def model_of(of: str, cluster: Scenario, gbits: float) -> Model:
    """The model of study ``of`` with the replicas, experts and sites of ``cluster``."""
    base = load_model(of)
    buckets = max(LEAST_BUCKET, BUCKET_PER_REPLICA * cluster.data)
    model = base.assuming("compute", "bucket_elements", buckets)
    model = replace(model, shape=replace(base.shape, data=cluster.data), gbits=gbits)
    if cluster.sites:
        node, latency = cluster.sites.node_gbits_per_second, cluster.sites.latency_seconds
        return TwoSites(**vars(model), node_gbits=node, site_latency=latency)
    if cluster.experts:
        local = cluster.experts.count // cluster.experts.expert_parallel
        model = replace(model, stages=tuple(with_experts(stage, local) for stage in base.stages))
        return MixtureOfExperts(**vars(model), experts=cluster.experts)
    return model
