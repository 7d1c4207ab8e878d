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


include: "workflows/rules/runs.smk"
include: "workflows/rules/tables.smk"
include: "workflows/rules/zero_shot.smk"
include: "workflows/rules/results.smk"


rule all:
    default_target: True
    input:
        rules.everything.input,
    localrule: True


# Every study is a target, and a figure of several studies: entropy_trend rank_sweep methods policies_settings ...
JOINT = {name for name, needed in DRAWN.items() if len(set(needed)) > 1}
for target in dict.fromkeys([*STUDIES, *JOINT]):

    rule:
        name:
            target
        input:
            [study_results(study) for study in ([target] if target in STUDIES else DRAWN[target])],
            [] if target in STUDIES else figure_files([target]),
        localrule: True


rule figures:
    input:
        figure_files(MAIN_FIGURES),
    localrule: True


rule report:
    input:
        rules.report_html.output,
    localrule: True


# Not part of `all`: a reproduction on other hardware is complete whatever it says.
rule ci_regression:
    input:
        rules.regression.output,
    localrule: True


# As a module of another workflow none of this is ours: a misspelt target is refused with the nearest names; the results
# folder is claimed, unless the process that started Snakemake has done so; the last line is that of the step that has
# failed, and so is the exit code where that refuses its input.
if workflow.is_main_process and Path(workflow.main_snakefile) == ROOT / "Snakefile":
    folder = Path(config["results"], config["scale"])
    claims = []
    try:
        known = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
        targets.check_targets(targets.of_command_line(), known)
    except UserError as error:
        stop(error)
    shown = None if workflow.output_settings.dryrun else steps.attach()

    onstart:
        try:
            if os.environ.get(jobs.MARK) != str(folder.resolve()):
                claims.append(program.lock(folder))
        except UserError as error:
            stop(error)

    onerror:
        print("\n".join(program.closing_words(folder, config["scale"])), flush=True)
        faults = shown.faults(folder)
        print("\n".join(faults), file=sys.stderr)
        sys.exit(2 if faults[-1].startswith(steps.REFUSED) else 1)
