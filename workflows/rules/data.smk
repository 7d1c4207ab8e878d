# Text to token files. A run finds its data by data.path of its settings.


rule data:
    input:
        data_settings,
    output:
        info="<results>/data/{data}/data.yaml",
        documents="<results>/data/{data}/documents.jsonl",
        tokenizer="<results>/data/{data}/tokenizer.json",
        tokens=expand(
            "<results>/data/{{data}}/{split}.{kind}",
            split=["train", "validation", "test"],
            kind=["bin", "idx"],
        ),
    log:
        "<logs>/data/{data}.log",
    conda:
        "../../environment.yml"
    threads: 2
    params:
        folder=subpath(output.info, parent=True),
        scale=config["scale"],
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
