# Text to token files, and training runs on them.


# A run finds its data by data.path of its settings.
rule data:
    output:
        [f"<results>/data/{{data}}/{name}" for name in DATA_FILES],
    log:
        "<logs>/data/{data}.log",
    # Before all that asks for one core, which fills what runs leave over.
    priority: 1
    threads: 2
    params:
        folder=subpath(output[0], parent=True),
        scale=SCALE,
        code=lambda w: recorded_or(f"data/{w.data}/data.yaml", DATA_CODE),
        settings=lambda w: settings(matrix.data_config(SCALE, w.data)),
    shell:
        "python -m experiments.data prepare --scale {params.scale} --name {wildcards.data} --out {params.folder}"
        " > {log} 2>&1"


rule texts:
    input:
        sorted(
            {f"<results>/data/{run.data.path}/data.yaml" for runs in RUNS.values() for run in runs.values()}
        ),
    localrule: True


# A run's folder is complete when `status` is there, whatever that says: a diverged or failed run is a result too.
# Beside the files below it may hold tensors.parquet, spectra.parquet and a checkpoint; they are published before
# `status`. A run follows from its settings, its text and the code: not from the other lines of its study.
rule train:
    input:
        lambda w: data_files(RUNS[w.study][w.run]),
        lambda w: run_files(w.study, RUNS[w.study][w.run].needs),
    output:
        [f"<results>/{{study}}/{{run}}/{name}" for name in RUN_FILES],
    log:
        "<logs>/train/{study}/{run}.log",
    priority: 1
    # A core for each process, so that runs side by side do not disturb each other's timings; Snakemake cuts it down
    # to the machine.
    # Under Slurm they are those of one node, and a task is the launcher of one node.
    threads: lambda w: slurm_job(w).cpus if ON_SLURM else run_cores(RUNS[w.study][w.run])
    resources:
        **TRAINING,
        # Not a parameter: a run is not made again because it would be started in another way.
        launch=lambda w: slurm.launch_command(slurm_job(w), SITE),
    params:
        scale=SCALE,
        results=subpath(output[0], ancestor=4),
        code=lambda w: recorded_or(f"{w.study}/{w.run}/run.yaml", TRAINING_CODE[RUNS[w.study][w.run].driver]),
        settings=lambda w: run_settings(w.study, w.run),
    # Snakemake sets OMP_NUM_THREADS to `threads`, but here the threads are processes.
    shell:
        "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1;"
        " {resources.launch} --study {wildcards.study} --run {wildcards.run} --scale {params.scale}"
        " --results {params.results} 2>&1 | tee {log} >&2"
