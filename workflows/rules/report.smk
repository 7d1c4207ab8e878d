# One page of tables and figures, made like any other result.


localrules:
    everything,


# Which code made each run: with keep_runs=true, or restored, it may be other code than today's.
rule runs:
    input:
        [path for study in MAIN for path in run_files(study)],
    output:
        "<results>/runs.csv",
    log:
        "<logs>/runs.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
        code=code("experiments.verdicts.run_code"),
        training=TRAINING_CODE,
    shell:
        "python -m experiments.verdicts.run_code --scale {params.scale} --results {params.results} > {log} 2>&1"


# Templates, style and scripts of the page, and the claims that its table names.
PAGE_FILES = [*sorted((ROOT / "experiments/pages/templates").iterdir()), CLAIMS]
# What the page shows.
SHOWN = [
    rules.claims.output,
    rules.runs.output,
    [study_results(study) for study in MAIN],
    figure_files(MAIN_FIGURES),
    benchmark_files(),
]


rule report_html:
    input:
        SHOWN,
    output:
        "<results>/report.html",
    log:
        "<logs>/report.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
        code=code("experiments.pages.report", files=PAGE_FILES),
    shell:
        "python -m experiments.pages.report --scale {params.scale} --results {params.results} --out {output}"
        " > {log} 2>&1"


rule everything:
    input:
        SHOWN,
        rules.report_html.output,
