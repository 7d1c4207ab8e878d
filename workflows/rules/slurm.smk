# What jobs are told on a Slurm cluster; elsewhere nothing.
from experiments.cluster import slurm

# Whether the profile has said that jobs go to Slurm; a job on a node is told so too.
ON_SLURM = "launcher" in workflow.resource_settings.overwrite_resources.get("train", {})
# At a job's start on a node there need not be any Slurm; another caller's arguments are not known.
STARTED = ON_SLURM and workflow.is_main_process and "--profile" in sys.argv

try:
    if STARTED and not slurm.only_looks(sys.argv[1:]):
        slurm.require()
    SITE = slurm.load_resources() if ON_SLURM else None
    CLUSTER = slurm.partitions() if ON_SLURM else None
except UserError as error:
    stop(error)


def slurm_job(wildcards):
    """What a run takes on the cluster; None without Slurm."""
    return slurm.training_job(RUNS[wildcards.study][wildcards.run], SITE) if ON_SLURM else None


def training_minutes(wildcards, attempt):
    partition = slurm.training_partition(SITE, CLUSTER)
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
        stop(error)
