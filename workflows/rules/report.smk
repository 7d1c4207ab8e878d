# Two reports. Ours is one page of tables and figures, made like any other result. Snakemake writes its own from the plan
# of finished work, so the rule asks a second Snakemake for the report of `everything`, which that report itself is no
# part of. That Snakemake only reads: it runs no job, needs no lock, and the records of the jobs that it shows are
# complete because their files are inputs here.


report: "../report/overview.rst"


localrules:
    everything,
    snakemake_report,


# Which code made each run: with keep_runs=true, or restored, it may be other code than today's.
rule runs:
    input:
        [path for study in MAIN for path in run_files(study)],
    output:
        report("<results>/runs.csv", caption="../report/runs.rst", category="Runs"),
    log:
        "<logs>/runs.log",
    conda:
        "../envs/figures.yml"
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
# What both reports show.
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
        report("<results>/report.html", caption="../report/page.rst", category="Report"),
    log:
        "<logs>/report.log",
    conda:
        "../envs/figures.yml"
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


rule snakemake_report:
    input:
        rules.everything.input,
    output:
        "<results>/snakemake_report.html",
    log:
        "<logs>/snakemake_report.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
        captions=source.digest(sorted((ROOT / "workflows/report").glob("*.rst"))),
        # Of the input, so that the place of the checkout and what is kept do not count as changes.
        snakefile=lambda w, input: ROOT / "Snakefile",
        keep_runs=lambda w, input: config["keep_runs"],
    shell:
        "python -m snakemake --snakefile {params.snakefile} --profile none --workflow-profile none --nolock --cores 1"
        " --config scale={params.scale} results={params.results} keep_runs={params.keep_runs}"
        " --report {output} -- everything > {log} 2>&1"
