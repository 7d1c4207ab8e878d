"""Arrows between packages point one way, and the library needs torch only."""

from __future__ import annotations

import ast
import importlib
import re
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


# Folders and modules of edgc, the lowest first. What one of them imports is in a layer below its own.
LAYERS = (
    {"description", "errors", "lazy"},
    {"checks", "presets", "runtime"},
    {"sections"},
    {"config"},
    {"checkpoints", "compressors"},
    {"entropy", "timing"},
    {"measurement"},
    {"control"},
    {"monitor"},
    {"engine"},
    {"buckets"},
    {"ddp", "doctor", "megatron"},
)


def units_of_edgc() -> dict[str, set[str]]:
    """Which folders and modules each folder or module of edgc imports, while it runs."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "edgc").rglob("*.py")):
        unit = path.relative_to(ROOT / "edgc").with_suffix("").parts[0]
        if unit == "__init__":  # the public face, which imports adapters when they are asked for
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
        modules = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "edgc":
                modules |= {f"edgc.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module))
        imports = {name.split(".")[1] for name in modules if name.startswith("edgc.")}
        found.setdefault(unit, set()).update(imports - {unit})
    return found


def test_imports_inside_the_library_point_down() -> None:
    layer = {unit: index for index, units in enumerate(LAYERS) for unit in units}
    found = units_of_edgc()
    assert set(found) == set(layer)
    assert sum(map(len, found.values())) > 40
    wrong = [(unit, other) for unit, imports in found.items() for other in imports if layer[other] >= layer[unit]]
    assert not wrong


# Folders of the suite, each importing only from lines above its own; a folder with the folders inside it is one unit.
SUITE_LAYERS = (
    {"edgc"},
    {"experiments.common"},
    {"experiments.spec", "paper_figures"},
    {"experiments.data", "experiments.cluster"},
    {"experiments.training"},
    {"experiments.evaluation", "experiments.analyse", "experiments.simulation"},
    {"experiments.bench", "experiments.power", "experiments.verdicts", "workflows"},
    {"experiments.pages"},
)


def unit_of(name: str) -> str:
    """``experiments.bench`` of ``experiments.bench.steps``; other packages are one unit each."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "experiments" else parts[0]


def modules_imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, with the names taken from them; of a file of rules by its lines."""
    if path.suffix != ".py":
        return set(re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_folders_of_the_suite_import_downwards_only() -> None:
    layer = {unit: depth for depth, units in enumerate(SUITE_LAYERS) for unit in units}
    assert len(layer) <= 20 and len(SUITE_LAYERS) <= 8
    found = set()
    files = [ROOT / "Snakefile", *(ROOT / "workflows").rglob("*.smk")]
    for package in ("experiments", "paper_figures", "workflows"):
        files += (ROOT / package).rglob("*.py")
    for path in files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("experiments", "__init__"):
            continue
        own = "workflows" if parts[0] == "Snakefile" else unit_of(".".join(parts))
        found.add(own)
        for name in modules_imported(path):
            other = unit_of(name)
            if name.partition(".")[0] in {"edgc", "experiments", "paper_figures", "workflows"} and other != own:
                assert layer[other] < layer[own], f"{path.relative_to(ROOT)}: {own} imports {name}"
    assert found | {"edgc"} == set(layer)


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
        "from edgc import EDGCConfig, UserError",
        SETTINGS,
        "import edgc.control.adaptive",
        "import edgc.control.layer_ranks",
        "import experiments.spec.matrix",
        "import paper_figures",
    ],
)
def test_settings_decisions_and_what_snakemake_imports_for_every_plan_need_no_torch(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "megatron", "pandas", "matplotlib"}


def test_the_public_face_is_whole() -> None:
    loaded = modules_after("from edgc import EDGCConfig, EntropyConfig, Handle, TimingConfig, UserError, register")
    assert "torch" in loaded and "megatron" not in loaded
    whole = "import edgc; assert all(getattr(edgc, name) is not None for name in edgc.__all__)"
    assert "megatron" in modules_after(whole)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module("edgc").nothing
