# From tables to figures, claims, the comparison with the committed results, and one page of them all.


# Drawn again also when its file changes, or the style.
rule figure:
    input:
        lambda w: [f"<results>/{table}" for table in INPUTS[w.figure]],
    output:
        pdf="<results>/figures/{figure}.pdf",
        svg="<results>/figures/{figure}.svg",
        png="<results>/figures/{figure}.png",
    log:
        "<logs>/figure/{figure}.log",
    params:
        results=subpath(output.pdf, ancestor=2),
        folder=subpath(output.pdf, parent=True),
        code=lambda w: code("paper_figures.__main__", MODULES[w.figure]),
        caption=lambda w: caption(w.figure),
    shell:
        "python -m paper_figures {wildcards.figure} --results {params.results} --out {params.folder} > {log} 2>&1"


# Benchmarks that `make bench-keep` has kept. Nothing timed repeats, so the workflow does not measure them: it draws
# what is kept and shows it in the report, with the machine's name.
KEPT = here("results/reference/bench")
MEASURED = [
    f"<results>/benchmarks/{folder.name}/{name}.png"
    for folder in sorted(KEPT.glob("*"))
    for name, needed in BENCHMARKS.items()
    if all((folder / table).is_file() for table in needed)
]


rule benchmark_figure:
    input:
        lambda w: [KEPT / w.machine / table for table in BENCHMARKS[w.benchmark]],
    output:
        pdf="<results>/benchmarks/{machine}/{benchmark}.pdf",
        svg="<results>/benchmarks/{machine}/{benchmark}.svg",
        png="<results>/benchmarks/{machine}/{benchmark}.png",
    log:
        "<logs>/benchmark/{machine}/{benchmark}.log",
    wildcard_constraints:
        benchmark=one_of(BENCHMARKS),
    params:
        kept=subpath(input[0], parent=True),
        code=lambda w: code("paper_figures.__main__", MODULES[w.benchmark]),
        out=subpath(output.pdf, parent=True),
        caption=lambda w: caption(w.benchmark),
    shell:
        "python -m paper_figures {wildcards.benchmark} --results {params.kept} --out {params.out} > {log} 2>&1"


rule claims:
    input:
        tables(CLAIMED.intersection(MAIN)),
    output:
        "<results>/claims.csv",
    log:
        "<logs>/claims.log",
    params:
        scale=SCALE,
        results=subpath(output[0], ancestor=2),
        code=code("experiments.verdicts.claims", files=[CLAIMS]),
    shell:
        "python -m experiments.verdicts.claims --scale {params.scale} --results {params.results} > {log} 2>&1"


REFERENCE = here(Path("results/reference", SCALE))


rule regression:
    input:
        tables=tables(COMPARED.intersection(MAIN)),
        claims=rules.claims.output,
        reference=[
            path
            for study in COMPARED.intersection(MAIN)
            for path in sorted((REFERENCE / study).glob("*.csv"))
        ],
    output:
        "<results>/regression.csv",
    log:
        "<logs>/regression.log",
    params:
        scale=SCALE,
        results=subpath(output[0], ancestor=2),
        code=code("experiments.verdicts.regression", files=[TOLERANCES]),
        # Of the input, so that the place of the checkout does not count as a change.
        reference=lambda w, input: REFERENCE,
    # The table of differences is for the reader, so it is shown as well as logged.
    shell:
        "python -m experiments.verdicts.regression --scale {params.scale} --results {params.results}"
        " --reference {params.reference} 2>&1 | tee {log}"


SHOWN = [
    rules.claims.output,
    [study_results(study) for study in MAIN],
    figure_files(MAIN_FIGURES),
    MEASURED,
]


rule report_html:
    input:
        SHOWN,
    output:
        "<results>/report.html",
    log:
        "<logs>/report.log",
    params:
        scale=SCALE,
        results=subpath(output[0], ancestor=2),
        # Templates, style and scripts of the page, and the claims that its table names.
        code=code(
            "experiments.pages.report",
            files=[*sorted((ROOT / "experiments/pages/templates").iterdir()), CLAIMS],
        ),
    shell:
        "python -m experiments.pages.report --scale {params.scale} --results {params.results} --out {output}"
        " > {log} 2>&1"


rule everything:
    input:
        SHOWN,
        rules.report_html.output,
    localrule: True
