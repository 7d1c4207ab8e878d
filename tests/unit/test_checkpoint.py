"""EDGC's state in checkpoints: what is read back, what is found damaged, redistributed or refused."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.checkpoints import manifest, rank_files, unpickling
from edgc.checkpoints.manifest import DamagedCheckpoint, Manifest
from edgc.errors import UserError
from edgc.megatron import checkpoint
from edgc.megatron.checkpoint import read, redistributed, state_of

Numbers = dict[str, int]
ALONE: Numbers = dict.fromkeys(
    ("world", "tensor", "pipeline", "virtual_pipeline", "data", "expert", "expert_tensor"), 1
)
FIRST: Numbers = dict.fromkeys(("tensor", "pipeline", "data", "expert", "expert_tensor"), 0)


class Expert:
    allreduce = False


class Attachment:
    """Stand-in that holds a state and has the parameter ``dense`` and the expert ``expert``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.names = state, {object: "dense", Expert: "expert"}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], *, changed_settings: bool = False) -> None:
        self.state = state


attachment: Any = Attachment


def engine_state(seed: int, iteration: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    errors = {name: torch.randn(3, 4, generator=generator) for name in ("dense", "expert")}
    factors = {
        "dense": torch.randn(2, 4, generator=generator).mT,
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    return {
        "iteration": iteration,
        "controller": {"phase": "active", "ranks": [4, None], "previous": 0.1 + 0.2, "first": []},
        "compressor": {"errors": errors, "factors": factors, "draws": {"dense": 3}},
        "means": [[math.nan, 0], [math.inf, 1]],
    }


def same(a: Any, b: Any) -> bool:
    """Equality down to the bit, of tensors with their types and strides."""
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
            return False
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "layout", lambda: ALONE)
    monkeypatch.setattr(checkpoint, "place", lambda: FIRST)


def saved_by(folder: Path, layout: Numbers, states: list[tuple[Numbers, dict[str, Any]]]) -> Path:
    """A checkpoint as ranks at these places would have left it."""
    inner = folder / "edgc"
    inner.mkdir(parents=True)
    experts = ["expert"] if layout["expert"] > 1 else []
    files = {
        name: rank_files.save(inner / name, {"attachment": state, "experts": experts})
        for name, (_, state) in zip(map(rank_files.file_of, range(len(states))), states, strict=False)
    }
    common = {"iteration": 4, "layout": layout, "published": False}
    manifest.write(inner, Manifest({"ranks": [{**common, "place": place} for place, _ in states]}, files))
    return folder


def replicas(count: int, expert: int = 1) -> list[Numbers]:
    """Places of the replicas of one shard; neighbours hold different experts, as Megatron orders them."""
    return [{**FIRST, "data": rank, "expert": rank % expert} for rank in range(count)]


# ------------------------------------------------------------------ reading back


def test_a_state_is_read_back_to_the_bit(tmp_path: Path) -> None:
    """Without what its tensors are views of; numbers of NumPy, as a mean of losses that a user tells, are numbers."""
    state = engine_state(1)
    state["compressor"]["errors"]["view"] = torch.arange(1e6).view(1000, 1000)[2:4]
    checkpoint.save(tmp_path / "iter_0000004", attachment({**state, "loss": [np.float64(0.1)]}), iteration=4)
    loaded = attachment({})
    assert checkpoint.load(tmp_path / "iter_0000004", loaded) == 4
    assert same(loaded.state, {**state, "loss": [0.1]})
    files = {path.name: path.stat().st_size for path in tmp_path.rglob("*")}
    assert sorted(files) == ["edgc", "iter_0000004", "manifest.json", "rank_00000.pt"]
    assert files["rank_00000.pt"] < 20_000


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.nn.Linear(1, 1), Path("/")])
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\.attachment\.deep\[1\] is a "):
        checkpoint.save(tmp_path, attachment({"deep": [0, value]}), iteration=1)
    assert not list(tmp_path.iterdir())


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, attachment(engine_state(1)), iteration=1)
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT - 1)
    with pytest.raises(UserError, match="has format 1, this version of edgc reads 0") as refused:
        checkpoint.load(tmp_path, attachment({}))
    assert not isinstance(refused.value, DamagedCheckpoint)


# ------------------------------------------------------------------ damage


def published(root: Path, iteration: int) -> Path:
    """A checkpoint with files of others beside EDGC's, as an own training loop makes one."""
    with checkpoint.publish(root, iteration, keep=2) as folder:
        (folder / "__0_0.distcp").write_bytes(bytes(range(256)))
        (folder / "deeper").mkdir()
        (folder / "deeper" / "empty.pt").write_bytes(b"")
        checkpoint.save(folder, attachment(engine_state(iteration, iteration)), iteration=iteration)
    return root / f"iter_{iteration:07d}"


def test_every_damage_of_every_file_is_found(tmp_path: Path) -> None:
    folder = published(tmp_path, 4)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == 5

    @settings(max_examples=150, deadline=None)
    @given(path=st.sampled_from(files), data=st.data())
    def damaged(path: Path, data: Any) -> None:
        content = path.read_bytes()
        try:
            damage(path, content, data)
            refused(tmp_path, folder, path.relative_to(folder).as_posix())
        finally:
            path.write_bytes(content)

    damaged()
    checkpoint.check(folder)


def damage(path: Path, content: bytes, data: Any) -> None:
    """Remove the file, or cut, lengthen or alter its ``content``."""
    kind = data.draw(st.sampled_from(["missing", "cut", "flipped", "longer"]))
    if kind == "missing":
        path.unlink()
    elif kind == "longer" or not content:
        path.write_bytes(content + data.draw(st.binary(min_size=1, max_size=3)))
    elif kind == "cut":
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    else:
        place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])


def refused(root: Path, folder: Path, name: str) -> None:
    """The damaged file ``name`` is named by everything that reads the checkpoint."""
    with pytest.raises(DamagedCheckpoint) as found:
        checkpoint.check(folder)
    assert found.value.folder == folder and found.value.file == name
    assert "\n" not in str(found.value)
    if name.startswith("edgc/"):
        with pytest.raises(DamagedCheckpoint) as found:
            checkpoint.load(folder, attachment({}))
        assert found.value.file == name
    lines: list[str] = []
    assert checkpoint.latest(root, report=lines.append) is None
    assert len(lines) == 1 and f"is damaged (file {name} " in lines[0] and "from the beginning" in lines[0]


def test_the_newest_whole_checkpoint_is_used_and_damage_is_reported(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for iteration in (2, 4, 6):
        published(tmp_path, iteration)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000004", "iter_0000006", checkpoint.TRACKER], "the newest two are kept"
    assert (tmp_path / checkpoint.TRACKER).read_text() == "6"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000006"
    (tmp_path / "iter_0000006" / "__0_0.distcp").write_bytes(b"short")
    line = r"iter_0000006 is damaged \(file __0_0.distcp has 5 bytes instead of 256\); going on from iter_0000004"
    with pytest.warns(UserWarning, match=line):
        assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000004"
    published(tmp_path, 6)
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000006", "a damaged one is replaced"


def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path) -> None:
    """The newest are not those of the highest numbers: these are of a run that was given up."""
    for iteration in (100, 200):
        published(tmp_path, iteration)
    for iteration in (110, 120, 130):  # from iteration 100 on; two are kept
        published(tmp_path, iteration)
        assert (tmp_path / f"iter_{iteration:07d}").is_dir()
        assert (tmp_path / checkpoint.TRACKER).read_text() == str(iteration)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["iter_0000120", "iter_0000130", "iter_0000200"]


def test_a_kill_between_two_renames_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is saved again under its name, the first is hidden for a moment."""
    published(tmp_path, 2)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == ".iter_0000002.partial":
            raise RuntimeError("killed")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(RuntimeError, match="killed"):
            published(tmp_path, 2)
    assert not (tmp_path / "iter_0000002").exists()
    published(tmp_path, 1)
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000002"
    checkpoint.check(tmp_path / "iter_0000002")
    own = tmp_path / "iter_0000002" / "edgc"
    own.rename(own.with_name(".edgc.old"))
    assert checkpoint.load(own.parent, attachment({})) == 2


def test_a_full_disk_is_told_on_one_line(tmp_path: Path) -> None:
    """torch's writer hides behind an error of its own what a disk says, but that of /dev/full."""
    program = (
        "import resource, signal, sys, torch; from pathlib import Path; from edgc.checkpoints import rank_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))\n"
        "try: rank_files.dump(Path(sys.argv[1]), {'a': torch.zeros(1 << 16)})\n"
        "except OSError as error: print('OSError', error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x.pt"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("OSError ")


def test_a_half_written_checkpoint_never_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"), checkpoint.publish(tmp_path, 2) as folder:
        checkpoint.save(folder, attachment(engine_state(1)), iteration=2)
        raise RuntimeError("killed")
    assert [path.name for path in tmp_path.iterdir()] == [".iter_0000002.partial"]
    assert checkpoint.latest(tmp_path) is None
    published(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [], "what was left behind is removed"
    # Renamed by hand, without the manifest that comes last.
    with pytest.raises(RuntimeError, match="killed"), checkpoint.publish(tmp_path, 6) as folder:
        checkpoint.save(folder, attachment(engine_state(1)), iteration=6)
        raise RuntimeError("killed")
    folder.rename(tmp_path / "iter_0000006")
    with pytest.warns(UserWarning, match=r"iter_0000006 is damaged \(file manifest.json is missing\)"):
        assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000004"


def test_with_megatrons_own_checkpoints_the_tracker_counts(tmp_path: Path) -> None:
    for iteration in (2, 4, 6):
        folder = tmp_path / f"iter_{iteration:07d}"
        checkpoint.save(folder, attachment(engine_state(iteration)), iteration=iteration)
        (folder / "common.pt").write_bytes(b"Megatron's")
    (tmp_path / checkpoint.TRACKER).write_text("4\n")
    with pytest.warns(UserWarning, match=r"iter_0000006 is damaged .* names iteration 4"):
        assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000004"
    shutil.rmtree(tmp_path / "iter_0000006")
    (tmp_path / "iter_0000004" / "edgc" / "rank_00000.pt").unlink()
    with pytest.warns(UserWarning, match=r"iter_0000004 is damaged \(file edgc/rank_00000.pt is missing\)"):
        assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000002"
    shutil.rmtree(tmp_path / "iter_0000002" / "edgc")
    with pytest.raises(DamagedCheckpoint, match=r"file edgc/manifest.json is missing"):
        checkpoint.load(tmp_path / "iter_0000002", attachment({}))


def test_a_folder_that_cannot_be_written_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file cannot be written or read") as refused:
        checkpoint.save(tmp_path / "file" / "iter_0000001", attachment({}), iteration=1)
    assert str(refused.value).count("\n") == 0


def test_a_manifest_lists_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    manifest.write(tmp_path, Manifest({"x": [1, "ü"]}, {"a": manifest.entry(tmp_path / "a")}))
    content = json.loads((tmp_path / manifest.NAME).read_text())
    assert content["files"]["a"]["bytes"] == 3
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert content["files"]["a"]["sha256"] == known
    assert manifest.read(tmp_path).about == {"x": [1, "ü"]}
    with pytest.raises(DamagedCheckpoint, match="does not list b"):
        manifest.check(tmp_path, manifest.read(tmp_path), ["b"])


# ------------------------------------------------------------------ files of others


class Evil:
    """Makes the folder ``path`` where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def distributed(folder: Path, content: Any) -> None:
    """Tensors and an object, as torch and Megatron leave them, and what Megatron has in common."""
    state = {"weight": torch.arange(6.0).view(2, 3).bfloat16(), "more": {"object": content, "n": 1}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "common.pt").write_bytes(saved({"iteration": 4, "groups": [{"lr": 0.1}]}))


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *((".metadata", how) for how in ("code", "no pickle", "another value")),
        *(("edgc/rank_00000.pt", how) for how in ("code", "another value")),
        ("common.pt", "code"),
        ("__0_0.distcp", "code"),
    ],
)
def test_what_lies_in_a_checkpoint_runs_no_code(tmp_path: Path, file: str, how: str) -> None:
    """Although sizes and checksums say that every file is what was written."""
    made = tmp_path / "made"
    published(tmp_path, 2)
    with checkpoint.publish(tmp_path, 4) as folder:
        distributed(folder, Evil(made) if file == "__0_0.distcp" else [1, "a", torch.ones(2)])
        checkpoint.save(folder, attachment(engine_state(1)), iteration=4)
    folder = tmp_path / "iter_0000004"
    if file != "__0_0.distcp":
        write = pickle.dumps if file == ".metadata" else saved
        content = {"code": write(Evil(made)), "another value": write(3), "no pickle": b"abc"}[how]
        (folder / file).write_bytes(content)
        for inner in (folder / "edgc", folder):
            known = manifest.read(inner)
            files = {name: manifest.entry(inner / name) for name in known.files}
            manifest.write(inner, Manifest(known.about, files))
    if file.startswith("edgc"):
        checkpoint.check(folder)
        with pytest.raises(DamagedCheckpoint) as refused:
            checkpoint.load(folder, attachment({}))
    else:
        with pytest.raises(DamagedCheckpoint) as refused:
            checkpoint.check(folder)
        lines: list[str] = []
        assert checkpoint.latest(tmp_path, report=lines.append) == tmp_path / "iter_0000002"
        assert len(lines) == 1 and f"(file {file} " in lines[0]
    assert refused.value.file == file and "\n" not in str(refused.value)
    assert ("asks for posix.mkdir, which may run code" in str(refused.value)) == (how == "code")
    assert not made.exists()


def test_a_checkpoint_of_torch_holds_data_only(tmp_path: Path) -> None:
    distributed(tmp_path, [1, "a", torch.ones(2)])
    unpickling.check(tmp_path)
    unpickling.check(tmp_path / "none")
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"file __0_0.distcp cannot be read \(FileNotFoundError"):
        unpickling.check(tmp_path)


# ------------------------------------------------------------------ other layouts


def test_experts_are_redistributed_among_their_own_replicas(tmp_path: Path) -> None:
    layout = {**ALONE, "world": 4, "data": 4, "expert": 2}
    engines = [engine_state(rank) for rank in range(4)]
    for rank, engine in enumerate(engines):
        engine["compressor"]["velocities"] = {"dense": torch.full((3,), float(rank)), "expert": -rank * torch.ones(2)}
    states = [{"engine": engine, "more": 1} for engine in engines]
    saved_by(tmp_path, layout, list(zip(replicas(4, expert=2), states, strict=True)))
    for world, place in [(count, place) for count in (2, 8) for place in replicas(count, expert=2)]:
        loaded = state_of(tmp_path, read(tmp_path), {**layout, "world": world, "data": world}, place)
        found = loaded["engine"]
        assert loaded["more"] == 1
        for kind in ("errors", "velocities"):
            saved, got = [engine["compressor"][kind] for engine in engines], found["compressor"][kind]
            torch.testing.assert_close(got["dense"], sum(each["dense"] for each in saved) / 4)
            own = [saved[rank]["expert"] for rank in range(4) if rank % 2 == place["expert"]]
            torch.testing.assert_close(got["expert"], sum(own) / 2)
        for key, value in (("factors", found["compressor"]), ("controller", found)):
            other = engines[place["expert"]]
            assert same(value[key], (other["compressor"] if key == "factors" else other)[key])


def test_methods_without_error_feedback_are_redistributed_too() -> None:
    state = {"engine": {"compressor": {}}}
    states = [(place, {"attachment": state, "experts": ["expert"]}) for place in replicas(4, expert=2)]
    assert redistributed(states, FIRST) == state


def test_a_strategy_goes_on_without_what_was_each_replicas_own() -> None:
    state = {"world": 4, "settings": {}, "place": FIRST, "shared": {"step": 3}}
    states = [
        (place, {"attachment": {**state, "own": {"errors": place["data"]}}, "experts": []}) for place in replicas(4)
    ]
    assert redistributed(states, FIRST) == {**state, "own": None}


@pytest.mark.parametrize("name", ["tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"])
def test_another_model_parallel_layout_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    saved_by(tmp_path, ALONE, [(FIRST, engine_state(1))])
    with pytest.raises(UserError) as refused:
        state_of(tmp_path, read(tmp_path), {**ALONE, name: 2}, FIRST)
    words = f"{name.replace('_', ' ')} parallel size 1"
    message = str(refused.value)
    assert f"saved with {words}, not 2" in message and f"; start with {words}" in message
    assert "\n" not in message and not isinstance(refused.value, DamagedCheckpoint)
