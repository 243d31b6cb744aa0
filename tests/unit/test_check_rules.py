"""scripts/check_rules.py notices what it is there for."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

RULES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_rules.py"))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nos.environ['A']", 1),
        ("import os\nos.getenv('A')", 1),
        ("from os import environ, getenv", 2),
        ("from sys import argv as words", 1),
        ("import os\nos.getpid()", 0),
    ],
)
def test_the_environment_is_for_the_cli(code: str, found: int) -> None:
    environment = RULES["environment"]
    assert len(list(environment(Path("src/torpor/engine/core.py"), ast.parse(code)))) == found
    assert not list(environment(Path("src/torpor/cli/app.py"), ast.parse(code)))


def test_long_functions_and_files_are_told() -> None:
    function = "def f():\n" + "    pass\n" * 60
    assert [line.split(": ")[1] for line in RULES["function_sizes"](Path("f.py"), ast.parse(function))] == [
        "f has 61 lines, the limit is 60"
    ]
    assert not list(RULES["function_sizes"](Path("f.py"), ast.parse(function.replace("    pass\n", "", 1))))
    assert list(RULES["file_sizes"](Path("f.cu"), "\n" * 501))
    assert not list(RULES["file_sizes"](Path("f.cu"), "\n" * 500))
    assert {".cu", ".c"} < RULES["CODE"]
