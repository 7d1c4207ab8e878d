# One figure from the tables that it reads; drawn again also when its file changes, or the style.


rule figure:
    input:
        lambda w: [f"<results>/{table}" for table in INPUTS[w.figure]],
    output:
        pdf="<results>/figures/{figure}.pdf",
        svg="<results>/figures/{figure}.svg",
        png="<results>/figures/{figure}.png",
    log:
        "<logs>/figure/{figure}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        results=subpath(output.pdf, ancestor=2),
        folder=subpath(output.pdf, parent=True),
        code=lambda w: code("paper_figures.__main__", MODULES[w.figure]),
        caption=lambda w: caption(w.figure),
    shell:
        "python -m paper_figures {wildcards.figure} --results {params.results} --out {params.folder} > {log} 2>&1"
