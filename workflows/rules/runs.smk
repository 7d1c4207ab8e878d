# Text to token files, and training runs on them.


def recorded_or(record, today):
    """With keep_runs=true the fingerprint of the code that made what is there, so that it stays; else today's."""
    kept = run_codes.recorded_code(Path(config["results"], SCALE, record)) if config["keep_runs"] else None
    # Of a run that went on from a checkpoint of other code, the code that ended it.
    return f"code {kept.rpartition('+')[2] if kept else today}"


if config["keep_runs"] and workflow.is_main_process:
    folders = [Path(config["results"], SCALE, study, run) for study in RUNS for run in RUNS[study]]
    codes = [
        run_codes.recorded_code(folder / "run.yaml") for folder in folders if (folder / "status").is_file()
    ]
    others = len(codes) - codes.count(TRAINING_CODE)
    print(f"keep_runs: {others} finished runs of other code than today's are kept", file=sys.stderr)


def data_config(wildcards):
    """How the data of that name is prepared: by the scale's settings, else by those of a study."""
    default = DataConfig(**matrix.load_scale(SCALE).defaults.get("data", {}))
    used = [default, *(run.data for runs in RUNS.values() for run in runs.values())]
    return settings(next((data for data in used if data.path == wildcards.data), default))


def data_files(run):
    """The prepared data of a run. ``data.yaml`` has the checksums of the others, which may be too large to be read."""
    first, *others = (f"<results>/data/{run.data.path}/{name}" for name in DATA_FILES)
    return [first, *map(ancient, others)]


# A run finds its data by data.path of its settings.
rule data:
    output:
        [f"<results>/data/{{data}}/{name}" for name in DATA_FILES],
    log:
        "<logs>/data/{data}.log",
    conda:
        "../../environment.yml"
    threads: 2
    params:
        folder=subpath(output[0], parent=True),
        scale=SCALE,
        code=lambda w: recorded_or(f"data/{w.data}/data.yaml", DATA_CODE),
        settings=data_config,
    shell:
        "python -m experiments.data prepare --scale {params.scale} --name {wildcards.data} --out {params.folder}"
        " > {log} 2>&1"


rule texts:
    input:
        sorted(
            {f"<results>/data/{run.data.path}/data.yaml" for runs in RUNS.values() for run in runs.values()}
        ),
    localrule: True


def run_settings(study, run):
    """What a run computes follows from: its settings, and those of the runs that it branches from or follows. How
    often a run saves its state changes nothing that it computes."""
    needed = [RUNS[study][name] for name in (run, *RUNS[study][run].needs)]
    return " ".join(settings(one, but={"train": {"checkpoint_interval", "keep_warm_up"}}) for one in needed)


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
    conda:
        "../../environment.yml"
    # A core for each process, so that runs side by side do not disturb each other's timings; Snakemake cuts it down
    # to the machine.
    # Under Slurm they are those of one node, and a task is the launcher of one node.
    threads: lambda w: slurm_job(w).cpus if ON_SLURM else max(2, RUNS[w.study][w.run].parallel.world)
    resources:
        **TRAINING,
        # Not a parameter: a run is not made again because it would be started in another way.
        launch=lambda w: slurm.launch_command(slurm_job(w), SITE),
    params:
        scale=SCALE,
        results=subpath(output[0], ancestor=4),
        code=lambda w: recorded_or(f"{w.study}/{w.run}/run.yaml", TRAINING_CODE),
        settings=lambda w: run_settings(w.study, w.run),
    # Snakemake sets OMP_NUM_THREADS to `threads`, but here the threads are processes. On a terminal the progress bar
    # is shown; the log gets the lines without it.
    shell:
        r"""
        export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
        export TTY_COMPATIBLE=$([ -t 2 ] && echo 1 || echo 0) COLUMNS=$(stty size <&2 2>/dev/null | cut -d' ' -f2)
        {resources.launch} --study {wildcards.study} --run {wildcards.run} --scale {params.scale} \
            --results {params.results} 2>&1 | tee >(cat >&2) | sed -u 's/\x1b\[[0-9;?]*[A-Za-z]//g; s/.*\r//' >{log}
        """
