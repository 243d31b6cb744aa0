"""Prints what pyproject.toml asks for, one requirement a line, torch left out: scripts/setup installs that first.

usage: requirements.py EXTRA... [--only-extras]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip carries one
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

INSTALLED_FIRST = {"torch", "accelerate"}  # accelerate without its dependencies, see main


def main(argv: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [a for a in argv if not a.startswith("--")]
    wanted = [] if "--only-extras" in argv else list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    if "--only-extras" in argv:
        wanted.append("accelerate")  # it would ask for psutil, hub and torch again
    for requirement in wanted:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        if name not in INSTALLED_FIRST or "--only-extras" in argv:
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
