# One figure from the tables of its studies; drawn again also when its script, the style or its caption changes.


rule figure:
    input:
        tables=lambda w: tables(FIGURES[w.figure]),
        script=lambda w: f"paper_figures/{SCRIPTS.get(w.figure, w.figure)}.py",
        style=code("paper_figures", "style.py", "families.py"),
    output:
        pdf="<results>/figures/{figure}.pdf",
        png=report(
            "<results>/figures/{figure}.png",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
    log:
        "<logs>/figure/{figure}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        results=subpath(output.pdf, ancestor=2),
        folder=subpath(output.pdf, parent=True),
        caption=lambda w: caption(w.figure),
    shell:
        "python -m paper_figures {wildcards.figure} --results {params.results} --out {params.folder} > {log} 2>&1"
