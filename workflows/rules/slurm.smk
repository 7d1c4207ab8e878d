# What jobs are told on a Slurm cluster; elsewhere nothing.
from experiments.cluster import slurm

# Whether the profile has said that jobs go to Slurm; a job on a node is told so too.
ON_SLURM = "launcher" in workflow.resource_settings.overwrite_resources.get("train", {})

try:
    # A plan is made on machines without Slurm, too; at a job's start on a node there need not be any.
    if ON_SLURM and workflow.is_main_process and not workflow.output_settings.dryrun:
        slurm.require()
    SITE = slurm.load_resources() if ON_SLURM else None
except UserError as error:
    stop(error)


def slurm_job(wildcards):
    """What a run takes on the cluster; None without Slurm."""
    return slurm.training_job(RUNS[wildcards.study][wildcards.run], SITE) if ON_SLURM else None


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
        "runtime": SITE.training_minutes,
    }
    if ON_SLURM
    else {}
)
