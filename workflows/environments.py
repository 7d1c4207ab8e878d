"""``python -m workflows.environments``: write the Conda environments from requirements.lock (``make environment``).

``environment.yml`` has every pin of the lock; ``workflows/envs/<kind>.yml`` those that one kind of rule needs: what its
programs import, and what these packages require.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.common.files import ROOT
from experiments.common.source import imported_packages

# Per environment the programs of its rules, and packages that are imported by name or by another package.
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "training": (["experiments.training.launch", "experiments.data.prepare"], ["psutil", "pyarrow"]),
    "evaluation": (
        [f"experiments.evaluation.{name}" for name in ("evaluate", "export", "standard_tasks", "tasks.make")],
        ["accelerate"],
    ),
    "figures": (
        [
            "experiments.pages.report",
            "experiments.simulation.cluster_model",
            "experiments.simulation.break_even",
            "experiments.verdicts.claims",
            "experiments.verdicts.regression",
            "experiments.verdicts.run_code",
        ],
        [],
    ),
}
KINDS["training"][0].extend(
    f"experiments.analyse.{path.stem}" for path in (ROOT / "experiments" / "analyse").glob("[a-z]*.py")
)
KINDS["figures"][0].extend(f"paper_figures.{path.stem}" for path in (ROOT / "paper_figures").glob("[a-z]*.py"))
HEAD = "# {about}; the pins are those of requirements.lock (written by `make environment`).\nname: {name}\n"
BODY = "channels:\n  - conda-forge\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n"


def lock() -> dict[str, str]:
    """Canonical name of a package -> its line in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line and line[0] != "#"}


def needed(packages: Iterable[str], pins: dict[str, str]) -> set[str]:
    """``packages`` and those of the lock that they require, as installed here."""
    found: set[str] = set()
    new = [Requirement(package) for package in packages]
    seen = set()
    while new:
        requirement = new.pop()
        name = canonicalize_name(requirement.name)
        if name not in pins or (name, extras := frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            other = Requirement(text)
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                new.append(other)
    return found


def environments() -> dict[Path, str]:
    """Path -> content of every environment file."""
    pins = lock()
    whole = HEAD.format(about="Conda environment", name="edgc") + BODY
    files = {ROOT / "environment.yml": whole + "".join(f"      - {line}\n" for line in pins.values())}
    distributions = importlib.metadata.packages_distributions()
    for kind, (programs, others) in KINDS.items():
        names = [name for module in imported_packages(*programs) for name in distributions.get(module, ())]
        chosen = needed([*names, *others], pins)
        text = HEAD.format(about=f"What the rules of {kind} need", name=f"edgc-{kind}") + BODY
        text += "".join(f"      - {line}\n" for name, line in pins.items() if name in chosen)
        files[ROOT / "workflows" / "envs" / f"{kind}.yml"] = text
    return files


if __name__ == "__main__":
    for path, content in environments().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))
