"""experiments.common.source: what a program's fingerprint follows, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.common import source
from experiments.spec.code import DATA, TRAINING, recorded_code

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '"""A program."""\nfrom edgc import used\n\n\ndef main():\n    """Does it."""\n    return used.ONE  # one\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of a program, a module that it imports, and one that it does not."""
    for folder in ("edgc", "experiments"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "experiments" / "program.py").write_text(PROGRAM)
    (tmp_path / "edgc" / "used.py").write_text("ONE = 1\n")
    (tmp_path / "edgc" / "other.py").write_text("TWO = 2\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (source._parsed, source._said, source._imports, source._files):
        cached.cache_clear()


def fingerprint(*files: Path) -> str:
    forget()
    return source.fingerprint("experiments.program", files=files)


def test_what_is_remembered_is_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process reads what the first has written, unless the file, or the program that reads it, is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    module = tmp_path / "module.py"
    program = (
        "import sys; from pathlib import Path; from experiments.common import source\n"
        "read = source._read; source._read = lambda tree: print('read') or read(tree)\n"
        "print(source._said(Path(sys.argv[1])).digest)"
    )

    def said() -> list[str]:
        command = [sys.executable, "-c", program, str(module)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split()

    module.write_text("ONE = 1\n")
    first = said()
    assert first[0] == "read" and said() == first[1:]
    module.write_text("ONE = 1  # as before\n")
    assert said() == first, "another content, the same program"
    module.write_text("ONE = 2\n")
    assert said()[1] != first[1]
    [kept] = (tmp_path / "caches" / "edgc").iterdir()
    kept.write_text("{ damaged")
    assert said()[0] == "read" and len(said()) == 1
    # Where nothing can be kept all is read, and nothing fails.
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert said()[0] == said()[0] == "read"


CHANGES: dict[str, tuple[str, Callable[[str], str], bool]] = {
    "comment": ("experiments/program.py", lambda text: text.replace("# one", "# another"), False),
    "docstring": ("experiments/program.py", lambda text: text.replace("Does it.", "Does that."), False),
    "layout": ("experiments/program.py", lambda text: text.replace("\n\n\n", "\n\n\n\n"), False),
    "a value": ("edgc/used.py", lambda text: "ONE = 3\n", True),
    "a package of an import": ("edgc/__init__.py", lambda text: "import os\n", True),
    "another module": ("edgc/other.py", lambda text: "TWO = 3\n", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_follows_what_a_program_executes(project: Path, change: str) -> None:
    name, edit, seen = CHANGES[change]
    before = fingerprint()
    path = project / name
    path.write_text(edit(path.read_text()))
    assert (fingerprint() != before) is seen


def test_a_fingerprint_follows_files_by_content(project: Path) -> None:
    path = project / "data.csv"
    path.write_text("1\n")
    before = fingerprint(path)
    assert before != fingerprint()
    path.touch()
    assert fingerprint(path) == before
    path.write_text("2\n")
    assert fingerprint(path) != before


def test_a_lazy_import_counts_and_an_unknown_module_is_refused(project: Path) -> None:
    assert [path.stem for path in source.closure("experiments.program")] == [
        "__init__",
        "used",
        "__init__",
        "program",
    ]
    (project / "edgc" / "used.py").write_text("def f():\n    from edgc.other import TWO\n    return TWO\n")
    fingerprint()
    assert project / "edgc" / "other.py" in source.closure("experiments.program")
    with pytest.raises(ValueError, match=r"no module experiments\.absent"):
        source.closure("experiments.absent")


def test_training_follows_the_library_and_not_figures_evaluation_or_studies() -> None:
    names = {path.relative_to(source.ROOT).as_posix() for path in source.closure(TRAINING)}
    wanted = {"edgc/engine.py", "edgc/entropy/sampler.py", "experiments/training/train.py"}
    assert wanted | {"experiments/data/batches.py", "experiments/spec/settings.py"} < names
    for folder in ("paper_figures", "experiments/analyse", "experiments/evaluation", "experiments/verdicts"):
        assert not any(name.startswith(folder) for name in names)
    assert "experiments/spec/matrix.py" not in names
    assert source.ROOT / "experiments" / "data" / "tokenizer.py" in source.closure(DATA)


def test_what_is_to_be_run_does_not_depend_on_what_is_made_of_it() -> None:
    for name in ("matrix", "study", "settings"):
        folders = {path.relative_to(source.ROOT).parts[:2] for path in source.closure(f"experiments.spec.{name}")}
        found = {parts[1] for parts in folders if parts[0] == "experiments"} - {"__init__.py"}
        assert found == {"common", "spec"} and not any(parts[0] == "paper_figures" for parts in folders)


def test_a_constant_is_read_without_running_the_file(tmp_path: Path) -> None:
    path = tmp_path / "figure.py"
    path.write_text('TABLES = ("a/table.csv",)\nSUM = 1 + 1\nraise SystemExit\n')
    assert source.constant(path, "TABLES") == ("a/table.csv",)
    assert source.constant(path, "CAPTION") is None
    with pytest.raises(UserError, match=r"SUM is computed \(in .*figure\.py\); write it out"):
        source.constant(path, "SUM")
    other = tmp_path / "broken.py"
    other.write_text("TABLES = (\n")
    with pytest.raises(UserError, match=r"not valid Python at line 1 \(in .*broken\.py\)"):
        source.constant(other, "TABLES")


def test_the_code_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert recorded_code(path) is None
    for text, code in (
        ("provenance: {code: abc}\n", "abc"),
        ("code: abd\n", "abd"),
        ("seed: 1\n", None),
        ("{", None),
    ):
        path.write_text(text)
        assert recorded_code(path) == code
