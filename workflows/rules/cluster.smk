# Runs that need a cluster: what each method would send and how long that would take, computed and marked simulated.

RECORDED_ENTROPY = "experiments/simulation/recorded_entropy.csv"


rule cluster_model:
    output:
        **table_outputs(CLUSTER_MODEL),
    log:
        "<logs>/cluster_model/{study}.log",
    wildcard_constraints:
        study=one_of(SIMULATED),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=subpath(output.table, parent=True),
        code=code(CLUSTER_MODEL, files=[RECORDED_ENTROPY]),
        settings=lambda w: study_settings(w.study),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.simulation.cluster_model --study {wildcards.study} --out {params.folder} > {log} 2>&1"


rule scenarios:
    output:
        **table_outputs(SCENARIOS),
    log:
        "<logs>/scenarios/{study}.log",
    wildcard_constraints:
        study=one_of(IMAGINED),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=subpath(output.table, parent=True),
        code=code(SCENARIOS, files=[RECORDED_ENTROPY]),
        settings=lambda w: study_settings(w.study),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.simulation.break_even --study {wildcards.study} --out {params.folder} > {log} 2>&1"
