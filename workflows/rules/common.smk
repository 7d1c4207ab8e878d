# Settings, checked once, and what several rules need to know about the studies.
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from edgc.errors import UserError
from experiments.spec import matrix
from experiments.cluster import slurm
from experiments.common.yaml_settings import load_yaml
from experiments.cluster.resources import load_resources, training_job
from paper_figures import BENCHMARKS, FIGURES, SCRIPTS

# `python` in a rule is the interpreter that runs Snakemake, whatever the caller's PATH says, on a cluster node too
# (or that of the rule's conda environment under `--sdm conda`).
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
)


def check_schema(values, schema, where):
    """Validate a mapping, fill in the schema's defaults, and report the first mistake in one line."""
    try:
        validate(values, f"../schemas/{schema}.schema.yaml")
    except WorkflowError as error:
        problem = error.__context__  # of jsonschema
        message = ": ".join([*(str(part) for part in problem.absolute_path), problem.message])
        raise UserError(message, where=where, fix=f"see workflows/schemas/{schema}.schema.yaml") from None


def read_matrix(scale):
    """Studies, runs, evaluations at a scale: {study: Study}, {study: {run name: RunConfig}}, {study: Evaluation}."""
    matrix.load_scale(scale)
    check_schema(load_yaml(matrix.scale_path(scale)), "scale", matrix.scale_path(scale))
    studies = {name: matrix.load_study(name) for name in matrix.studies()}
    runs = {name: {run.name: run for run in matrix.runs(name, scale)} for name in studies}
    evaluations = {name: matrix.evaluation(name, scale) for name in studies if studies[name].needs}
    for name in studies:
        check_schema(load_yaml(matrix.study_path(name)), "study", matrix.study_path(name))
    return studies, runs, evaluations


# Whether the profile has said that jobs go to Slurm; a job on a node is told so too.
ON_SLURM = "launcher" in workflow.resource_settings.overwrite_resources.get("train", {})

try:
    check_schema(config, "config", "--config")
    STUDIES, RUNS, EVALUATIONS = read_matrix(config["scale"])
    # At a job's start on a node there need not be any; another caller's arguments are not known.
    if (
        ON_SLURM
        and workflow.is_main_process
        and "--profile" in sys.argv
        and not slurm.only_looks(sys.argv[1:])
    ):
        slurm.require()
    SITE = load_resources() if ON_SLURM else None
    CLUSTER = slurm.partitions() if ON_SLURM else None
except UserError as error:
    # The same line and exit code as from every program of the project, not Snakemake's report of an exception.
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def one_of(names):
    """A pattern for a wildcard; without names it matches nothing."""
    return "|".join(sorted(names)) or "(?!)"


# How the table of a study comes about; a study without an entry in either is analysed from its own runs.
SIMULATED = {name for name, study in STUDIES.items() if study.cluster is not None}
IMAGINED = {name for name, study in STUDIES.items() if study.scenarios is not None}
EVALUATED = set(EVALUATIONS)
ANALYSED = {name for name in STUDIES if RUNS[name]} - SIMULATED - IMAGINED - EVALUATED

# What `all` makes: not the studies that are too long for it at this scale, nor their figures.
MAIN = [name for name, study in STUDIES.items() if config["scale"] not in study.only_by_name]
# Of these, what claims and the comparison with the committed results read; nothing else is trained for them.
CLAIMED = {claim["study"] for claim in load_yaml(Path("results/paper_claims.yaml"))["claims"]}.intersection(
    MAIN
)
COMPARED = {
    check["study"] for check in load_yaml(Path("experiments/verdicts/tolerances.yaml"))["checks"]
}.intersection(MAIN)
MAIN_FIGURES = [name for name, needed in FIGURES.items() if set(needed) <= set(MAIN)]


def slurm_job(wildcards):
    """What a run takes on the cluster; None without Slurm."""
    return training_job(RUNS[wildcards.study][wildcards.run], SITE) if ON_SLURM else None


def training_minutes(wildcards, attempt):
    partition = slurm.of_training(SITE, CLUSTER)
    return slurm.runtime(SITE, attempt, partition and partition.minutes)


# Resources of a training job, none of them without Slurm. One task is the launcher of one node.
TRAINING = (
    {
        "mpi": lambda w: "srun" if slurm_job(w).nodes > 1 else None,
        "nodes": lambda w: slurm_job(w).nodes,
        "tasks": lambda w: slurm_job(w).nodes if slurm_job(w).nodes > 1 else None,
        # Without it Slurm would start as many tasks for each GPU.
        "tasks_per_gpu": lambda w: 0 if slurm_job(w).gpus else None,
        "gres": lambda w: slurm_job(w).gres,
        "mem_mb": lambda w: slurm_job(w).memory,
        "slurm_partition": lambda w: slurm_job(w).partition,
        "runtime": training_minutes,
    }
    if ON_SLURM
    else {}
)


def refuse_impossible(dag):
    """End before anything is submitted when the cluster could never start one of the runs."""
    wanted = [job.wildcards for job in dag.needrun_jobs() if job.rule.name == "train"]
    try:
        slurm.require()
        slurm.check_runs(SITE, [RUNS[w.study][w.run] for w in wanted], CLUSTER)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


# Benchmarks that `make bench-keep` has kept: (machine, benchmark).
KEPT = Path("results/reference/bench")
MEASURED = [
    (folder.name, name)
    for folder in sorted(KEPT.glob("*"))
    for name, needed in BENCHMARKS.items()
    if all((folder / table).is_file() for table in needed)
]


wildcard_constraints:
    study=one_of(STUDIES),
    figure=one_of(FIGURES),
    run=r"[^/]+",
    data=r"[^/]+",


# The inputs of rules.


def study_yaml(wildcards):
    return f"experiments/studies/{wildcards.study}.yaml"


def code(folder, *patterns):
    """Program files: their results are cheap and are made again when the program changes. Training is not."""
    return sorted(str(path) for pattern in patterns for path in Path(folder).glob(pattern))


def run_files(study):
    """The completion marks of a study's runs."""
    return [f"<results>/{study}/{name}/status" for name in RUNS[study]]


def figure_files(names):
    """Both formats of figures."""
    return [f"<results>/figures/{name}.{kind}" for name in names for kind in ("pdf", "png")]


def tables(studies):
    """Tables of studies, without those that have none at this scale."""
    made = (SIMULATED | IMAGINED | EVALUATED | ANALYSED) & set(studies)
    return [f"<results>/{name}/table.csv" for name in STUDIES if name in made]


def study_results(study):
    """All that a study leaves: its runs, its table, its figures."""
    return [*run_files(study), *tables([study]), *figure_files(STUDIES[study].figures)]


def data_settings(wildcards):
    """The files that say how data is prepared: the scale, and for data of their own the studies."""
    default = matrix.load_scale(config["scale"]).defaults.get("data", {}).get("path", "stdlib")
    paths = {name: {run.data.path for run in runs.values()} for name, runs in RUNS.items()}
    users = [name for name in STUDIES if wildcards.data in paths[name] - {default}]
    return [
        f"experiments/{name}.yaml" for name in (f"scales/{config['scale']}", *map("studies/{}".format, users))
    ]


def evaluated_runs(study):
    """(study, RunConfig) of every model that a study evaluates."""
    needs = STUDIES[study].needs
    return [
        (name, run)
        for name, variants in needs.items()
        for run in RUNS[name].values()
        if variants == "all" or run.variant in variants
    ]


def evaluated_data(wildcards):
    """The data that the models of a study were trained on; tokenizer and held-out text come from it."""
    paths = {run.data.path for _, run in evaluated_runs(wildcards.study)}
    if len(paths) != 1:
        raise WorkflowError(f"{wildcards.study} evaluates models of {len(paths)} data folders, it takes one")
    return f"<results>/data/{paths.pop()}/data.yaml"


def evaluated_tasks(wildcards):
    """The tasks made from held-out text, and the records of the standard tasks' data, as far as a study has any."""
    wanted = EVALUATIONS[wildcards.study]
    names = ["tasks/tasks.json"] * wanted.held_out + ["standard_tasks.json"] * bool(wanted.standard)
    return [f"<results>/{wildcards.study}/{name}" for name in names]


def task_options(study, files):
    """How the evaluation is told its tasks; ``files`` are those of `evaluated_tasks`."""
    wanted = EVALUATIONS[study]
    options = [f"--batch-size {wanted.batch_size} --device {wanted.device}"]
    if wanted.held_out:
        options.append(f"--tasks-dir {Path(files[0]).parent}")
    if wanted.standard:
        options.append(f"--standard {','.join(wanted.standard)}")
    return " ".join(options)


def caption(figure):
    """The text under a figure in the report."""
    return Path(f"workflows/report/figures/{figure}.rst").read_text(encoding="utf-8").strip()


def benchmark_files():
    """Figure and table of each kept benchmark."""
    shown = [(machine, f"{name}.png", BENCHMARKS[name][0]) for machine, name in MEASURED]
    return [f"<results>/benchmarks/{machine}/{name}" for machine, *names in shown for name in names]
