"""lm-eval's standard tasks: fetched from a stand-in for the hub, then evaluated without any network.

The datasets, the hub's client and lm-eval are the real ones; only the server and the rows are not.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.data.tokenizer import train_bpe
from experiments.evaluation.tasks.text import Row
from experiments.spec import matrix
from experiments.spec.study import STANDARD
from tests.unit.hub_stand_in import COMMIT, REPOSITORIES, serve
from tests.unit.test_evaluate import save_model

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
# Runs calls of programs in one process, since the imports of lm-eval take ten seconds; deletes and cuts files between.
DRIVER = """
import contextlib, importlib, io, json, sys
for module, *arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    if module == "exec":
        exec(arguments[0])
        continue
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(module).app(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    print("RESULT" + json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
OTHER_ROWS = """
import pathlib
path = pathlib.Path({records!r})
tasks = json.loads(path.read_text())["tasks"]
other = dict(tasks, wikitext=dict(tasks["wikitext"], fingerprint="another"))
path.with_name("other.json").write_text(json.dumps(dict(tasks=other)))
"""
CUT = "import os; os.truncate({path!r}, os.path.getsize({path!r}) // 2)"
HOLD = "import filelock; held = filelock.FileLock({path!r}); held.acquire()"
DELETE = "import shutil; shutil.rmtree({path!r})"
PREFETCH = ["experiments.evaluation.standard_tasks", "prefetch", "--scale", "paper"]


def calls(home: Path, environment: dict[str, str], *programs: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of programs that share a process with a cache in ``home``."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(programs)],
        cwd=ROOT,
        env=clean | environment | {"PYTHONPATH": str(ROOT), "HF_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line[6:])) for line in done.stdout.splitlines() if line.startswith("RESULT")]


# Over 20 s: two processes import lm-eval, and twelve tasks are loaded three times.
@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """A folder, and what programs said: prefetch, after faults too; check, evaluation, twice; faults."""
    root = tmp_path_factory.mktemp("place")
    train_bpe(map(json.dumps, REPOSITORIES.values()), 400).save(root / "tokenizer.json")
    save_model(root / "models" / "none-s1", root / "tokenizer.json", 1, n_positions=128, initializer_range=0.3)
    cache, out, records = root / "datasets", root / "zero_shot", root / "standard_tasks.json"
    race = cache / "EleutherAI___race" / "high" / "0.0.0" / COMMIT / "race-test.arrow"
    for killed in (race.parent.with_name(f"{COMMIT}.incomplete"), cache / "someone___else/x/0.0.0/1.incomplete"):
        killed.mkdir(parents=True)
    check = ["experiments.evaluation.standard_tasks", "check", "--study", "zero_shot", "--scale", "paper"]
    check += ["--out", str(records)]
    evaluate = ["experiments.evaluation.evaluate", str(root / "models" / "none-s1"), "--batch-size", "8"]
    first = [*evaluate, "--out", str(out), "--standard", str(records)]
    other = [*evaluate, "--out", str(out), "--standard", str(root / "other.json")]
    steps = [check, first, first, ["exec", OTHER_ROWS.format(records=str(records))], other]
    steps += [["exec", CUT.format(path=str(race))], check, ["exec", DELETE.format(path=str(race.parents[3]))], check]
    cut = ["exec", CUT.format(path=str(race))]
    held, released = ["exec", HOLD.format(path=f"{race.parent}_builder.lock")], ["exec", "held.release()"]
    with serve() as online:
        fetched = calls(root, online, PREFETCH, cut, PREFETCH, cut, held, PREFETCH, released, PREFETCH)
    return root, [*fetched, *calls(root, NOWHERE, *steps)]


def evaluated_rows(entry: Row) -> list[Row]:
    return REPOSITORIES[entry["dataset"]][entry["config"]][entry["split"]]


def test_every_standard_task_is_fetched_once_and_recorded(place: tuple[Path, list[Any]]) -> None:
    """Also after a copy was cut; not while another process holds `datasets`' lock, nor another dataset's leavings."""
    root, (first, second, (code, out, err), last, checked, *_) = place
    assert code == 2 and "race: not fetched: another process is fetching it" in out, out + err
    assert len(out.splitlines()) == len(STANDARD), "it goes on to the others"
    assert err.splitlines()[-1].startswith("error: 1 of 12 tasks were not fetched: race; ")
    assert (root / "datasets/someone___else/x/0.0.0/1.incomplete").is_dir()
    for code, out, err in (first, second, last, checked):
        assert code == 0, out + err
        assert [line.partition(":")[0] for line in out.splitlines()] == matrix.evaluation("zero_shot", "paper").standard
    record = json.loads((root / "standard_tasks.json").read_text())["tasks"]
    assert record.keys() == STANDARD.keys()
    for entry in record.values():
        assert entry["documents"] == len(evaluated_rows(entry)) and entry["revision"] == COMMIT
    assert len({entry["fingerprint"] for entry in record.values()}) == len(STANDARD)
    assert record["race"]["version"] == "3.0" and record["lambada_openai"]["metrics"] == {
        "perplexity": False,
        "acc": True,
    }
    assert record["arc_easy"]["chance"]["acc"] == pytest.approx((1 / 3 + 3 / 4) / 4)
    assert record["mathqa"]["chance"] == {"acc": pytest.approx(0.2), "acc_norm": pytest.approx(0.2)}
    assert record["wikitext"]["chance"] == {}


def test_evaluation_without_network_and_nothing_is_evaluated_twice(place: tuple[Path, list[Any]]) -> None:
    root, results = place
    (code, out, err), (_, again, _) = results[5:7]
    assert code == 0, err
    assert "12 evaluations done, 0 taken" in out and "0 evaluations done, 12 taken" in again
    record = json.loads((root / "standard_tasks.json").read_text())["tasks"]
    with (root / "zero_shot" / "table.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {row["task"] for row in rows} == STANDARD.keys()
    for row in rows:
        folder = root / "zero_shot" / row["run"] / row["task"]
        results = json.loads((folder / "results.json").read_text())
        assert results["versions"] == {row["task"]: float(row["version"])}
        assert float(row["value"]) == results["results"][row["task"]][f"{row['metric']},none"]
        assert int(row["documents"]) == record[row["task"]]["documents"]
        assert float(row["difference"]) == 0.0
    chance = {row["task"]: row["chance"] for row in rows if row["metric"] == "acc"}
    assert float(chance["race"]) == 0.25


def test_other_documents_than_were_checked_and_a_cut_or_missing_copy_are_one_line(
    place: tuple[Path, list[Any]],
) -> None:
    command = "make prefetch SCALE=paper"
    said = (("wikitext have changed", "delete standard_tasks.json"), ("race", command), ("race", command))
    for (code, _, err), words in zip(place[1][7:], said, strict=True):
        line = err.splitlines()[-1]
        assert code == 2 and line.startswith("error: ") and all(word in line for word in words), err
