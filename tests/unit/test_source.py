"""experiments.common.source: what a program's fingerprint follows, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.common import source
from experiments.common.source import DATA, REHEARSAL, TRAINING, recorded_code
from experiments.training import provenance

PROGRAM = '"""A program."""\nimport os\n\n\ndef main():\n    """Does it."""\n    return 1  # one\n'


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("# one", "# another", False),
        ("Does it.", "Does that.", False),
        ("\n\n\n", "\n\n\n\n", False),
        ("return 1", "return 2", True),
        ("import os", "import sys", True),
    ],
)
def test_a_digest_follows_what_is_executed(tmp_path: Path, old: str, new: str, seen: bool) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(PROGRAM)
    after.write_text(PROGRAM.replace(old, new))
    assert (source._digest(before) != source._digest(after)) is seen


def test_training_follows_the_library_and_not_figures_evaluation_or_studies() -> None:
    names = source.closure(TRAINING)
    # In functions, and by registration: no import names a method's module.
    assert {"edgc", "edgc.engine", "edgc.entropy.sampler", "experiments.training.train"} < names
    assert {"edgc.compressors.natural", "edgc.control.policies.cqm", "experiments.spec.settings"} < names
    for package in ("paper_figures", "experiments.analyse", "experiments.evaluation", "experiments.verdicts"):
        assert not any(name.startswith(package) for name in names)
    assert "edgc.strategies.diloco" not in names, "no rank has a strategy"
    rehearsal = source.closure(REHEARSAL)
    assert {"edgc.strategies.diloco", "edgc.rehearsal.rehearsal", "experiments.training.loop"} < rehearsal
    assert "experiments.spec.matrix" not in names
    assert "experiments.data.tokenizer" in source.closure(DATA)
    assert all(source.path_of(name).is_file() for name in names)
    with pytest.raises(ValueError, match=r"no module experiments\.absent"):
        source.closure("experiments.absent")


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


def test_a_run_that_goes_on_names_all_code_that_worked_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = ["a"]
    monkeypatch.setattr(provenance, "training_code", lambda driver: today[0])
    assert provenance.code_so_far(tmp_path) == "a"
    today[0] = "b"
    assert provenance.code_so_far(tmp_path) == "b", "nothing of a run without a checkpoint is left"
    (tmp_path / "iter_0000010").mkdir()
    assert provenance.code_so_far(tmp_path) == "b"
    today[0] = "c"
    assert provenance.code_so_far(tmp_path) == "b+c" == provenance.code_so_far(tmp_path)
    (tmp_path / "code").unlink()
    assert provenance.code_so_far(tmp_path) == "unknown+c"
