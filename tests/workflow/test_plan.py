"""What Snakemake would do: on a clean tree, for each target alone, on a cluster, and with wrong settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from edgc.errors import UserError
from experiments.common.figures import FIGURES
from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from tests.workflow.checkout_copy import ROOT, Checkout, planned
from workflows.targets import check_targets

JOINT = [name for name, studies in FIGURES.items() if len(set(studies)) > 1]
TARGETS = [*dict.fromkeys([*matrix.studies(), *JOINT, "figures", "report", "ci_regression"])]
# Of models of other studies, simulated, and figures, two of which are of one study and one of which has its name.
ALONE = (
    "zero_shot",
    "gpt2_12p1b_h100",
    "methods",
    "policies",
    "figures",
    "report",
    "ci_regression",
)


SETTINGS = {"scal=ci": "scal", "scale=huge": "huge", "scale=../ci": "../ci", "results=a b": "a b"}
SETTINGS["keep_runs=maybe"] = "maybe"
PLANNED: dict[str, list[str]] = {"": [], "each": TARGETS, **{name: [name] for name in ("all", *ALONE)}}
CALLS: dict[str, list[str]] = {
    "zero_shot at paper scale": ["-n", "-p", "zero_shot", "--config", "scale=paper"],
    "zero_shot at ci scale": ["-n", "-p", "zero_shot", "--config", "scale=ci"],
    "slurm": ["--profile", "slurm", "-n", "report"],
    "slurm at ci scale": ["--profile", "slurm", "-n", "report", "--config", "scale=ci"],
    "local": ["-np", "rank_sweep"],
    "all at workstation scale": ["-n", "all", "--config", "scale=workstation"],
    "rank_swep": ["-c2", "-n", "rank_swep"],
    **{setting: ["-n", "all", "--config", setting] for setting in SETTINGS},
}


@pytest.fixture(scope="module")
def calls(checkout: Checkout) -> dict[str, tuple[int, str]]:
    """(exit code, output) of Snakemake on a clean tree, all in one process."""
    plans = {name: ["-n", *call] for name, call in PLANNED.items()}
    return dict(zip([*plans, *CALLS], checkout.snakemake(*plans.values(), *CALLS.values()), strict=True))


@pytest.fixture(scope="module")
def plans(calls: dict[str, tuple[int, str]]) -> dict[str, dict[str, int]]:
    """The plans of single targets on a clean tree; "" is Snakemake without a target, "each" are all targets."""
    assert all(calls[name][0] == 0 for name in PLANNED), calls
    return {name: planned(calls[name][1]) for name in PLANNED}


def at_ci(studies: Sequence[str]) -> bool:
    """True if all of these have tables at ci scale: runs there, or no need of any."""
    return all(matrix.runs(study, "ci") or matrix.load_study(study).analysis is None for study in studies)


def test_all_plans_every_run_and_figure(plans: dict[str, dict[str, int]]) -> None:
    plan = plans["all"]
    assert not any("ci" in matrix.load_study(study).only_by_name for study in matrix.studies())
    assert plan["train"] == sum(len(matrix.runs(study, "ci")) for study in matrix.studies())
    assert plan["figure"] == sum(map(at_ci, FIGURES.values()))
    assert plan["report_html"] == plan["claims"] == plan["all"] == 1
    assert plan["benchmark_figure"] == 1, "that which the checkout has, drawn, not measured"
    assert plans[""] == plan


def test_all_leaves_out_what_is_made_by_its_name_alone(calls: dict[str, tuple[int, str]]) -> None:
    _, output = calls["all at workstation scale"]
    by_name = {study for study in matrix.studies() if "workstation" in matrix.load_study(study).only_by_name}
    assert {"policies", "protocol"} <= by_name
    made = [study for study in matrix.studies() if study not in by_name]
    assert planned(output)["train"] == sum(len(matrix.runs(study, "workstation")) for study in made) > 0


def test_each_target_is_planned(plans: dict[str, dict[str, int]]) -> None:
    plan = plans["each"]
    assert {plan[target] for target in TARGETS} == {1}
    assert plan["train"] == sum(len(matrix.runs(study, "ci")) for study in matrix.studies())
    assert plan["figure"] == sum(map(at_ci, FIGURES.values()))


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


def test_slurm_profile_plans_paper_scale_unless_told_otherwise(calls: dict[str, tuple[int, str]]) -> None:
    for name, scale, other in (("slurm", "paper", "ci"), ("slurm at ci scale", "ci", "paper")):
        code, text = calls[name]
        assert code == 0, text
        assert f"results/{scale}/report.html" in text and f"results/{other}/" not in text


def test_standard_tasks_are_evaluated_at_paper_scale_and_checked_first(calls: dict[str, tuple[int, str]]) -> None:
    (paper_code, paper), (ci_code, ci) = calls["zero_shot at paper scale"], calls["zero_shot at ci scale"]
    assert paper_code == ci_code == 0, paper + ci
    [evaluation] = [line for line in paper.splitlines() if "-m experiments.evaluation.evaluate " in line]
    records = "results/paper/zero_shot/standard_tasks.json"
    assert f" --standard {records} --out results/paper/zero_shot " in evaluation
    assert "--tasks-dir" not in evaluation
    assert "-m experiments.evaluation.tasks.make" not in paper
    [check] = [line for line in paper.splitlines() if "-m experiments.evaluation.standard_tasks check" in line]
    assert f"--scale paper --out {records}" in check
    [evaluation] = [line for line in ci.splitlines() if "-m experiments.evaluation.evaluate " in line]
    assert " --tasks-dir results/ci/zero_shot/tasks " in evaluation
    assert "standard" not in evaluation
    assert "-m experiments.evaluation.standard_tasks" not in ci


def one_line(code: int, text: str, *words: str) -> None:
    """Assert that a program has refused its input in one line with ``words``, Snakemake's about profiles aside."""
    lines = [line for line in text.splitlines() if not line.startswith(("Using workflow specific", "Using profile"))]
    assert code == 2 and len(lines) == 1, text
    assert lines[0].startswith("error: ") and all(word in lines[0] for word in words), text


@pytest.mark.parametrize("setting", SETTINGS)
def test_wrong_settings_are_one_line_and_exit_code_2(calls: dict[str, tuple[int, str]], setting: str) -> None:
    one_line(*calls[setting], SETTINGS[setting])
    assert "pattern" not in calls[setting][1]


def test_runs_ask_slurm_for_the_nodes_that_their_ranks_need(
    checkout: Checkout, calls: dict[str, tuple[int, str]], tmp_path: Path
) -> None:
    """A wrong site file is read while Snakemake still reads its profile, where an error would be a parser's report."""
    site = tmp_path / "site.yaml"

    def asks(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        site.write_text(text)
        return checkout.run("snakemake", "--profile", "slurm", *arguments, EDGC_SITE=str(site))

    result = asks("gpus_per_nod: 4\n", "-n", "all")
    said = f"error: unknown key gpus_per_nod (in {site}); did you mean gpus_per_node?"
    one_line(result.returncode, result.stdout, said)
    text = "{gpus_per_node: 2, gres: 'gpu:v100', training_minutes: 90, setup: 'module load {cuda}'}\n"
    result = asks(text, "-np", "rank_sweep", "--config", "scale=ci")
    assert result.returncode == 0, result.stdout
    asked = [line for line in result.stdout.splitlines() if "launcher=srun" in line]
    assert len(asked) == len(matrix.runs("rank_sweep", "ci"))
    wanted = {"mpi=srun", "nodes=2", "tasks=2", "tasks_per_gpu=0", "gres=gpu:v100:2", "runtime=90"}
    assert all(wanted <= set(line.strip().removeprefix("resources: ").split(", ")) for line in asked)
    assert result.stdout.count("; module load {cuda} && srun --nodes=2 ") == len(asked)
    code, local = calls["local"]
    assert code == 0
    assert "srun" not in local and "nodes=" not in local and "mpi" not in local


def test_a_wrong_figure_is_one_line_and_exit_code_2(checkout: Checkout) -> None:
    file = checkout.path / "paper_figures" / "broken.py"
    file.write_text("TABLES = (\n")
    try:
        [(code, output)] = checkout.snakemake(["-n", "rank_sweep"])
    finally:
        file.unlink()
    one_line(code, output, "not valid Python at line 1 (in ", "broken.py); correct it")


def test_a_broken_study_is_refused_where_it_is_asked_for_and_else_left_out(checkout: Checkout) -> None:
    """The simulated study that takes the model of another is broken with it."""
    studies = checkout.path / "experiments" / "studies"
    draft, cluster = studies / "broken.yaml", studies / "gpt2_12p1b_h100.yaml"
    draft.write_text("study: broken\nvarients: {}\n")
    text = cluster.read_text()
    cluster.write_text(text.replace("\ncluster:", "\nclustr:"))
    try:
        asked = ([name] for name in ("broken", "all", "results/ci/broken/table.csv", "break_even"))
        *refused, (other, _), (code, output) = checkout.snakemake(*(["-n", *call] for call in (*asked, ["rank_sweep"])))
    finally:
        draft.unlink()
        cluster.write_text(text)
    for (code_refused, said), words in zip(refused, (("varients", "broken.yaml"),) * 3, strict=True):
        one_line(code_refused, said, *words)
    assert other == 2 and code == 0 and planned(output)["train"] == len(matrix.runs("rank_sweep", "ci"))
    warnings = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert [line.split()[2] for line in warnings] == ["broken", "gpt2_12p1b_h100", "break_even"]
    assert "varients" in warnings[0] and "clustr" in warnings[2]


def test_without_slurm_its_profile_is_one_line_unless_it_only_plans(
    checkout: Checkout, calls: dict[str, tuple[int, str]], tmp_path: Path
) -> None:
    """Before anything is planned or submitted. The PATH has Python and no command of Slurm's."""
    (tmp_path / "python").symlink_to(sys.executable)
    # Snakemake's plugin calls `which`.
    for name in ("bash", "git", "which", "env"):
        command = shutil.which(name)
        assert command, f"{name} is not installed"
        (tmp_path / name).symlink_to(command)
    result = checkout.run("workflows.program", "all", "--profile", "slurm", "--scale", "paper", PATH=str(tmp_path))
    missing = "there is no Slurm here: no sbatch, squeue, scancel on the PATH (in --profile slurm); start it on a node"
    one_line(result.returncode, result.stdout, missing)
    assert calls["slurm"][0] == 0


def test_unknown_target_is_one_line_with_the_nearest_name(
    checkout: Checkout, calls: dict[str, tuple[int, str]]
) -> None:
    check_targets(["all", "results/ci/zero_shot/models/x", "a.csv"], ["all"])
    for wanted, said in ((["all", "figurs"], "did you mean figures"), (["zzz"], "; known: ")):
        with pytest.raises(UserError, match=rf"^unknown target '{wanted[-1]}' \(in the command line\).*{said}"):
            check_targets(wanted, ["all", "figures"])
    result = checkout.run("workflows.program", "rank_swep")
    for code, text in (calls["rank_swep"], (result.returncode, result.stdout)):
        one_line(code, text, "unknown target 'rank_swep' (in the command line); did you mean rank_sweep")


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


def test_every_run_has_a_name_that_is_a_folder() -> None:
    for study in matrix.studies():
        runs: list[RunConfig] = [run for scale in matrix.scales() for run in matrix.runs(study, scale)]
        assert all("/" not in run.name and not run.name.startswith(".") for run in runs)
