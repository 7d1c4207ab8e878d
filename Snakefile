# What can be made, and under which name. Which runs exist is said in experiments/studies and experiments/scales,
# how each file is made in workflows/rules. `snakemake -n all` plans; `snakemake -c2 window_ablation` makes one study.
from snakemake.utils import min_version

min_version("9.27")


# Checks the settings, fills in their defaults (scale=ci, results=results) and reads the studies.
include: "workflows/rules/common.smk"
include: "workflows/rules/slurm.smk"


pathvars:
    results=f"{config['results']}/{config['scale']}",
    logs=f"{config['results']}/{config['scale']}/logs",


include: "workflows/rules/data.smk"
include: "workflows/rules/train.smk"
include: "workflows/rules/tables.smk"
include: "workflows/rules/zero_shot.smk"
include: "workflows/rules/cluster.smk"
include: "workflows/rules/figures.smk"
include: "workflows/rules/benchmarks.smk"
include: "workflows/rules/claims.smk"
include: "workflows/rules/report.smk"


localrules:
    all,
    figures,
    report,
    ci_regression,


# What the cluster can never start is refused before anything is submitted.
onstart:
    if ON_SLURM:
        refuse_impossible(workflow.dag)


rule all:
    default_target: True
    input:
        rules.everything.input,


# Every study is a target: entropy_trend rank_sweep window_ablation sampling_ablation methods zero_shot ...
for study in STUDIES:

    rule:
        name:
            study
        input:
            study_results(study),
        localrule: True


# A figure of several studies is a target, too: policies_settings.
for figure in (name for name, needed in DRAWN.items() if len(set(needed)) > 1 and name not in STUDIES):

    rule:
        name:
            figure
        input:
            [study_results(study) for study in DRAWN[figure]],
            figure_files([figure]),
        localrule: True


rule figures:
    input:
        figure_files(MAIN_FIGURES),


rule report:
    input:
        rules.report_html.output,


# Not part of `all`: a reproduction on other hardware is complete whatever it says.
rule ci_regression:
    input:
        rules.regression.output,


# As a module of another workflow none of this is ours: a misspelt target is refused with the nearest names; the last line
# is that of the step that has failed, and so is the exit code where that refuses its input.
if workflow.is_main_process and Path(workflow.main_snakefile) == ROOT / "Snakefile":
    folder = Path(config["results"], config["scale"])
    try:
        targets.check_targets(WANTED, config["scale"], folder, [rule.name for rule in workflow.rules])
    except UserError as error:
        stop(error)
    shown = None if workflow.output_settings.dryrun else steps.attach()

    onerror:
        print("\n".join(program.closing_words(folder, config["scale"])), flush=True)
        faults = shown.faults(folder)
        print("\n".join(faults), file=sys.stderr)
        sys.exit(2 if faults[-1].startswith(steps.REFUSED) else 1)
