# Runs that need a cluster: what each method would send and how long that would take, computed and marked simulated.

RECORDED_ENTROPY = "experiments/simulation/recorded_entropy.csv"


rule cluster_model:
    output:
        **table_outputs(
            CLUSTER_MODEL,
            {
                "table.csv": "{study} (simulated)",
                "traces.csv": "{study}, EDGC's ranks (simulated)",
            },
        ),
    log:
        "<logs>/cluster_model/{study}.log",
    wildcard_constraints:
        study=one_of(SIMULATED),
    conda:
        "../envs/figures.yml"
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
        **table_outputs(
            SCENARIOS,
            {
                "table.csv": "{study} (simulated)",
                "break_even.csv": "{study}, break-even (simulated)",
                "disturbances.csv": "{study}, uneven clusters (simulated)",
            },
        ),
    log:
        "<logs>/scenarios/{study}.log",
    wildcard_constraints:
        study=one_of(IMAGINED),
    conda:
        "../envs/figures.yml"
    threads: 1
    params:
        folder=subpath(output.table, parent=True),
        code=code(SCENARIOS, files=[RECORDED_ENTROPY]),
        settings=lambda w: study_settings(w.study),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.simulation.break_even --study {wildcards.study} --out {params.folder} > {log} 2>&1"
