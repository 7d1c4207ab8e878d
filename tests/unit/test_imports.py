"""Modules that are loaded by an import: no torch for settings and plans, no Megatron-Core but for its adapter.

Which package may import which is checked by `make lint` (contracts in pyproject.toml).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


WITHOUT_MEGATRON = """
import sys, edgc.megatron
sys.modules["megatron"] = None
try:
    edgc.megatron.attach
except edgc.UserError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError
del sys.modules["megatron"]
"""


def test_only_the_megatron_package_needs_megatron() -> None:
    inside = [path for path in sorted((ROOT / "edgc").glob("*.py")) if path.stem != "__init__"]
    names = ["edgc.compressors", *(f"edgc.{path.stem}" for path in inside)]
    loaded = modules_after("\n".join([*(f"import {name}" for name in names), WITHOUT_MEGATRON]))
    assert "torch" in loaded
    assert not loaded & {"megatron", "experiments", "pydantic", "yaml", "pandas", "typer"}


SETTINGS = "from edgc.config import EDGCConfig, methods; [kind.look for kind in methods()]; EDGCConfig(method='topk')"


@pytest.mark.parametrize(
    "statement",
    [
        "from edgc import EDGCConfig, UserError",
        SETTINGS,
        "import edgc.control.adaptive",
        "import experiments.spec.matrix",
        "import experiments.common.figures",
    ],
)
def test_settings_decisions_and_what_snakemake_imports_for_every_plan_need_no_torch(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "megatron", "pandas", "matplotlib"}


def test_the_public_face_is_whole() -> None:
    loaded = modules_after("from edgc import EDGCConfig, EntropyConfig, Handle, PipelineConfig, UserError, register")
    assert "torch" in loaded and "megatron" not in loaded
    whole = "import edgc; assert all(getattr(edgc, name) is not None for name in edgc.__all__)"
    assert "megatron" in modules_after(whole)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module("edgc").nothing
