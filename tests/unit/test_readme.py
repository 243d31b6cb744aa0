"""The README keeps its promises: its Python runs, its commands parse, its files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(kind: str) -> list[str]:
    return re.findall(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", snippets("python"))
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_folders_it_names_exist() -> None:
    for name in re.findall(r"`((?:csrc|src|tests|scripts|docs|examples|benchmarks)/[\w/.*-]*)`", README):
        assert (ROOT / name).exists(), name


def test_the_folders_and_files_that_the_architecture_page_names_are_there() -> None:
    rows = re.findall(r"^\| (`.*/`[^|]*)\|[^|]*\|([^|]*)\|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    for folders, files in rows:
        here = [folder for name in re.findall(r"`(\w+/)`", folders) for folder in (ROOT / name, ROOT / "src/torpor" / name)]
        assert any(folder.is_dir() for folder in here), folders
        for file in re.findall(r"`([\w./-]+)`", files):
            assert any((folder / file).exists() for folder in (*here, ROOT, ROOT / "src/torpor")), file


def test_the_commands_it_names_parse() -> None:
    from typer.main import get_command

    from torpor.cli.app import build_app

    tree = get_command(build_app())
    context = tree.make_context("torpor", ["version"], resilient_parsing=True)
    lines = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("torpor ")]
    assert lines
    for line in lines:
        _, name, *arguments = shlex.split(line)
        command = tree.get_command(context, name)  # type: ignore[attr-defined]
        assert command is not None, line
        command.make_context(name, arguments)


def test_the_page_for_connectors_of_your_own_keeps_its_promises() -> None:
    from torpor.testing.connectors import ITEMS

    page = (ROOT / "docs" / "connectors.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(code, "docs/connectors.md", "exec"), {})
    rows = re.findall(r"^\| ([\w ,-]+) \| [EPM]\d", page, flags=re.MULTILINE)
    assert [name for row in rows for name in row.split(", ")] == [item.name for item in ITEMS]


def test_its_size() -> None:
    assert README.count("\n") < 150
