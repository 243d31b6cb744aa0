"""What is run: the GPU tests, a process for each file, both demos, the fault shown, and every ``benchmarks/gpu_*.py``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Use(enum.Enum):
    """What of the machine a part needs."""

    MEASURED = "measured"  # the first GPU to itself, and no other measurement beside it: those share the host's memory
    ALONE = "alone"  # one GPU to itself
    SHARED = "shared"  # a GPU that others of this kind use too
    WHOLE = "whole"  # all GPUs, and nothing beside it


@dataclass(frozen=True)
class Part:
    """One child process. ``arguments`` follow ``python``; ``benchmark``: the name its figures go by, if it has any.

    ``takes_s``: what it was seen to take on an H200 with 32 cores. It is not begun when less is left, and stopped after
    ``limit_s``.
    """

    name: str
    arguments: tuple[str, ...]
    takes_s: float
    use: Use = Use.ALONE
    benchmark: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    cold: bool = False  # begins with compile caches of its own that are empty
    patience: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """What it is chosen by: ``tests``, ``tests:conformance``, ``tests:conformance/1``."""
        return self.name.partition(":")[0], self.name.partition("/")[0], self.name

    @property
    def limit_s(self) -> float:
        return self.patience * (2 * self.takes_s + 15)


BENCHMARKS_S = {"sleep": 130, "peers": 85, "engine": 90, "shared_images": 62, "attention": 19, "transfer": 36, "start": 150}
"""In the order they run: when time is short, what comes first counts most; what is compared is measured side by side."""
QUICK_S = {"sleep": 25, "peers": 50, "engine": 66, "shared_images": 22, "attention": 12, "transfer": 22, "start": 52}
"""With ``--quick``, beside the tests. Of some the start of processes is most, which is not shorter then."""
ON_REQUEST = {"wake_orders", "pair", "tests:lmcache"}  # explain a choice, take long, or need LMCache; run when they are named
ENOUGH_OF_ONE_GPU = {"start"}  # left out of a quick run on one GPU, where nothing runs beside it: "engine" times a start as well
WHOLE_BENCHMARKS = {"transfer"}  # between two GPUs, where there are two
COLD_BENCHMARKS = {"engine"}  # measures a first start
OTHER_S = 60.0  # of a benchmark, or a test file, that is named nowhere here
QUICK_SHARE = 0.5  # of a benchmark that QUICK_S does not name

ALONE = "alone"
"""Marks tests of SHARED_TESTS that need what is free on the GPU to themselves; they are a part of their own."""
SHARED_TESTS_S = {
    "attention": 80,
    "engine": 76,
    "connectors": 74,
    "memory_faults": 66,
    "conformance": 135,
    "shared_images": 58,
    "connectors_sleep": 24,
    "connectors_late": 20,
    "memory": 26,
    "torch_processes": 22,
    "torch_pool": 12,
    "torch_graphs": 10,
}
OTHER_TESTS_S = {
    "lmcache": 120,
    "demo": 60,
    "connectors_bytes": 27,
    "kit": 18,
    "memory_neighbours": 11,
    "imports": 10,
}
ALL_SLOW_TESTS = {"demo"}  # what it tests is a part by itself
SHARDS = {"conformance": 2}
"""Files whose tests are shared among so many processes: one by itself would run when all others have ended."""
ALONE_S, TWO_GPUS_S = 28, 26
PATIENT_MINUTES = 9.0  # with more of them, every part may take longer in proportion
TEST_THREADS = {"OMP_NUM_THREADS": "2"}  # figures are measured beside them


def all_parts(out: Path, model: str, *, quick: bool, slow: bool, gpus: int = 1, minutes: float = PATIENT_MINUTES) -> list[Part]:
    """In the order they are begun. ``slow``: with the slow tests, which have no limit but ``minutes``."""
    flags = ("--out", str(out), *(("--quick",) if quick else ()))
    patience = max(1.0, minutes / PATIENT_MINUTES) * (100.0 if slow else 1.0)
    benchmarks = [part for part in benchmark_parts(flags, quick) if not (quick and gpus == 1 and part.name in ENOUGH_OF_ONE_GPU)]
    measured = [part for part in benchmarks if part.use is Use.MEASURED]
    whole = [part for part in benchmarks if part.use is Use.WHOLE]
    parts = [*whole, *measured, *demo_parts(model, flags), *test_parts(slow, gpus)]
    return [replace(part, patience=patience) for part in parts]


def benchmark_parts(flags: tuple[str, ...], quick: bool) -> list[Part]:
    names = sorted((path.stem.removeprefix("gpu_") for path in (ROOT / "benchmarks").glob("gpu_*.py")), key=_rank)
    return [
        Part(
            name,
            (f"benchmarks/gpu_{name}.py", *flags),
            _benchmark_s(name, quick),
            Use.WHOLE if name in WHOLE_BENCHMARKS else Use.MEASURED,
            f"gpu_{name}",
            cold=name in COLD_BENCHMARKS,
        )
        for name in names
    ]


def demo_parts(model: str, flags: tuple[str, ...]) -> list[Part]:
    on_gpu = ("--memory-driver", "cuda")
    benchmark = ("benchmarks/demo.py", "--connectors", "ipc", *on_gpu, *flags)
    fault = ("-m", "torpor", "demo", "--unfollowed", "--connector", "ipc", "--model", model, *on_gpu)
    return [
        Part("demo", (*benchmark, "--model", model), 55, Use.SHARED, "demo", TEST_THREADS),
        Part("unfollowed", fault, 35, Use.ALONE, environment=TEST_THREADS),
        Part("demo-8b", (*benchmark, "--model", "random:qwen3-8b", "--name", "demo_8b"), 45, Use.WHOLE, "demo_8b"),
    ]


def test_parts(slow: bool, gpus: int) -> list[Part]:
    """A process for each file: one that hangs costs that file, and its log shows where."""
    files = {path.stem.removeprefix("test_gpu_"): path for path in (ROOT / "tests" / "gpu").rglob("test_gpu_*.py")}
    names = sorted(files if slow else files.keys() - ALL_SLOW_TESTS)
    shared = [name for name in SHARED_TESTS_S if name in names]
    others = sorted(set(names) - set(shared), key=lambda name: -OTHER_TESTS_S.get(name, OTHER_S))
    marks = "gpu" + ("" if slow else " and not slow") + (" and not gpu(count=2)" if gpus > 1 else "")
    pairs = "gpu(count=2)" + ("" if slow else " and not slow")

    def tests(name: str, marks: str, of: Sequence[str], takes_s: float, use: Use) -> Part:
        return _tests(name, marks, [files[one].relative_to(ROOT).as_posix() for one in sorted(of)], takes_s, use)

    parts = [
        *(
            shard
            for name in shared
            for shard in shards(tests(name, f"{marks} and not {ALONE}", [name], SHARED_TESTS_S[name], Use.SHARED), name)
        ),
        tests(ALONE, f"{marks} and {ALONE}", shared, ALONE_S, Use.ALONE),
        *(tests(name, marks, [name], OTHER_TESTS_S.get(name, OTHER_S), Use.ALONE) for name in others),
    ]
    return [*parts, *([tests("two-gpus", pairs, names, TWO_GPUS_S, Use.WHOLE)] if gpus > 1 else [])]


def shards(part: Part, name: str) -> list[Part]:
    """``part``, or several for parts of its tests."""
    count = SHARDS.get(name, 1)
    if count == 1:
        return [part]
    return [
        replace(
            part,
            name=f"{part.name}/{number}",
            takes_s=part.takes_s / count,
            environment={**part.environment, "TESTS_SHARD": f"{number}/{count}"},
        )
        for number in range(1, count + 1)
    ]


def _tests(name: str, marks: str, files: Sequence[str], takes_s: float, use: Use) -> Part:
    pytest = ("-m", "pytest", "-c", "tests/gpu/gpu.ini", "--rootdir", ".", "-p", "no:cacheprovider")
    shown = ("-v", "-rfEs", "--tb", "short", "--durations", "5")
    return Part(f"tests:{name}", (*pytest, *shown, "-m", marks, *files), takes_s, use, environment=TEST_THREADS)


def _benchmark_s(name: str, quick: bool) -> float:
    seconds = BENCHMARKS_S.get(name, OTHER_S)
    return QUICK_S.get(name, QUICK_SHARE * seconds) if quick else seconds


def chosen(parts: Sequence[Part], only: str) -> list[Part]:
    """Those named in ``only``, separated by commas; when it is empty, all but those on request. SystemExit for a name of none.

    ``tests`` are all of ``tests:...``.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {name: None for part in parts for name in part.names}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"scripts/gpu: no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in parts if ({*part.names} & {*names} if names else part.name not in ON_REQUEST)]


def _rank(name: str) -> tuple[int, str]:
    order = list(BENCHMARKS_S)
    return (order.index(name) if name in order else len(order), name)
