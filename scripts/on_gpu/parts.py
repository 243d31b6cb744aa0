"""What is run: the GPU tests, the demo, and every ``benchmarks/gpu_*.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS_S = {
    "tests": 420,
    "demo": 110,
    "unfollowed": 60,
    "sleep": 150,
    "peers": 90,
    "engine": 240,
    "transfer": 60,
    "attention": 60,
}
OTHER_LIMIT_S = 90
ORDER = ("sleep", "peers", "engine", "transfer", "attention")  # figures that are compared are measured side by side
ON_REQUEST = {"wake_orders"}  # explains a choice, once; run when it is named
QUICK_SHARE = 0.5


@dataclass(frozen=True)
class Part:
    """One child process. ``arguments`` follow ``python``; ``benchmark``: the name its figures go by, if it has any."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    benchmark: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def all_parts(out: Path, model: str, *, quick: bool, slow: bool) -> list[Part]:
    """In the order they run. ``slow``: with the slow tests, without a limit of their own."""
    marks = "gpu" if slow else "gpu and not slow"
    flags = ("--out", str(out), *(("--quick",) if quick else ()))
    scripts = sorted((ROOT / "benchmarks").glob("gpu_*.py"), key=lambda path: _rank(_short(path)))
    pytest = ("-m", "pytest", "-m", marks, "tests/gpu", "-q", "--durations", "5", "-p", "no:cacheprovider")
    model_on_gpu = ("--model", model, "--memory-driver", "cuda")
    return [
        Part("tests", pytest, float("inf") if slow else _limit("tests", quick)),
        *(Part(_short(p), (f"benchmarks/{p.name}", *flags), _limit(_short(p), quick), p.stem) for p in scripts),
        Part("demo", ("benchmarks/demo.py", *model_on_gpu, *flags), _limit("demo", quick), "demo"),
        Part(
            "unfollowed",
            ("-m", "torpor", "demo", "--unfollowed", "--connector", "ipc", *model_on_gpu),
            _limit("unfollowed", quick),
        ),
    ]


def chosen(parts: Sequence[Part], only: str) -> list[Part]:
    """Those named in ``only``, separated by commas; when it is empty, all but those on request. SystemExit for a name of none."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [part.name for part in parts]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"scripts/gpu: no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in parts if (part.name in names if names else part.name not in ON_REQUEST)]


def _short(path: Path) -> str:
    return path.stem.removeprefix("gpu_")


def _rank(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def _limit(name: str, quick: bool) -> float:
    return LIMITS_S.get(name, OTHER_LIMIT_S) * (QUICK_SHARE if quick else 1)
