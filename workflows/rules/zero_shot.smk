# Trained models to Hugging Face folders, then lm-eval on tasks made from the held-out text or on standard tasks whose
# data was fetched beforehand: no network is used.


TASK_FILES = [
    path.relative_to(ROOT) for path in sorted((ROOT / "experiments/evaluation/tasks").glob("*.yaml"))
]


rule tasks:
    input:
        data=evaluated_data,
    output:
        "<results>/{study}/tasks/tasks.json",
    log:
        "<logs>/tasks/{study}.log",
    params:
        data=subpath(input.data, parent=True),
        folder=subpath(output[0], parent=True),
        code=code("experiments.evaluation.tasks.make", "experiments.evaluation.tasks.utils", files=TASK_FILES),
    shell:
        "python -m experiments.evaluation.tasks.make --data {params.data} --out {params.folder} > {log} 2>&1"


# Runs first and where Snakemake runs: what is missing is said before anything is trained.
rule standard_tasks:
    output:
        "<results>/{study}/standard_tasks.json",
    log:
        "<logs>/standard_tasks/{study}.log",
    priority: 100
    localrule: True
    params:
        scale=SCALE,
        code=code("experiments.evaluation.standard_tasks"),
        settings=lambda w: settings(EVALUATIONS[w.study]),
    shell:
        "python -m experiments.evaluation.standard_tasks check --study {wildcards.study} --scale {params.scale} --out {output}"
        " > {log} 2>&1"


rule export:
    input:
        runs=evaluated_files,
        data=evaluated_data,
    output:
        directory("<results>/{study}/models"),
    log:
        "<logs>/export/{study}.log",
    priority: 1
    params:
        data=subpath(input.data, parent=True),
        code=code("experiments.evaluation.export"),
        runs=lambda w, input: list(dict.fromkeys(Path(file).parent for file in input.runs)),
    # All in one process: the imports take longer than a model.
    shell:
        "python -m experiments.evaluation.export {params.runs} --data {params.data} --out {output}"
        " > {log} 2>&1"


rule evaluate:
    input:
        # A folder has no checksum, so the models are judged by what they are made of: runs, and the code of the export.
        models=ancient("<results>/{study}/models"),
        runs=evaluated_files,
        tasks=evaluated_tasks,
    output:
        **table_outputs(EVALUATION),
    log:
        "<logs>/evaluate/{study}.log",
    wildcard_constraints:
        study=one_of(name for name, table_program in PROGRAMS.items() if table_program == EVALUATION),
    threads: 2
    params:
        models=lambda w, input: [Path(input.models, run.name) for _, run in evaluated_runs(w.study)],
        tasks=lambda w, input: task_options(w.study, input.tasks),
        folder=subpath(output.table, parent=True),
        export=code("experiments.evaluation.export"),
        code=code(EVALUATION, files=["experiments/common/equivalence.yaml"]),
        settings=lambda w: settings(EVALUATIONS[w.study]),
        text=lambda w: [STUDIES[w.study].title, STUDIES[w.study].question],
    shell:
        "python -m experiments.evaluation.evaluate {params.models} {params.tasks} --out {params.folder} --processes {threads}"
        " > {log} 2>&1"
