"""Which folders of this machine the other one sees, each at its own path."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    path: Path
    writable: bool = False


def mounts_for(root: Path, read_only: Sequence[Path], writable: Sequence[Path]) -> list[Mount]:
    """/usr, the project, its virtual environment, the Python that was made from, and what was asked for."""
    folders = [Path("/usr"), root, *python_folders(root / ".venv/bin/python"), *(path.resolve() for path in read_only)]
    mounts: list[Mount] = []
    for folder in sorted(set(folders)):  # a folder sorts before what lies in it
        if folder.is_dir() and not any(folder.is_relative_to(mount.path) for mount in mounts):
            mounts.append(Mount(folder))
    return mounts + [Mount(path.resolve(), writable=True) for path in writable]


def python_folders(python: Path) -> list[Path]:
    """Wherever it looks for modules: a virtual environment may name folders outside itself."""
    if not python.exists():
        return []
    code = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, *sys.path]))"
    told = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    return [Path(name).resolve() for name in json.loads(told) if name]
