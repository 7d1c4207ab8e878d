# Runs that need a cluster: what each method would send and how long that would take, computed and marked simulated.


rule cluster_model:
    input:
        study=study_yaml,
        code=code(
            "experiments",
            "cluster_*.py",
            "iteration_model.py",
            "layouts.py",
            "rank_trace.py",
            "recorded_entropy.csv",
        ),
    output:
        table=report(
            "<results>/{study}/table.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study} (simulated)"},
        ),
        stages="<results>/{study}/stages.csv",
        steps="<results>/{study}/steps.csv",
        traces=report(
            "<results>/{study}/traces.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}, EDGC's ranks (simulated)"},
        ),
        moves="<results>/{study}/moves.csv",
        summary="<results>/{study}/summary.json",
    log:
        "<logs>/cluster_model/{study}.log",
    wildcard_constraints:
        study=one_of(SIMULATED),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=subpath(output.table, parent=True),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.simulation.cluster_model --study {wildcards.study} --out {params.folder} > {log} 2>&1"


rule scenarios:
    input:
        study=study_yaml,
        # Whose model, GPUs and assumptions they have.
        of=lambda w: f"experiments/studies/{STUDIES[w.study].scenarios['of']}.yaml",
        code=code(
            "experiments",
            "beyond.py",
            "scenarios.py",
            "disturbances.py",
            "cluster_*.py",
            "iteration_model.py",
            "layouts.py",
            "rank_trace.py",
            "recorded_entropy.csv",
        ),
    output:
        table=report(
            "<results>/{study}/table.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study} (simulated)"},
        ),
        break_even=report(
            "<results>/{study}/break_even.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}, break-even (simulated)"},
        ),
        sensitivity="<results>/{study}/sensitivity.csv",
        disturbances=report(
            "<results>/{study}/disturbances.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}, uneven clusters (simulated)"},
        ),
    log:
        "<logs>/scenarios/{study}.log",
    wildcard_constraints:
        study=one_of(IMAGINED),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        folder=subpath(output.table, parent=True),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.simulation.break_even --study {wildcards.study} --out {params.folder} > {log} 2>&1"
