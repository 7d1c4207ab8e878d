# From the runs of a study to its tables, or, where runs need a cluster, what each method would send and how long that
# would take, computed and marked simulated. Measured seconds go to timings.csv; the other tables repeat bit for bit.
# A rule for each study, since each has tables of its own.


for study, table_program in PROGRAMS.items():
    if table_program == EVALUATION:
        continue
    simulated = table_program in (CLUSTER_MODEL, SCENARIOS)

    rule:
        name:
            f"{study}_tables"
        input:
            [] if simulated else run_files(study),
        output:
            **table_outputs(table_program, study),
        log:
            f"<logs>/table/{study}.log",
        params:
            program=table_program if simulated else "experiments.analyse",
            study=study,
            options=["--out"] if simulated else ["--scale", SCALE, "--results"],
            folder=subpath(output.table, parent=True) if simulated else subpath(output.table, ancestor=3),
            code=table_code(table_program),
            settings=table_settings(study),
            text=[STUDIES[study].title, STUDIES[study].question],
        # No variable of the loop stands here: it is read when the job starts.
        shell:
            "python -m {params.program} --study {params.study} {params.options} {params.folder} > {log} 2>&1"
