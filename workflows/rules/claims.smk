# The paper's claims beside our values, and a fresh run beside the committed one.


REFERENCE = here(Path("results/reference", config["scale"]))


rule claims:
    input:
        tables(CLAIMED),
    output:
        "<results>/claims.csv",
    log:
        "<logs>/claims.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        scale=config["scale"],
        results=subpath(output[0], ancestor=2),
        code=code("experiments.verdicts.claims", files=["results/paper_claims.yaml"]),
    shell:
        "python -m experiments.verdicts.claims --scale {params.scale} --results {params.results} > {log} 2>&1"


rule regression:
    input:
        tables=tables(COMPARED),
        claims=rules.claims.output,
        reference=[path for study in COMPARED for path in sorted((REFERENCE / study).glob("*.csv"))],
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
        code=code("experiments.verdicts.regression", files=["experiments/verdicts/tolerances.yaml"]),
        # Of the input, so that the place of the checkout does not count as a change.
        reference=lambda w, input: REFERENCE,
    # The table of differences is for the reader, so it is shown as well as logged.
    shell:
        "python -m experiments.verdicts.regression --scale {params.scale} --results {params.results}"
        " --reference {params.reference} 2>&1 | tee {log}"
