# Text to token files. A run finds its data by data.path of its settings.


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
        scale=config["scale"],
        code=data_code,
        settings=data_config,
    shell:
        "python -m experiments.data prepare --scale {params.scale} --name {wildcards.data} --out {params.folder}"
        " > {log} 2>&1"


localrules:
    texts,


rule texts:
    input:
        lambda w: sorted(
            {f"<results>/data/{run.data.path}/data.yaml" for runs in RUNS.values() for run in runs.values()}
        ),
