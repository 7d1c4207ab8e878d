# The HTML report. Snakemake writes it from the plan of finished work, so the rule asks a second Snakemake for the
# report of `everything`, which the report itself is no part of. That Snakemake only reads: it runs no job, needs no
# lock, and the records of the jobs that it shows are complete because their files are inputs here.


report: "../report/overview.rst"


localrules:
    everything,
    report_html,


rule everything:
    input:
        rules.claims.output,
        [study_results(study) for study in MAIN],
        figure_files(MAIN_FIGURES),
        benchmark_files(),


rule report_html:
    input:
        rules.everything.input,
        captions=code("workflows/report", "**/*.rst"),
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
    shell:
        "python -m snakemake --profile none --workflow-profile none --nolock --cores 1"
        " --config scale={params.scale} results={params.results} --report {output} -- everything > {log} 2>&1"
