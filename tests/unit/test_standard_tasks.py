"""lm-eval's standard tasks: fetched from a stand-in for the hub, then evaluated without any network.

The datasets, the hub's client and lm-eval are the real ones; only the server and the rows are not.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from filelock import FileLock

from edgc.errors import UserError
from experiments.data.tokenizer import train_bpe
from experiments.evaluation import evaluate, standard_tasks
from experiments.spec.task_catalogue import STANDARD, lm_eval_version, standard_task
from tests.unit.hub_stand_in import REPOSITORIES, Hub, serve
from tests.unit.test_evaluate import save_model

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(STANDARD)
MODEL = "none-s1"
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
# Runs calls of programs in one process, since the imports of lm-eval take ten seconds: JSON lines in and out.
DRIVER = """
import contextlib, importlib, io, json, sys
for line in sys.stdin:
    module, arguments = json.loads(line)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program = importlib.import_module(module)
            program.app(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Driver:
    """A process with an environment of its own, and the calls made in it."""

    def __init__(self, **environment: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=ROOT,
            env=clean | {"PYTHONPATH": str(ROOT)} | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, module: str, *arguments: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([module, [str(argument) for argument in arguments]]) + "\n")
        self.process.stdin.flush()

    def call(self, module: str, *arguments: object) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        self.send(module, *arguments)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        code, out, err = json.loads(line)
        return code, out, err

    def prefetch(self, *names: str) -> tuple[int, str, str]:
        return self.call("experiments.evaluation.standard_tasks", "prefetch", "--tasks", ",".join(names))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Place:
    """A cache that was filled from the stand-in, and a model."""

    def __init__(self, root: Path, hub: Hub) -> None:
        self.root, self.hub = root, hub
        self.home, self.out = root / "hf", root / "zero_shot"
        self.online = Driver(HF_HOME=str(self.home), **hub.environment)
        self.offline = Driver(HF_HOME=str(self.home), **NOWHERE)
        self.first = self.online.prefetch(*NAMES)

    def evaluate(self, *names: str) -> tuple[int, str, str]:
        folder, standard = self.root / "models" / MODEL, ",".join(names)
        options = [folder, "--standard", standard, "--out", self.out, "--batch-size", 8]
        return self.offline.call("experiments.evaluation.evaluate", *options)

    def record(self) -> dict[str, Any]:
        path = self.home / "datasets" / standard_tasks.RECORD
        tasks: dict[str, Any] = json.loads(path.read_text())["tasks"]
        return tasks

    def table(self) -> list[dict[str, str]]:
        with (self.out / "table.csv").open(newline="") as handle:
            return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("place")
    train_bpe(map(json.dumps, REPOSITORIES.values()), 400).save(root / "tokenizer.json")
    save_model(root / "models" / MODEL, root / "tokenizer.json", 1, n_positions=128, initializer_range=0.3)
    with serve() as hub:
        found = Place(root, hub)
        yield found
        found.online.close()
        found.offline.close()


def evaluated_rows(name: str) -> list[dict[str, Any]]:
    task = standard_task(name)
    return REPOSITORIES[task.dataset][task.config or "default"][task.split]


def test_every_standard_task_loads_through_lm_eval_and_is_recorded(place: Place) -> None:
    code, out, err = place.first
    assert code == 0, out + err
    assert [line.partition(":")[0] for line in out.splitlines()] == NAMES
    assert all(": fetched: version" in line for line in out.splitlines())
    record = place.record()
    assert list(record) == NAMES
    for name, entry in record.items():
        task = standard_task(name)
        expected = (task.version, task.dataset, lm_eval_version())
        assert (entry["version"], entry["dataset"], entry["lm_eval"]) == expected
        assert entry["documents"] == len(evaluated_rows(name))
        assert entry["revision"] == place.hub.revision(task.dataset)
        assert task.config in (None, entry["config"])
    assert len({entry["fingerprint"] for entry in record.values()}) == len(NAMES)
    assert record["arc_easy"]["chance"]["acc"] == pytest.approx((1 / 3 + 3 / 4) / 4)
    assert record["mathqa"]["chance"] == {"acc": pytest.approx(0.2), "acc_norm": pytest.approx(0.2)}
    assert record["wikitext"]["chance"] == {}


def test_second_prefetch_asks_the_hub_nothing(place: Place) -> None:
    before, asked = place.record(), len(place.hub.requests)
    code, out, err = place.online.prefetch(*NAMES)
    assert code == 0, err
    assert out.count(": already there: version") == len(NAMES)
    assert len(place.hub.requests) == asked
    assert place.record() == before


def test_evaluation_without_network_and_what_is_done_again(place: Place) -> None:
    """One story, since each step starts from what the one before has left. One task of each kind of output."""
    first = ["lambada_openai", "race", "wikitext", "piqa", "hellaswag"]
    cache = {path for path in (place.home / "datasets").rglob("*") if path.is_file()}
    code, out, err = place.evaluate(*first)
    assert code == 0, err
    assert "5 evaluations done, 0 taken" in out
    code, out, err = place.evaluate(*first, "copa")
    assert "1 evaluations done, 5 taken" in out, err
    # Nothing is written into the cache, hellaswag's processed rows neither: it may be read-only.
    assert {path for path in (place.home / "datasets").rglob("*") if path.is_file()} == cache
    rows = place.table()
    for row in rows:
        results = json.loads((place.out / row["run"] / row["task"] / "results.json").read_text())
        assert results["versions"] == {row["task"]: float(row["version"])}
        assert float(row["value"]) == results["results"][row["task"]][f"{row['metric']},none"]
        assert int(row["documents"]) == len(evaluated_rows(row["task"]))
        assert float(row["difference"]) == 0.0
    versions = {row["task"]: row["version"] for row in rows}
    assert versions == {name: standard_task(name).version for name in [*first, "copa"]}
    chance = {row["task"]: row["chance"] for row in rows if row["metric"] == "acc"}
    assert float(chance["race"]) == 0.25
    assert json.loads((place.out / MODEL / "race/inputs.json").read_text())["device"] in ("cpu", "cuda")

    # Other rows of one dataset: that task is evaluated again, and no other.
    copa = REPOSITORIES["aps/super_glue"]["copa"]["validation"]
    place.hub.set_rows("aps/super_glue", "copa", "validation", copa[:3])
    shutil.rmtree(next((place.home / "datasets").glob("aps___super_glue/copa/*/*/")))
    code, _, err = place.evaluate(*first, "copa")
    assert code == 2
    assert "data of 1 standard task cannot be used: copa: not in the cache" in err
    code, out, err = place.online.prefetch("piqa", "copa")
    assert code == 0, err
    assert [line.split(": ")[:2] for line in out.splitlines()] == [["piqa", "already there"], ["copa", "fetched"]]
    code, out, err = place.evaluate(*first, "copa")
    assert "1 evaluations done, 5 taken" in out, err
    assert {row["documents"] for row in place.table() if row["task"] == "copa"} == {"3"}


def only(folder: Path, pattern: str) -> Path:
    (found,) = (folder / "datasets").glob(pattern)
    return found


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path) -> None:
    """Other bytes of the same length, in the middle of the rows."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def recorded_as(home: Path, **values: str) -> None:
    path = home / "datasets" / standard_tasks.RECORD
    content = json.loads(path.read_text())
    content["tasks"]["race"] |= values
    path.write_text(json.dumps(content))


RACE = "EleutherAI___race/high/0.0.0/*"
ROWS, RECORD = f"{RACE}/race-test.arrow", standard_tasks.RECORD
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda home: shutil.rmtree(home / "datasets"), "race: not in the cache"),
    "no record": (lambda home: only(home, RECORD).unlink(), "race: in the cache, but not recorded"),
    "torn record": (lambda home: half(only(home, RECORD)), "the record of fetched tasks is not readable"),
    "version": (lambda home: recorded_as(home, version="2.0"), "race: recorded as version 2.0"),
    "interrupted beside a whole copy": (
        lambda home: Path(f"{only(home, f'{RACE}/')}.incomplete").mkdir(),
        "race: a download was interrupted",
    ),
    "no description": (lambda home: only(home, f"{RACE}/dataset_info.json").unlink(), "a download was interrupted"),
    "file missing": (lambda home: only(home, ROWS).unlink(), "race: its copy lacks a file"),
    "cut off": (lambda home: half(only(home, ROWS)), "race: its data has changed since it was recorded"),
    "changed": (lambda home: edit(only(home, ROWS)), "race: its data has changed since it was recorded"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong_with_the_cache_is_one_line_with_the_command(
    case: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = DAMAGE[case]
    shutil.copytree(place.home / "datasets", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    assert len(standard_tasks.read_standard(["race", "copa"])) == 2
    spoil(tmp_path)
    for name, value in evaluate.OFFLINE.items():  # put back at the end
        monkeypatch.setenv(name, value)
    options = [str(tmp_path / "none"), "--standard", "race", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        evaluate.app(options, standalone_mode=False)
    assert stop.value.code == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error and standard_tasks.PREFETCH in error
    assert not (tmp_path / "out").exists()


def test_killed_download_is_named_and_goes_on(place: Place, tmp_path: Path) -> None:
    """Killed while the second task's rows are on their way: the first stays, the second is fetched again."""
    hub = place.hub
    hub.stalled = "high/test-00000"
    driver = Driver(HF_HOME=str(tmp_path), **hub.environment)
    try:
        asked = len(hub.requests)
        driver.send("experiments.evaluation.standard_tasks", "prefetch", "--tasks", "lambada_openai,race,piqa")
        while not any(line.startswith("GET") and hub.stalled in line for line in hub.requests[asked:]):
            assert driver.process.poll() is None
            time.sleep(0.05)
        driver.process.send_signal(signal.SIGKILL)
        driver.process.wait()
    finally:
        hub.stalled = ""
        hub.go_on.set()
    again = Driver(HF_HOME=str(tmp_path), **hub.environment)
    code, _, err = again.call("experiments.evaluation.standard_tasks", "check", "--tasks", "lambada_openai race piqa")
    assert code == 2
    assert "data of 2 standard tasks" in err
    assert "race: a download was interrupted" in err
    assert "piqa: not in the cache" in err
    code, out, err = again.prefetch("lambada_openai", "race", "piqa")
    assert code == 0, err
    assert [line.split(": ")[1] for line in out.splitlines()] == ["already there", "fetched again", "fetched"]
    edit(only(tmp_path, ROWS))
    code, out, err = again.prefetch("race")
    assert code == 0, err
    assert out.startswith("race: fetched again: ")
    assert json.loads(only(tmp_path, RECORD).read_text())["tasks"]["race"] == place.record()["race"]
    # No rows at all.
    hub.set_rows("allenai/openbookqa", "main", "test", [])
    code, out, err = again.prefetch("openbookqa", "boolq")
    again.close()
    assert code == 2
    assert out.startswith("openbookqa: not fetched: task openbookqa has zero documents")
    assert "boolq: fetched: " in out
    assert err.splitlines()[-1].startswith("error: 1 of 2 tasks were not fetched: openbookqa")
    recorded = json.loads((tmp_path / "datasets" / standard_tasks.RECORD).read_text())["tasks"]
    assert set(recorded) == {"lambada_openai", "race", "piqa", "boolq"}


def test_an_intact_copy_is_recorded_again_without_network_and_a_cut_one_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place.home / "datasets", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    task, before = standard_task("race"), standard_tasks.read_record()
    loaded = SimpleNamespace(
        eval_docs=evaluated_rows("race"),
        dataset={task.split: SimpleNamespace(cache_files=[{"filename": str(only(tmp_path, ROWS))}])},
        OUTPUT_TYPE="multiple_choice",
        doc_to_choice=lambda _: "ABCD",
    )
    monkeypatch.setattr(standard_tasks, "load", lambda _: loaded)
    recorded_as(tmp_path, version="0.0")  # as after an upgrade of lm-eval
    assert standard_tasks.fetch(task).startswith("recorded: version")
    assert standard_tasks.read_record() == before
    only(tmp_path, RECORD).unlink()
    loaded.eval_docs = evaluated_rows("race")[:3]
    with pytest.raises(UserError, match="3 documents are in the cache, 4 were fetched"):
        standard_tasks.fetch(task)
    assert not standard_tasks.read_record()


def test_a_failed_fetch_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def manager(_: object) -> None:
        print("lm-eval says much")
        raise ConnectionError("no route")

    monkeypatch.setattr(evaluate, "task_manager", manager)
    with pytest.raises(UserError, match="ConnectionError: no route; check the network"):
        standard_tasks.load(standard_task("race"))
    assert capsys.readouterr() == ("", "")


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "abc.incomplete"
    folder.mkdir()
    lock = FileLock(tmp_path / "abc_builder.lock")  # as `datasets` does
    with lock, pytest.raises(UserError, match="another process"):
        standard_tasks.remove([folder])
    assert folder.is_dir()
    standard_tasks.remove([folder])
    assert not folder.exists()


def test_wrong_name_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        standard_tasks.check_command(tasks="arc_esy")
    assert capsys.readouterr().err == "error: unknown standard task 'arc_esy'; did you mean arc_easy?\n"
