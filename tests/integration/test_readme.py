"""README's lines compress any script, and fit the functions that they call."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example, launched

pytestmark = pytest.mark.slow
IMPORT, CONFIG, DDP, *OTHERS = map(ast.unparse, ast.parse(block("edgc.ddp.register", ROOT / "README.md")).body)


def test_the_three_lines_of_the_readme_compress_any_script(tmp_path: Path) -> None:
    before, registered, after = block("init_process_group").partition("handle = ")
    rest = after.partition("\n")[2]
    assert registered
    program = tmp_path / "train.py"
    lines = f"{IMPORT}\n{CONFIG}\n{DDP}\n"
    program.write_text(f"{before}total_steps = 200\n{lines}{rest}", encoding="utf-8")
    check_ddp_example(launched(program), share=0.51)


@pytest.mark.parametrize("line", OTHERS)
def test_what_the_readme_writes_for_others_can_be_called_so(line: str) -> None:
    (call,) = (
        node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call) and "edgc." in ast.unparse(node.func)
    )
    module, _, name = ast.unparse(call.func).rpartition(".")
    arguments = {given.arg: given.value for given in call.keywords if given.arg}
    inspect.signature(getattr(importlib.import_module(module), name)).bind(*call.args, **arguments)
