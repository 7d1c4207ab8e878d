"""Arrows between packages point one way, and the library needs torch only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "edgc": {
        "experiments",
        "paper_figures",
        "workflows",
        "snakemake",
        "pydantic",
        "yaml",
        "pandas",
        "numpy",
        "typer",
    },
    "experiments": {"workflows", "snakemake"},
    "paper_figures": {"workflows", "snakemake", "torch", "megatron"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_points_back(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_only_the_megatron_package_needs_megatron() -> None:
    inside = [path for path in sorted((ROOT / "edgc").glob("*.py")) if path.stem != "__init__"]
    names = ["edgc.compressors", *(f"edgc.{path.stem}" for path in inside)]
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert "torch" in loaded
    assert not loaded & {"megatron", "experiments", "pydantic", "yaml", "pandas", "typer"}


SETTINGS = "from edgc.config import EDGCConfig, methods; [kind.look for kind in methods()]; EDGCConfig(method='topk')"


@pytest.mark.parametrize(
    "statement",
    [
        "import edgc",
        SETTINGS,
        "import edgc.control.adaptive",
        "import experiments.spec.matrix",
        "import paper_figures",
    ],
)
def test_what_snakemake_imports_for_every_plan_is_light(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "megatron", "pandas", "matplotlib"}
