"""What Snakemake would do: on a clean tree, for each target alone, on a cluster, and with wrong settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from edgc.errors import UserError
from experiments.common.figures import FIGURES
from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from tests.workflow.checkout_copy import ROOT, Checkout
from workflows.targets import check_targets, targets

# People type these.
CONTRACT = {"entropy_trend", "rank_sweep", "window_ablation", "sampling_ablation", "methods", "gpt2_2p5b_v100"}
CONTRACT |= {"gpt2_12p1b_h100", "zero_shot", "figures", "report", "ci_regression"}
BY_NAME = {"policies_long"}
BY_NAME |= {f"policies_{name}" for name in ("bert", "four_replicas", "late", "two_stages")}
TARGETS = [
    name for name in targets() if name not in ("all", "everything", "texts", "policies_long")
]  # without runs at ci
# Of models of other studies, simulated, not part of `all`, and figures of several studies, one of which has this name.
ALONE = (
    "zero_shot",
    "gpt2_12p1b_h100",
    "policies_late",
    "methods",
    "policies_settings",
    "figures",
    "report",
    "ci_regression",
)


@pytest.fixture(scope="module")
def plans(checkout: Checkout) -> dict[str, dict[str, int]]:
    """The plans of single targets on a clean tree; "" is Snakemake without a target, "each" are all targets."""
    calls = {"": [], "each": TARGETS, **{name: [name] for name in ("all", *ALONE)}}
    return dict(zip(calls, checkout.plan(*calls.values()), strict=True))


def test_all_plans_every_run_and_figure(plans: dict[str, dict[str, int]]) -> None:
    plan = plans["all"]
    by_name = {study for study in matrix.studies() if "ci" in matrix.load_study(study).only_by_name}
    assert by_name == BY_NAME, "not part of `all` at ci scale"
    made = [study for study in matrix.studies() if study not in by_name]
    assert plan["train"] == sum(len(matrix.runs(study, "ci")) for study in made)
    assert plan["figure"] == sum(not by_name.intersection(studies) for studies in FIGURES.values())
    assert plan["report_html"] == plan["claims"] == plan["all"] == 1
    assert plan["benchmark_figure"] == 1, "that which the checkout has, drawn, not measured"
    assert plans[""] == plan


def test_each_target_is_planned(plans: dict[str, dict[str, int]]) -> None:
    plan = plans["each"]
    assert {plan[target] for target in TARGETS} == {1}
    assert plan["train"] == sum(len(matrix.runs(study, "ci")) for study in matrix.studies())
    assert plan["figure"] == sum("policies_long" not in studies for studies in FIGURES.values())


@pytest.mark.parametrize("target", ALONE)
def test_a_target_plans_what_it_needs_alone(plans: dict[str, dict[str, int]], target: str) -> None:
    plan = plans[target]
    assert plan[target] == 1
    if target in matrix.studies():
        needed = matrix.load_study(target).needs or {}
        others = sum(
            needed[name] == "all" or run.variant in needed[name] for name in needed for run in matrix.runs(name, "ci")
        )
        assert plan.get("train", 0) == len(matrix.runs(target, "ci")) + others
        assert plan.get("figure", 0) == sum(
            {target} == set(studies) or name == target for name, studies in FIGURES.items()
        )
    else:
        assert plan["train"] > 0


def test_regression_trains_only_what_is_compared_or_claimed(plans: dict[str, dict[str, int]]) -> None:
    tolerances = yaml.safe_load((ROOT / "experiments" / "verdicts" / "tolerances.yaml").read_text())
    claims = yaml.safe_load((ROOT / "results" / "paper_claims.yaml").read_text())
    here = [claim for claim in claims["claims"] if "ci" in claim.get("scales", ["ci"])]
    used = {item["study"] for item in [*tolerances["checks"], *here]}
    assert "policies" not in used and "policies" in {claim["study"] for claim in claims["claims"]}
    assert plans["ci_regression"]["train"] == sum(len(matrix.runs(study, "ci")) for study in used)


def test_slurm_profile_plans_paper_scale_unless_told_otherwise(checkout: Checkout) -> None:
    profile = ["--profile", "slurm", "-n", "all"]
    for (code, text), scale in zip(
        checkout.snakemake(profile, [*profile, "--config", "scale=ci"]), ("paper", "ci"), strict=True
    ):
        assert code == 0, text
        assert f"results/{scale}/report.html" in text
        assert f"results/{'ci' if scale == 'paper' else 'paper'}/" not in text


def test_standard_tasks_are_evaluated_at_paper_scale_and_checked_first(checkout: Checkout) -> None:
    call = ["-n", "-p", "zero_shot", "--config"]
    (paper_code, paper), (ci_code, ci) = checkout.snakemake([*call, "scale=paper"], [*call, "scale=ci"])
    assert paper_code == ci_code == 0, paper + ci
    [evaluation] = [line for line in paper.splitlines() if "-m experiments.evaluation.evaluate " in line]
    names = ",".join(matrix.evaluation("zero_shot", "paper").standard)
    assert f" --standard {names} --out results/paper/zero_shot " in evaluation
    assert "--tasks-dir" not in evaluation
    assert "-m experiments.evaluation.tasks.make" not in paper
    checks = [line for line in paper.splitlines() if "-m experiments.evaluation.standard_tasks check" in line]
    assert len(checks) == 1
    assert "--scale paper --out results/paper/zero_shot/standard_tasks.json" in checks[0]
    [evaluation] = [line for line in ci.splitlines() if "-m experiments.evaluation.evaluate " in line]
    assert " --tasks-dir results/ci/zero_shot/tasks " in evaluation
    assert "standard" not in evaluation
    assert "-m experiments.evaluation.standard_tasks" not in ci


def test_wrong_settings_are_one_line_and_exit_code_2(checkout: Checkout) -> None:
    settings = {"scal=ci": "scal", "scale=huge": "huge", "scale=../ci": "../ci", "results=a b": "a b"}
    settings["keep_runs=maybe"] = "maybe"
    calls = checkout.snakemake(*(["-n", "all", "--config", setting] for setting in settings))
    for (code, text), named in zip(calls, settings.values(), strict=True):
        lines = [line for line in text.splitlines() if not line.startswith("Using workflow specific")]
        assert code == 2 and len(lines) == 1
        assert lines[0].startswith("error: ") and named in lines[0] and "pattern" not in lines[0]
    result = checkout.run("workflows.program", "rank_sweep", "--results", "a b")
    assert result.returncode == 2
    [line] = result.stdout.splitlines()
    assert line.startswith("error: results = 'a b': a path with a space") and not (checkout.path / "a b").exists()


def test_runs_ask_slurm_for_the_nodes_that_their_ranks_need(checkout: Checkout, tmp_path: Path) -> None:
    """A wrong site file is read while Snakemake still reads its profile, where an error would be a parser's report."""
    site = tmp_path / "site.yaml"

    def asks(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        site.write_text(text)
        return checkout.run("snakemake", "--profile", "slurm", *arguments, EDGC_SITE=str(site))

    result = asks("gpus_per_nod: 4\n", "-n", "all")
    assert result.returncode == 2
    [line] = [line for line in result.stdout.splitlines() if not line.startswith("Using profile")]
    assert line == f"error: unknown key gpus_per_nod (in {site}); did you mean gpus_per_node?"
    text = "{gpus_per_node: 2, gres: 'gpu:v100', training_minutes: 90, setup: 'module load {cuda}'}\n"
    result = asks(text, "-np", "rank_sweep", "--config", "scale=ci")
    assert result.returncode == 0, result.stdout
    asked = [line for line in result.stdout.splitlines() if "launcher=srun" in line]
    assert len(asked) == len(matrix.runs("rank_sweep", "ci"))
    wanted = {"mpi=srun", "nodes=2", "tasks=2", "tasks_per_gpu=0", "gres=gpu:v100:2", "runtime=90"}
    assert all(wanted <= set(line.strip().removeprefix("resources: ").split(", ")) for line in asked)
    assert result.stdout.count("\n        module load {cuda} && srun --nodes=2 ") == len(asked)
    [(code, local)] = checkout.snakemake(["-np", "rank_sweep"])
    assert code == 0
    assert "srun" not in local and "nodes=" not in local and "mpi" not in local


def test_wrong_study_is_one_line_and_exit_code_2(checkout: Checkout) -> None:
    path = checkout.path / "experiments" / "studies" / "broken.yaml"
    path.write_text("study: broken\ntitle: t\nquestion: q\nvarients: {}\n")
    try:
        everything, *others = checkout.snakemake(
            ["-n", "all"], ["-n", "rank_sweep"], ["-n", "results/ci/figures/rank_sweep.png"]
        )
        program, named = checkout.run("workflows.program"), checkout.run("workflows.program", "broken")
    finally:
        path.unlink()
    for code, text in (everything, (program.returncode, program.stdout), (named.returncode, named.stdout)):
        line = text.splitlines()[-1]
        assert code == 2 and "Traceback" not in text
        assert line.startswith("error: ") and "varients" in line and "broken.yaml" in line
    # Of the others it is only named.
    for code, text in others:
        assert code == 0, text
        [line] = [line for line in text.splitlines() if "varients" in line]
        assert line.startswith("warning: study broken is left out: unknown key varients")
        assert "rank_sweep_tables" in text


def test_wrong_figure_is_one_line_and_exit_code_2(checkout: Checkout) -> None:
    path = checkout.path / "paper_figures" / "broken.py"
    try:
        for text, said in (
            (
                'TABLES = ("methods/tabel.csv",)',
                "TABLES: study methods has no 'tabel.csv' (in {}); did you mean table.csv",
            ),
            ("TABLES = (", "not valid Python at line 1 (in {}); correct it"),
        ):
            path.write_text(text + "\n")
            [(code, output)] = checkout.snakemake(["-n", "all"])
            line = output.splitlines()[-1]
            assert code == 2, output
            assert said.format("paper_figures/broken.py") in line.replace(f"{checkout.path}/", ""), line
    finally:
        path.unlink()


def test_unknown_standard_task_is_one_line_with_the_name_that_was_meant(checkout: Checkout) -> None:
    path = checkout.path / "experiments" / "studies" / "zero_shot.yaml"
    content = path.read_text()
    try:
        path.write_text(content.replace("- hellaswag\n", "- hellaswga\n"))
        [(code, text)] = checkout.snakemake(["-n", "zero_shot", "--config", "scale=paper"])
        assert code == 2
        line = text.splitlines()[-1]
        assert "unknown standard task 'hellaswga'" in line
        assert line.endswith("did you mean hellaswag?")
        path.write_text(content.replace("evaluation: {held_out: true, ", "evaluation: {"))
        [(code, text)] = checkout.snakemake(["-n", "zero_shot"])
        assert code == 2
        assert "no task at scale ci" in text.splitlines()[-1]
    finally:
        path.write_text(content)


def test_without_slurm_its_profile_is_one_line_unless_it_only_plans(checkout: Checkout, tmp_path: Path) -> None:
    """Before anything is planned, submitted or written. The PATH has Python and no command of Slurm's."""
    (tmp_path / "python").symlink_to(sys.executable)
    # Snakemake's plugin calls `which`.
    for name in ("bash", "git", "which", "env"):
        command = shutil.which(name)
        assert command, f"{name} is not installed"
        (tmp_path / name).symlink_to(command)
    path = str(tmp_path)
    for program, arguments in (
        ("workflows.program", ["all", "--profile", "slurm", "--scale", "paper"]),
        ("snakemake", ["--profile", "slurm", "all"]),
    ):
        result = checkout.run(program, *arguments, PATH=path)
        assert result.returncode == 2, result.stdout
        lines = result.stdout.splitlines()
        [line] = lines if program != "snakemake" else [text for text in lines if not text.startswith("Using profile")]
        assert line.startswith("error: there is no Slurm here: no sbatch, squeue, scancel on the PATH"), line
        assert "(in --profile slurm); start it on a node" in line
    assert not (checkout.path / "results" / "ci").exists() and not (checkout.path / "results" / "paper").exists()
    [(code, text)] = checkout.snakemake(["--profile", "slurm", "-np", "rank_sweep", "--config", "scale=ci"])
    assert code == 0, text


def test_unknown_target_is_one_line_with_the_nearest_names(checkout: Checkout) -> None:
    for wanted, said in (
        (["all", "figurs"], "unknown target 'figurs' (in the command line); did you mean figures"),
        (["zzz"], "unknown target 'zzz' (in the command line); known: "),
        (["results/ci/figures/method.png"], "no such figure (in the command line); did you mean methods"),
        (["results/ci/method/table.csv"], "nothing makes method (in the command line); did you mean methods"),
        (["results/ci/rank_sweep/r4-s9/status"], "no such run (in the command line); did you mean r4-s1"),
    ):
        with pytest.raises(UserError) as error:
            check_targets(wanted, "ci", Path("results/ci"))
        assert said in str(error.value) and "\n" not in str(error.value)
    for program, arguments in (("workflows.program", ()), ("snakemake", ("-c2", "-n"))):
        result = checkout.run(program, *arguments, "rank_swep")
        line = result.stdout.splitlines()[-1]
        assert result.returncode == 2, result.stdout
        assert line.startswith("error: unknown target 'rank_swep' (in the command line); did you mean rank_sweep")
        assert not (checkout.path / "results" / "ci").exists()
    figure = checkout.run("workflows.program", "results/ci/figures/methods.png", "-n")
    assert figure.returncode == 0, figure.stdout


def test_every_planned_target_is_known_to_the_workflow() -> None:
    assert {*CONTRACT, "all"} <= {*targets()}
    check_targets([*TARGETS, "all", "results/ci/zero_shot/models/x", "elsewhere/a.csv"], "ci", Path("results/ci"))


def test_unknown_target_of_make_is_one_line_with_the_nearest_names() -> None:
    # A make that runs the tests would have this one say where it enters.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    for goal, said in (
        ("reproduc", "unknown target reproduc; did you mean reproduce"),
        ("rank_sweep", "unknown target rank_sweep; it is a study: .venv/bin/snakemake -c2 rank_sweep"),
        ("zzz", "unknown target zzz; `make` lists all"),
    ):
        result = subprocess.run(["make", goal], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
        assert result.returncode == 2
        [line] = (result.stdout + result.stderr).splitlines()
        assert said in line


def test_lint_is_clean(checkout: Checkout) -> None:
    [(code, text)] = checkout.snakemake(["--lint"])
    assert code == 0, text


def test_every_run_has_a_name_that_is_a_folder() -> None:
    for study in matrix.studies():
        runs: list[RunConfig] = [run for scale in matrix.scales() for run in matrix.runs(study, scale)]
        assert all("/" not in run.name and not run.name.startswith(".") for run in runs)
