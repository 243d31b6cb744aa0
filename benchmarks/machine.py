"""On what a benchmark ran: hardware, versions, and what everybody else took of the processors meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "numpy")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_NOISE = re.compile(r"\((r|tm)\)|\b(nvidia|intel|amd|geforce|processor|cpu|with|radeon|graphics|\d+-core)\b|@.*$", re.IGNORECASE)


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, and the GPUs that the driver shows, if any."""
    gpus = _gpus()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        **({"gpu": gpus[0][0], "gpus": len(gpus), "gpu_memory_gib": gpus[0][1], "driver": _driver()} if gpus else {}),
    }


def weights_and_kv_gib() -> tuple[float, float]:
    """What GPU benchmarks of sleep take: 16 and 32 GiB, on a smaller device a fifth and two fifths of its memory."""
    fifth = hardware().get("gpu_memory_gib", 0.0) // 5
    return min(16.0, max(1.0, fifth)), min(32.0, max(2.0, 2 * fifth))


def growth_gib() -> list[float]:
    """Half, twice and four times those weights, as far as device and host hold them."""
    weights, kv = weights_and_kv_gib()
    found = hardware()
    room = min(0.9 * found.get("gpu_memory_gib", 0.0) - kv, 0.6 * found["memory_gib"])
    return [times * weights for times in (0.5, 2.0, 4.0) if times * weights <= room]


def versions() -> dict[str, str]:
    """Of torpor with its commit, Python, the packages that matter, and the CUDA of the driver, if any."""
    cuda = _cuda_version()
    return {
        "torpor": _own_version(),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
        **({"cuda": cuda} if cuda else {}),
    }


def device_name(gpu: bool) -> str:
    """For a file's name: ``h200``, ``rtx-4090``; without a GPU ``host-epyc-9454``."""
    gpus = _gpus() if gpu else []
    name = gpus[0][0] if gpus else _processor()
    short = "-".join(re.findall(r"[a-z0-9]+", _NOISE.sub(" ", name).lower()))
    return short if gpus else f"host-{short}"


@functools.cache
def commit() -> str:
    """The checked-out commit, with ``+`` when files differ from it; in a copy without git what TORPOR_COMMIT says, else a hash
    over ``src`` and ``csrc``."""
    if told := os.environ.get("TORPOR_COMMIT"):
        return told
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        top, head = _git("rev-parse", "--show-toplevel", "--short=12", "HEAD").splitlines()
        if Path(top).resolve() == ROOT:  # not a copy that lies inside another checkout
            return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "src", "csrc") else "")
    return f"source-{source_hash()}"


def source_hash() -> str:
    digest = hashlib.sha256()
    files = [
        p for folder in ("src", "csrc") for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".cpp", ".h", ".cu", ".map"}
    ]
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _own_version() -> str:
    """The tree's, which need not be installed."""
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the GPUs: asked of libcuda, so that no benchmark imports torch for it ---------------------------------------------------


@functools.cache
def _gpus() -> list[tuple[str, float]]:
    """(name, GiB) of each."""
    cuda = _libcuda()
    count = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        name, total = ctypes.create_string_buffer(128), ctypes.c_size_t()
        cuda.cuDeviceGetName(name, 128, ordinal)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), ordinal)
        found.append((name.value.decode(), round(total.value / 2**30, 1)))
    return found


def _cuda_version() -> str | None:
    cuda, version = _libcuda(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def _libcuda() -> ctypes.CDLL | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[0] if found else "unknown"


# ---- the processors ----------------------------------------------------------------------------------------------------------


class Load:
    """What everybody else took of the processors since it was made: of all cores, from 0 to 1."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = _busy_s(), _own_s()

    @property
    def others(self) -> float:
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, (_busy_s() - self._all) - (_own_s() - self._own)) / elapsed if elapsed else 0.0


def _busy_s() -> float:
    """Of all cores since boot: user, nice, system, irq, softirq and what the hypervisor stole."""
    fields = [int(x) for x in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) * TICK_S


def _own_s() -> float:
    """Of this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)
