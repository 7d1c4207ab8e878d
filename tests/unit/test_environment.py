"""The files that describe the environment say the same thing, and the environment is the one they describe."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.other_torch import library_tests

ROOT = Path(__file__).resolve().parents[2]


def lock() -> dict[str, str]:
    """Package -> version of requirements.lock."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, extras included, without the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in found if requirement.name != project["name"]]


def test_every_line_of_the_lock_is_an_exact_pin() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_conda_environment_has_the_pins_of_the_lock() -> None:
    """pip is called beside the file, so a name without a folder is found."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"] == ["python=3.11", "pip", {"pip": ["-r requirements.lock"]}]


def test_container_is_made_from_the_lock_with_the_same_python() -> None:
    lines = (ROOT / "workflows" / "container" / "Dockerfile").read_text().splitlines()
    [base] = [line.removeprefix("FROM ") for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"python:3\.11(-\w+)?", base)
    assert "RUN pip install --no-cache-dir -r requirements.lock" in lines
    assert not any("==" in line for line in lines if line[:1] != "#"), "versions stand in the lock alone"


def test_lock_holds_what_the_project_declares() -> None:
    pins = {canonicalize_name(name): Version(version) for name, version in lock().items()}
    for requirement in declared():
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_installed_versions_are_those_of_the_lock() -> None:
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("not the environment that make builds")
    for name, version in lock().items():
        # A CPU or CUDA build of torch adds a local part, e.g. 2.13.0+cpu.
        assert importlib.metadata.version(name).partition("+")[0] == version, name


def test_another_torch_is_tried_with_the_tests_of_the_library() -> None:
    names = {path.stem for path in library_tests()}
    assert {"test_entrywise", "test_powersgd", "test_quantization", "test_entropy"} <= names
    assert {"test_ddp", "test_doctor", "test_readme"} <= names
    # They need Megatron-Core, pandas, and what the pipeline needs.
    assert not names & {"test_checkpoint", "test_megatron", "test_analyse", "test_imports", "test_environment"}
