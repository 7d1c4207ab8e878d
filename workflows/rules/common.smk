# Settings, checked once, and what several rules need to know about the studies.
import json
import os
import sys
from pathlib import Path

# The checkout, wherever Snakemake was started: by -s, with --directory, or as a module of another workflow.
ROOT = Path(workflow.current_basedir.get_path_or_uri(secret_free=True)).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from edgc.errors import UserError
from experiments.spec import matrix
from experiments.spec.study import CLUSTER_MODEL, EVALUATION, SCENARIOS, PipelineSettings, tables_of
from experiments.common import source
from experiments.common.yaml_settings import load_yaml, validate
from workflows import jobs, program, steps, targets

# `python` in a rule is the interpreter that runs Snakemake, whatever the caller's PATH says, on a cluster node too, and
# its programs are those of this checkout.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
)


def stop(error):
    """The same line and exit code as from every program of the project, not Snakemake's report of an exception."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


try:
    config.update(validate(PipelineSettings, config, "--config").model_dump())
    SCALE = config["scale"]
    readable, broken = matrix.all_runs(SCALE)
    if workflow.is_main_process:
        targets.check_studies(broken, targets.of_command_line())
    RUNS = {name: {run.name: run for run in runs} for name, runs in readable.items()}
    STUDIES = {name: matrix.load_study(name) for name in RUNS}
    EVALUATIONS = {name: matrix.evaluation(name, SCALE) for name, study in STUDIES.items() if study.needs}
    from experiments.common.figures import BENCHMARKS, FIGURES, INPUTS, MODULES, caption  # reads their files

    TRAINING_CODE = {driver: source.training_code(driver) for driver in ("processes", "rehearsal")}
    DATA_CODE = source.data_code()
except UserError as error:
    stop(error)

# The studies that have tables at this scale, by the program that makes them.
PROGRAMS = {
    name: study.program
    for name, study in STUDIES.items()
    if study.program and (RUNS[name] or study.analysis is None)
}
# What `all` makes: not the studies that are too long for it at this scale, nor their figures.
MAIN = [name for name, study in STUDIES.items() if SCALE not in study.only_by_name]
# Of these, what claims and the comparison with the committed results read; nothing else is trained for them.
CLAIMS = ROOT / "results/paper_claims.yaml"
CLAIMED = {claim["study"] for claim in load_yaml(CLAIMS)["claims"] if SCALE in claim.get("scales", [SCALE])}
TOLERANCES = ROOT / "experiments/verdicts/tolerances.yaml"
COMPARED = {check["study"] for check in load_yaml(TOLERANCES)["checks"]}
# Figures whose studies have tables at this scale.
DRAWN = {name: needed for name, needed in FIGURES.items() if set(needed) <= PROGRAMS.keys()}
MAIN_FIGURES = [name for name, needed in DRAWN.items() if set(needed) <= set(MAIN)]


def one_of(names):
    """A pattern for a wildcard; without names it matches nothing."""
    return "|".join(sorted(names)) or "(?!)"


wildcard_constraints:
    study=one_of(STUDIES),
    figure=one_of(DRAWN),
    machine=r"[^/]+",
    run=r"[^/]+",
    data=r"[^/]+",


# What a result follows from beside its input files, as parameters of its rule: Snakemake makes a file again when they
# change. Times and comments of source and settings files do not count.


def code(*modules, files=()):
    """Fingerprint of programs with all that they import, and of other files in the checkout that they read."""
    try:
        return f"code {source.fingerprint(*modules, files=[ROOT / file for file in files])}"
    except UserError as error:
        stop(error)


def settings(values, but=None):
    """Settings as text, without those that ``but`` names."""
    return json.dumps(values.model_dump(mode="json", exclude=but), sort_keys=True)


# The inputs and outputs of rules.
DATA_FILES = [
    "data.yaml",
    "documents.jsonl",
    "tokenizer.json",
    *(f"{split}.{kind}" for split in ("train", "validation", "test") for kind in ("bin", "idx")),
]
RUN_FILES = ["run.yaml", "metrics.jsonl", "summary.json", "status"]


def run_files(study, runs=None):
    """The files of a study's runs."""
    names = RUNS[study] if runs is None else runs
    return [f"<results>/{study}/{name}/{file}" for name in names for file in RUN_FILES]


def figure_files(names):
    """All formats of figures."""
    return [f"<results>/figures/{name}.{kind}" for name in names for kind in ("pdf", "svg", "png")]


def tables(studies):
    """All tables of studies, without those that have none at this scale."""
    return [
        f"<results>/{name}/{table}" for name in PROGRAMS if name in studies for table in STUDIES[name].tables
    ]


def table_outputs(program, study="{study}"):
    """The tables of a program as outputs of a rule."""
    return {Path(name).stem: f"<results>/{study}/{name}" for name in tables_of(program)}


def study_results(study):
    """All that a study leaves: its runs, its tables, and the figures that show it, alone or under its name."""
    figures = [name for name, needed in DRAWN.items() if set(needed) == {study} or name == study]
    return [*run_files(study), *tables([study]), *figure_files(figures)]


def recorded_or(record, today):
    """With keep_runs=true the fingerprint of the code that made what is there, so that it stays; else today's."""
    kept = source.recorded_code(Path(config["results"], SCALE, record)) if config["keep_runs"] else None
    # Of a run that went on from a checkpoint of other code, the code that ended it.
    return f"code {kept.rpartition('+')[2] if kept else today}"


def data_files(run):
    """The prepared data of a run. ``data.yaml`` has the checksums of the others, which may be too large to be read."""
    first, *others = (f"<results>/data/{run.data.path}/{name}" for name in DATA_FILES)
    return [first, *map(ancient, others)]


def run_cores(run):
    """Cores of a run on one machine."""
    return 1 if run.driver == "rehearsal" else max(2, run.processes)


def run_settings(study, run):
    """What a run computes follows from: its settings, and those of the runs that it branches from or follows. How
    often a run saves its state changes nothing that it computes."""
    needed = [RUNS[study][name] for name in (run, *RUNS[study][run].needs)]
    return " ".join(settings(one, but={"train": {"checkpoint_interval", "keep_warm_up"}}) for one in needed)


def table_code(program):
    """The program of a study's tables, and what it reads."""
    if program in (CLUSTER_MODEL, SCENARIOS):
        return code(program, files=["experiments/simulation/recorded_entropy.csv"])
    return code("experiments.analyse.__main__", program)


def table_settings(study):
    """What a simulated study says, and the study whose model and assumptions it takes."""
    if not STUDIES[study].simulated:
        return ""
    names = (study, *filter(None, [(STUDIES[study].scenarios or {}).get("of")]))
    return " ".join(settings(STUDIES[name]) for name in names)


def evaluated_runs(study):
    """(study, RunConfig) of every model that a study evaluates."""
    return [
        (name, run)
        for name, variants in STUDIES[study].needs.items()
        for run in RUNS[name].values()
        if variants == "all" or run.variant in variants
    ]


def evaluated_files(wildcards):
    """The files of the runs whose models a study evaluates."""
    return [path for name, run in evaluated_runs(wildcards.study) for path in run_files(name, [run.name])]


def evaluated_data(wildcards):
    """The data that the models of a study were trained on; tokenizer and held-out text come from it."""
    paths = {run.data.path for _, run in evaluated_runs(wildcards.study)}
    if len(paths) != 1:
        raise WorkflowError(f"{wildcards.study} evaluates models of {len(paths)} data folders, it takes one")
    return f"<results>/data/{paths.pop()}/data.yaml"


def evaluated_tasks(wildcards):
    """The tasks made from held-out text, and the records of the standard tasks' data, as far as a study has any."""
    tasks = EVALUATIONS[wildcards.study]
    names = ["tasks/tasks.json"] * tasks.held_out + ["standard_tasks.json"] * bool(tasks.standard)
    return [f"<results>/{wildcards.study}/{name}" for name in names]


def task_options(study, files):
    """How the evaluation is told its tasks; ``files`` are those of `evaluated_tasks`."""
    tasks = EVALUATIONS[study]
    held_out = f"--tasks-dir {Path(files[0]).parent}" if tasks.held_out else ""
    standard = f"--standard {files[-1]}" if tasks.standard else ""
    return f"--batch-size {tasks.batch_size} {held_out} {standard}".strip()


def here(path):
    """A file of the checkout as a job in the working directory names it."""
    return Path(path) if Path.cwd() == ROOT else ROOT / path
