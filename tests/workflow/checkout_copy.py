"""A copy of the repository whose programs only write their files, so that plans are tested in seconds."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.common.figures import BENCHMARKS
from experiments.common.source import constant, training_code
from experiments.spec import matrix

KEPT = Path("results", "reference", "bench", "a-machine")  # with one of the benchmarks
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("edgc", "experiments", "paper_figures", "workflows")
LINKS = ("slurm", "profiles")

# Stand-ins: module -> body. The matrix, the settings, the workflow and all rules are the real ones.
HEADER = """
import os, pathlib, sys, time
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
def arguments():
    return sys.argv[1 : [word.startswith("--") for word in sys.argv].index(True)]
def write(folder, *names):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("ok\\n" if name == "status" else "{}\\n")
def scale():
    return pathlib.Path(option("--results"), option("--scale"))
"""
TOKENS = [f"{split}.{kind}" for split in ("train", "validation", "test") for kind in ("bin", "idx")]
DATA = [*TOKENS, "documents.jsonl", "tokenizer.json", "data.yaml"]
PNG = (
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe"
    "0def46b80000000049454e44ae426082"
)
PROGRAMS = {
    "experiments/data/__main__.py": f"write(option('--out'), *{DATA})",
    "experiments/training/launch.py": """
        time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
        folder = scale() / option("--study") / option("--run")
        write(folder, "run.yaml", "metrics.jsonl", "summary.json", "status")
        code = CODES.get(f"{option('--study')}/{option('--run')}", CODES[""])
        (folder / "run.yaml").write_text(f"provenance: {{code: {code}}}\\n")
    """,
    "experiments/analyse/__main__.py": """
        from experiments.spec import matrix
        write(scale() / option("--study"), *matrix.load_study(option("--study")).tables)
    """,
    "experiments/simulation/cluster_model.py": "write(option('--out'), *RESULTS)",
    "experiments/simulation/break_even.py": "write(option('--out'), *RESULTS)",
    "experiments/evaluation/tasks/make.py": "write(option('--out'), 'tasks.json')",
    "experiments/evaluation/export.py": """
        for run in arguments():
            write(pathlib.Path(option("--out"), pathlib.Path(run).name), "run.json")
    """,
    "experiments/evaluation/standard_tasks.py": "write(pathlib.Path(option('--out')).parent, 'standard_tasks.json')",
    "experiments/evaluation/evaluate.py": "write(option('--out'), *RESULTS)",
    "experiments/pages/report.py": "write(scale(), 'report.html')",
    "experiments/verdicts/claims.py": "write(scale(), 'claims.csv')",
    "experiments/verdicts/regression.py": "write(scale(), 'regression.csv')",
    "paper_figures/__main__.py": f"""
        write(option("--out"), sys.argv[1] + ".pdf", sys.argv[1] + ".svg")
        pathlib.Path(option("--out"), sys.argv[1] + ".png").write_bytes(bytes.fromhex("{PNG}"))
    """,
}


# Imports Snakemake once; what a line of stdin asks for is done in a fork, which alone imports the checkout. The output
# of each call goes to a file because Snakemake's logger keeps the stream that it first saw.
SERVER = """
import json, os, sys, tempfile
from snakemake.cli import main
answers = os.dup(1)
for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    results = []
    for call in json.loads(line):
        sys.argv = ["snakemake", *call]
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            try:
                main(call)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            sys.stdout.flush(), sys.stderr.flush()
            file.seek(0)
            results.append((code, file.read().decode()))
    os.write(answers, json.dumps(results).encode() + b"\\n")
    os._exit(0)
"""


@dataclass
class Checkout:
    """A working copy of the repository."""

    path: Path

    def command(self, program: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", program, *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        ours = ("EDGC_", "SLURM_", "SNAKEMAKE_")
        return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | extra

    def run(self, program: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m program`` here; standard error is part of ``stdout``."""
        return subprocess.run(
            self.command(program, *arguments),
            cwd=self.path,
            env=self.environment(**extra),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=2400,
        )

    def snakemake(self, *calls: Sequence[str]) -> list[tuple[int, str]]:
        """(exit code, output) of several Snakemake calls."""
        server = self.server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(calls) + "\n")
        server.stdin.flush()
        return [(code, text) for code, text in json.loads(server.stdout.readline())]

    @cached_property
    def server(self) -> subprocess.Popen[str]:
        """Ends with this process, which holds its standard input."""
        return subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=self.path,
            env=self.environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def plan(self, *calls: Sequence[str]) -> list[dict[str, int]]:
        """Jobs by rule that each dry run would start; empty when everything is up to date."""
        calls_made = self.snakemake(*(["-n", *call] for call in calls))
        assert all(code == 0 for code, _ in calls_made), calls_made
        return [planned(text) for _, text in calls_made]


def planned(text: str) -> dict[str, int]:
    """Jobs by rule in what a dry run says."""
    assert "Job stats:" in text or "Nothing to be done" in text, text
    rows = [line.split() for line in text.partition("Job stats:")[2].strip().splitlines()[2:]]
    return {rule: int(count) for rule, count in itertools.takewhile(lambda row: row and row[0] != "total", rows)}


def copy_repository(path: Path) -> None:
    """All that a workflow needs, without results."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", path)
    for name in LINKS:
        (path / name).symlink_to((ROOT / name).readlink())
    (path / "results").mkdir()
    shutil.copy(ROOT / "results" / "paper_claims.yaml", path / "results")


def make_checkout(path: Path) -> Checkout:
    copy_repository(path)
    (path / KEPT).mkdir(parents=True)
    for name in BENCHMARKS["bench_network"]:
        (path / KEPT / name).write_text("seconds\n1\n")
    # The code of training is that of this checkout: no program of it is a stand-in.
    runs = [run for runs in matrix.all_runs("ci")[0].values() for run in runs if run.driver != "processes"]
    codes = {"": training_code()} | {f"{run.study}/{run.name}": training_code(run.driver) for run in runs}
    for module, body in PROGRAMS.items():
        # Which tables a program writes is read from its file.
        declared = {name: constant(path / module, name) for name in ("RESULTS", "DETAILS")}
        lines = "".join(f"{name} = {value!r}\n" for name, value in declared.items() if value)
        code = f"CODES = {codes!r}\n"
        (path / module).write_text(code + lines + HEADER + textwrap.dedent(body))
    return Checkout(path)
