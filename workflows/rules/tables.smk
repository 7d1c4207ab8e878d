# From the runs of a study to its tables. Measured seconds go to timings.csv; the other tables repeat bit for bit.


rule table:
    input:
        runs=lambda w: run_files(w.study),
        code=code("experiments/analyse", "*.py"),
    output:
        report(
            "<results>/{study}/table.csv",
            caption="../report/table.rst",
            category="Tables",
            labels={"study": "{study}"},
        ),
    log:
        "<logs>/table/{study}.log",
    wildcard_constraints:
        study=one_of(ANALYSED),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=3),
        title=lambda w: STUDIES[w.study].title,
        question=lambda w: STUDIES[w.study].question,
    shell:
        "python -m experiments.analyse --study {wildcards.study} --scale {params.scale} --results {params.results}"
        " > {log} 2>&1"
