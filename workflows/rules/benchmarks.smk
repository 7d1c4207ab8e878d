# Benchmarks that `make bench-keep` has kept. Nothing timed repeats, so the workflow does not measure them: it draws
# what is kept and shows it in the report, with the machine's name.


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
        machine="[^/]+",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        kept=subpath(input[0], parent=True),
        code=lambda w: code("paper_figures.__main__", MODULES[w.benchmark]),
        out=subpath(output.pdf, parent=True),
        caption=lambda w: caption(w.benchmark),
    shell:
        "python -m paper_figures {wildcards.benchmark} --results {params.kept} --out {params.out} > {log} 2>&1"


rule benchmark_table:
    input:
        KEPT / "{machine}/{table}.csv",
    output:
        "<results>/benchmarks/{machine}/{table}.csv",
    log:
        "<logs>/benchmark/{machine}/{table}.csv.log",
    wildcard_constraints:
        table=one_of(Path(needed[0]).stem for needed in BENCHMARKS.values()),
        machine="[^/]+",
    conda:
        "../../environment.yml"
    threads: 1
    shell:
        "cp {input} {output} > {log} 2>&1"
