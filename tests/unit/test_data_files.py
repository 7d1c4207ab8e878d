"""A folder of prepared data is what its data.yaml says, or is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy
import pytest

from edgc.errors import UserError
from experiments.data.folder import FILES, INDEX_CACHE, check_indices, check_whole, load_info
from experiments.data.prepare import prepare
from tests.unit.test_data import write_corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(write_corpus(folder / "corpus"), folder / "toy", show=False)
    return folder / "toy"


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "toy")
    return tmp_path / "toy"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_short_or_missing_is_named(folder: Path, name: str) -> None:
    info, path = load_info(folder), folder / name
    check_whole(folder, info)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"prepared data is damaged: {name} has ") as caught:
        check_whole(folder, info)
    assert f"(in {path})" in str(caught.value) and f"delete the folder {folder} " in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        check_whole(folder, info)


def test_content_of_the_same_size_is_found_by_its_checksum(folder: Path) -> None:
    info, path = load_info(folder), folder / "train.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    check_whole(folder, info, checksums=False)
    with pytest.raises(UserError, match=r"train\.bin has another content than was written"):
        check_whole(folder, info)


def test_every_cut_of_data_yaml_is_found(folder: Path) -> None:
    path = folder / "data.yaml"
    content = path.read_bytes()
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        with pytest.raises(UserError):
            check_whole(folder, load_info(folder))
    (folder / "data.yaml").write_text("format: 0\n")
    with pytest.raises(UserError, match="format 0, not 1"):
        load_info(folder)
    path.write_bytes(content.partition(b"\n")[2])
    with pytest.raises(UserError, match=r"an earlier version wrote data\.yaml.*experiments\.data prepare"):
        load_info(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"prepared data is missing.*experiments\.data prepare"):
        load_info(folder)


def test_every_flipped_bit_of_data_yaml_is_found(folder: Path) -> None:
    path = folder / "data.yaml"
    content = path.read_bytes()
    for place in range(0, len(content), 17):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"data\.yaml"):
            load_info(folder)


def test_a_sample_order_that_is_cut_short_is_named(folder: Path) -> None:
    index = folder / INDEX_CACHE / "one"
    index.mkdir(parents=True)
    for name, array in {"a": numpy.arange(100), "b": numpy.zeros((50, 2), dtype=numpy.int32)}.items():
        numpy.save(index / f"{name}.npy", array)
    (folder / INDEX_CACHE / ".building-x").mkdir()
    (folder / INDEX_CACHE / ".building-x" / "half.npy").write_bytes(b"")
    check_indices(folder)
    for name in ("a.npy", "b.npy"):
        path = index / name
        content = path.read_bytes()
        for cut in (1, len(content) - 20, len(content)):
            path.write_bytes(content[: len(content) - cut])
            with pytest.raises(UserError, match=f"{name} is cut short") as caught:
                check_indices(folder)
            assert str(caught.value).endswith(f"delete the folder {index}: it is made again")
        path.write_bytes(content)
    check_indices(folder)
