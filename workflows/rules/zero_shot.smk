# Trained models to Hugging Face folders, then lm-eval on tasks made from the held-out text or on standard tasks whose
# data was fetched beforehand: no network is used.


rule tasks:
    input:
        data=evaluated_data,
        code=code("experiments/evaluation/tasks", "*.py", "*.yaml"),
    output:
        "<results>/{study}/tasks/tasks.json",
    log:
        "<logs>/tasks/{study}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        data=subpath(input.data, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "python -m experiments.evaluation.tasks.make --data {params.data} --out {params.folder} > {log} 2>&1"


# Runs first and where Snakemake runs: what is missing is said before anything is trained.
rule standard_tasks:
    input:
        study_yaml,
    output:
        "<results>/{study}/standard_tasks.json",
    log:
        "<logs>/standard_tasks/{study}.log",
    priority: 100
    localrule: True
    conda:
        "../../environment.yml"
    params:
        scale=config["scale"],
    shell:
        "python -m experiments.evaluation.standard_tasks check --study {wildcards.study} --scale {params.scale} --out {output}"
        " > {log} 2>&1"


rule export:
    input:
        runs=lambda w: [f"<results>/{name}/{run.name}/status" for name, run in evaluated_runs(w.study)],
        data=evaluated_data,
    output:
        directory("<results>/{study}/models"),
    log:
        "<logs>/export/{study}.log",
    conda:
        "../../environment.yml"
    threads: 2
    params:
        data=subpath(input.data, parent=True),
        runs=lambda w, input: [Path(status).parent for status in input.runs],
    # All in one process: the imports take longer than a model.
    shell:
        "python -m experiments.evaluation.export {params.runs} --data {params.data} --out {output}"
        " > {log} 2>&1"


rule evaluate:
    input:
        study=study_yaml,
        models="<results>/{study}/models",
        tasks=evaluated_tasks,
        code=code("experiments", "evalua*.py", "equivalence.yaml", "standard_data.py"),
    output:
        table=report(
            "<results>/{study}/table.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}"},
        ),
        summary=report(
            "<results>/{study}/summary.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}, means over seeds"},
        ),
        timings="<results>/{study}/timings.csv",
    log:
        "<logs>/evaluate/{study}.log",
    wildcard_constraints:
        study=one_of(EVALUATED),
    conda:
        "../../environment.yml"
    threads: 2
    params:
        models=lambda w, input: [Path(input.models, run.name) for _, run in evaluated_runs(w.study)],
        tasks=lambda w, input: task_options(w.study, input.tasks),
        folder=subpath(output.table, parent=True),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.evaluation.evaluate {params.models} {params.tasks} --out {params.folder} --processes {threads}"
        " > {log} 2>&1"
