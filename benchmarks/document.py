"""A file of measurements, one entry a benchmark: ``docs/measurements/<device>.json``."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"--out", "--logs"}


def put(path: Path, name: str, document: Mapping[str, Any]) -> None:
    """Under ``name``; the file is made where it is missing, other entries stay. Two processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        benchmarks = json.loads(file.read() or "{}")
        benchmarks[name] = document
        file.seek(0)
        file.truncate()
        file.write(json.dumps(dict(sorted(benchmarks.items())), indent=2) + "\n")


def without_places(words: Sequence[str]) -> list[str]:
    """A command as somebody else would type it in the repository's root: files of the tree by their names there, others by their
    last; without where results go."""
    kept = [
        word for at, word in enumerate(words) if word.partition("=")[0] not in PLACES and (at == 0 or words[at - 1] not in PLACES)
    ]
    return [_without_folders(word) for word in kept]


def _without_folders(word: str) -> str:
    option, equals, value = word.partition("=")
    return option + equals + _known_name(value) if value and option.startswith("--") else _known_name(word)


def _known_name(word: str) -> str:
    path = Path(os.path.abspath(word))
    if path.is_relative_to(ROOT) and path.exists():
        return path.relative_to(ROOT).as_posix()
    return path.name if word.startswith("/") else word
