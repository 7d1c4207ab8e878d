"""README's lines compress any script, and fit the functions that they call."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example, launched

pytestmark = pytest.mark.slow
FIRST, *OTHERS = block("edgc.ddp.register", ROOT / "README.md").split("\n\n")


def test_the_three_lines_of_the_readme_compress_any_script(tmp_path: Path) -> None:
    assert len(FIRST.splitlines()) == 3
    before, registered, after = block("init_process_group").partition("handle = ")
    rest = after.partition("\n")[2]
    assert registered
    program = tmp_path / "train.py"
    program.write_text(f"{before}total_steps = 200\n{FIRST}\n{rest}", encoding="utf-8")
    check_ddp_example(launched(program), share=0.51)


@pytest.mark.parametrize("lines", OTHERS)
def test_what_the_readme_writes_for_others_can_be_called_so(lines: str) -> None:
    """With that configuration, two lines each."""
    imported, call = ast.parse(lines).body
    names: dict[str, Any] = {}
    exec(compile(ast.Module([imported], []), "README.md", "exec"), names)
    ours = [node for node in ast.walk(call) if isinstance(node, ast.Call) and "trainer." not in ast.unparse(node.func)]
    assert len(ours) == 1
    arguments = {given.arg: given.value for given in ours[0].keywords if given.arg}
    inspect.signature(eval(ast.unparse(ours[0].func), names)).bind(*ours[0].args, **arguments)
