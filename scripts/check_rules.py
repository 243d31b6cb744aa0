"""The rules of this code base that no public linter knows: sizes, who may touch the environment, what the documents promise.

Prints every violation, then fails.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_LINES = {"README.md": 150, "docs/architecture.md": 80}
CODE = {".py", ".cpp", ".h", ".hpp", ".c", ".cu"}
FOR_THE_CLI = {("os", "environ"), ("os", "getenv"), ("sys", "argv")}
# os.environ outside the CLI needs a reason: these have one, written beside the line.
ENVIRONMENT_ALLOWED = {
    "src/torpor/connectors/nixl_agent.py",
    "src/torpor/connectors/nixl_settings.py",
    "src/torpor/connectors/mooncake_engine.py",
    "src/torpor/connectors/lmcache_engine.py",
}
FORBIDDEN_WORDS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def tracked(pattern: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [p for p in map(Path, out.split()) if p.exists()]


def file_sizes(path: Path, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, the limit is {MAX_FILE_LINES}"


def function_sizes(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"


def environment(path: Path, tree: ast.AST) -> Iterator[str]:
    place = path.as_posix()
    if not place.startswith("src/") or place.startswith("src/torpor/cli/") or place in ENVIRONMENT_ALLOWED:
        return
    for node in ast.walk(tree):
        names: list[tuple[str | None, str]] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, name.name) for name in node.names]
        for module, name in names:
            if (module, name) in FOR_THE_CLI:
                yield f"{path}:{node.lineno}: {module}.{name} is for the CLI only"


def words(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if FORBIDDEN_WORDS.search(line) and path.name != "check_rules.py":
            yield f"{path}:{number}: unfinished work does not belong in the tree"


def documents() -> Iterator[str]:
    for name, limit in MAX_LINES.items():
        lines = Path(name).read_text(encoding="utf-8").count("\n")
        if lines > limit:
            yield f"{name}: {lines} lines, the limit is {limit}"


def violations() -> Iterator[str]:
    for path in tracked("*"):
        if path.suffix not in CODE:
            continue
        text = path.read_text(encoding="utf-8")
        yield from file_sizes(path, text)
        yield from words(path, text)
        if path.suffix == ".py":
            tree = ast.parse(text)
            yield from function_sizes(path, tree)
            yield from environment(path, tree)
    yield from documents()


def main() -> int:
    found = list(violations())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
