# From the runs of a study to its tables. Measured seconds go to timings.csv; the other tables repeat bit for bit.
# A rule for each study, since each has tables of its own.

for study in ANALYSED:

    rule:
        name:
            f"{study}_tables"
        input:
            run_files(study),
        output:
            **table_outputs(STUDIES[study].program, study),
        log:
            f"<logs>/table/{study}.log",
        conda:
            "../../environment.yml"
        threads: 1
        params:
            study=study,
            scale=config["scale"],
            results=subpath(output.table, ancestor=3),
            code=code("experiments.analyse.__main__", STUDIES[study].program),
            title=STUDIES[study].title,
            question=STUDIES[study].question,
        shell:
            "python -m experiments.analyse --study {params.study} --scale {params.scale} --results {params.results}"
            " > {log} 2>&1"
