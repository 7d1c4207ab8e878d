"""The wheel, with what it declares and nothing else, does what README and docs say."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tests.integration.fresh_environment import ROOT, Environment, build_wheel
from tests.integration.readme import MEGATRON_PAGE, REHEARSAL_PAGE, block, check_ddp_example

pytestmark = [pytest.mark.slow, pytest.mark.costly]

MEGATRON = Path(__file__).with_name("wheel_megatron.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel as ``pip install edgc`` leaves it."""
    return Environment(tmp_path_factory.mktemp("library") / "environment", wheel)


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [path for path in (ROOT / "edgc").rglob("*") if path.suffix == ".py" or path.name == "py.typed"]
    assert held == {str(path.relative_to(ROOT)) for path in sources}


def test_the_environment_holds_what_is_declared_and_nothing_else(library: Environment, tmp_path: Path) -> None:
    library.check()
    assert "torch" in library.distributions
    found = "import edgc, importlib.util as u; from importlib.metadata import distributions as d; "
    found += "print(edgc.__file__, u.find_spec('pandas'), *sorted(x.name.lower() for x in d()))"
    where, pandas, *listed = library.run("-c", found, folder=tmp_path).stdout.replace("_", "-").split()
    assert listed == sorted([*library.distributions, "edgc"])
    assert pandas == "None" and where.startswith(str(library.folder).replace("_", "-"))


def test_the_ddp_example_runs_with_what_is_declared(library: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("init_process_group"), encoding="utf-8")
    done = library.launch("train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_ddp_example(done.stdout)
    # What torch says at its import where numpy is missing.
    assert "NumPy" not in done.stderr


def test_the_doctor_runs_with_what_is_declared(library: Environment, tmp_path: Path) -> None:
    arguments = ("-m", "edgc.doctor", "--hidden", "128", "--rank", "4", "--repeats", "1")
    for done in (library.run(*arguments, folder=tmp_path), library.launch(*arguments, folder=tmp_path)):
        assert done.returncode == 0, done.stderr
        assert re.search(r"compression would (not )?pay", done.stdout), done.stdout


def test_a_rehearsal_runs_with_what_is_declared(library: Environment, tmp_path: Path) -> None:
    arguments = ("--replicas", "2", "--steps", "1", "--method", "powersgd", "--rank", "4")
    done = library.run("-m", "edgc.rehearsal", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 replicas, 1 steps" in done.stdout and "NumPy" not in done.stderr
    told = library.run("-m", "edgc.rehearsal", "--help", folder=tmp_path)
    assert told.returncode == 0 and {"--replicas", "--strategy", "--compare"} <= set(told.stdout.split()), told.stderr


def test_the_rehearsal_example_runs_with_transformers_beside(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", wheel, beside="transformers")
    environment.check()
    text = block("GPT2LMHeadModel", REHEARSAL_PAGE)
    assert len(text.splitlines()) <= 30
    (tmp_path / "rehearse.py").write_text(text, encoding="utf-8")
    done = environment.run("rehearse.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    [share] = re.findall(r"([\d.]+)% of a dense all-reduce", done.stdout)
    assert float(share) < 40
    assert "8 replicas, 40 steps, 0 skipped" in done.stdout and "error of the mean" in done.stdout


def test_the_megatron_example_runs_with_the_extra(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("megatron")
    try:
        environment = Environment(folder / "environment", wheel, extra="megatron")
    except LookupError as missing:
        pytest.skip(str(missing))
    environment.check()
    (folder / "example.py").write_text(block('{"preset": "paper"}', MEGATRON_PAGE), encoding="utf-8")
    done = environment.launch(str(MEGATRON), "example.py", folder=folder)
    assert done.returncode == 0, done.stderr
    shares = [float(share) for share in re.findall(r"sent ([\d.]+) of the gradient", done.stdout)]
    assert len(shares) == 2 and all(0 < share <= 1 for share in shares), done.stdout
    assert (folder / "checkpoint" / "model" / "metadata.json").is_file()
