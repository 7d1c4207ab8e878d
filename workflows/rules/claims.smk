# The paper's claims beside our values, and a fresh run beside the committed one.


rule claims:
    input:
        tables=tables(CLAIMED),
        paper="results/paper_claims.yaml",
        code=code("experiments", "claim*.py"),
    output:
        report("<results>/claims.csv", caption="../report/claims.rst", category="Claims"),
    log:
        "<logs>/claims.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
    shell:
        "python -m experiments.verdicts.claims --scale {params.scale} --results {params.results} > {log} 2>&1"


rule regression:
    input:
        tables=tables(COMPARED),
        claims=rules.claims.output,
        reference=code(f"results/reference/{config['scale']}", "**/*.*"),
        code=code("experiments", "regression.py", "tolerances.yaml"),
    output:
        "<results>/regression.csv",
    log:
        "<logs>/regression.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
    # The table of differences is for the reader, so it is shown as well as logged.
    shell:
        "python -m experiments.verdicts.regression --scale {params.scale} --results {params.results}"
        " --reference results/reference/{params.scale} 2>&1 | tee {log}"
