"""The workflow started from another folder, with --directory, and as a module of another workflow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.workflow.checkout_copy import Checkout, make_checkout

STUDIES = ("rank_sweep", "gpt2_12p1b_h100")
MODULE = """
module benchmark:
    snakefile: "{snakefile}"
    config: config["benchmark"]

use rule * from benchmark as benchmark_*

rule mine:
    default_target: True
    input: "mine/ci/rank_sweep/table.csv"
    output: "copy.csv"
    log: "copy.log"
    shell: "cp {{input}} {{output}} 2> {{log}}"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with few studies."""
    checkout = make_checkout(tmp_path_factory.mktemp("checkout"))
    for path in (checkout.path / "experiments" / "studies").glob("*.yaml"):
        if path.stem not in STUDIES:
            path.unlink()
    return checkout


def snakemake(folder: Path, *arguments: str) -> str:
    """Output of a Snakemake that is started in ``folder``, which no path to the checkout helps."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_everything_is_made_in_another_folder(small: Checkout, tmp_path: Path) -> None:
    snakemake(tmp_path, "--snakefile", str(small.path / "Snakefile"), "all", "ci_regression")
    assert "Nothing to be done" in snakemake(small.path, "--directory", str(tmp_path), "rank_sweep")
    made = tmp_path / "results" / "ci"
    assert (made / "report.html").is_file()
    assert (made / "regression.csv").is_file() and (made / "benchmarks" / "a-machine" / "bench_network.png").is_file()
    assert not (small.path / "results" / "ci").exists()


@pytest.mark.slow
def test_as_a_module_of_another_workflow(small: Checkout, tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(MODULE.format(snakefile=small.path / "Snakefile"))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"benchmark": {"results": "mine"}}))
    snakemake(tmp_path, "--configfile", str(config))
    assert (tmp_path / "copy.csv").read_bytes() == (tmp_path / "mine/ci/rank_sweep/table.csv").read_bytes()
    assert "benchmark_report_html" in snakemake(tmp_path, "--configfile", str(config), "-n", "benchmark_all")
