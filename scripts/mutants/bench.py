"""A private copy of the tree in which mutations are applied and tests run. The working tree is only read."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.mutant import NATIVE, Mutant

COPIED = ("src", "tests", "csrc", "scripts", "pyproject.toml", "CMakeLists.txt", "README.md")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
}
LIBRARY = "libtorpor_native.so"
TEST_S = 60.0  # a named test takes seconds, also on a busy machine
BASELINE_S = 420.0
BUILD_S = 300.0
# A mutation that the interpreter refuses proves nothing.
SLOPPY = re.compile(r"^E +(NameError|UnboundLocalError|SyntaxError|IndentationError|ImportError)\b", re.MULTILINE)
# An editable install finds torpor in the working tree before PYTHONPATH is looked at. Python runs this before anything else.
SITE_CUSTOMIZE = """\
import importlib.machinery
import sys

for finder in list(sys.meta_path):
    if finder is not importlib.machinery.PathFinder and finder.find_spec("torpor", None) is not None:
        sys.meta_path.remove(finder)
"""


class Verdict(enum.Enum):
    KILLED = "killed"  # the named test failed
    SURVIVED = "SURVIVED"  # the named test passed
    HUNG = "HUNG"  # it did not end, and the mutation does not say that this is how it shows
    CRASHED = "CRASHED"  # its process died, and the mutation does not say so
    BROKEN = "BROKEN"  # the mutated source does not build, import or run at all: a bad mutation


@dataclass(frozen=True)
class Ran:
    """A finished process; ``code`` is None when it had to be ended."""

    code: int | None
    output: str


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    seconds: float
    reason: str  # the last line of what the test said


def judge(mutant: Mutant, ran: Ran) -> Verdict:
    """What a run of the killer on the mutated source means."""
    if ran.code is None:
        return Verdict.KILLED if mutant.hang else Verdict.HUNG
    if ran.code < 0:
        return Verdict.KILLED if mutant.crash else Verdict.CRASHED
    if ran.code == 0:
        return Verdict.SURVIVED
    return Verdict.BROKEN if ran.code != 1 or SLOPPY.search(ran.output) else Verdict.KILLED


class Bench:
    """One copy. Its methods are called by one thread; ``stop`` by any."""

    def __init__(self, origin: Path, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        (folder / "site").mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
        ignore = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        for name in COPIED:
            path = origin / name
            if path.is_dir():
                shutil.copytree(path, folder / name, ignore=ignore)
            else:
                shutil.copy2(path, folder / name)

    def prepare(self, mutants: Sequence[Mutant]) -> str | None:
        """Builds what is needed and proves every killer green; what is wrong, if anything."""
        where = self._run([sys.executable, "-c", "import torpor; print(torpor.__file__)"], TEST_S)
        if str(self.folder) not in where.output:
            return f"the tests would not run the copy: torpor is {where.output.strip()}"
        self._run([sys.executable, "-m", "compileall", "-q", "src"], TEST_S, {"PYTHONDONTWRITEBYTECODE": ""})
        native = [m for m in mutants if m.is_native]
        if native and (problem := self._prepare_native(native)):
            return problem
        return self._prove_green(list(dict.fromkeys(m.killer for m in mutants if not m.killer.startswith(NATIVE))))

    def trial(self, mutant: Mutant) -> Outcome:
        """The killer on the mutated source."""
        started = time.monotonic()
        with self._mutated(mutant):
            ran = self._built_and_run(mutant.killer) if mutant.is_native else self._python_test(mutant.killer)
        return Outcome(judge(mutant, ran), time.monotonic() - started, reason_of(ran))

    def stop(self) -> None:
        """Ends what runs, and refuses to run more."""
        self._stopped = True
        if self._process is not None:
            _end(self._process)

    @contextlib.contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.file
        plain = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(plain), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(plain, encoding="utf-8")

    # ---- pytest ------------------------------------------------------------------------------------------------------

    def _pytest(self, tests: Sequence[str], options: Sequence[str], timeout_s: float) -> Ran:
        # Without pytest-timeout: that a test hangs must not look like that it fails.
        plain = ("-q", "--no-header", "-p", "no:cacheprovider", "-o", "timeout=0", f"--basetemp={self.folder}.tmp")
        return self._run([sys.executable, "-m", "pytest", *plain, *options, *tests], timeout_s)

    def _python_test(self, killer: str) -> Ran:
        return self._pytest([killer], ("-x", "--tb=short"), TEST_S)

    def _prove_green(self, killers: Sequence[str]) -> str | None:
        if not killers:
            return None
        ran = self._pytest(killers, ("-rfEp", "--tb=short"), BASELINE_S)
        passed = {line.removeprefix("PASSED ").strip() for line in ran.output.splitlines() if line.startswith("PASSED ")}
        missing = [k for k in killers if not any(p == k or p.startswith(f"{k}[") for p in passed)]
        if ran.code == 0 and not missing:
            return None
        said = "\n".join(line for line in ran.output.splitlines() if not line.startswith("PASSED "))
        return f"not green without any mutation (exit {ran.code}): {', '.join(missing) or 'see below'}\n{said[-4000:]}"

    # ---- the native core ---------------------------------------------------------------------------------------------

    def _prepare_native(self, mutants: Iterable[Mutant]) -> str | None:
        options = ("-G", "Ninja", "-DTORPOR_TESTS=ON", "-DCMAKE_BUILD_TYPE=Debug")
        for ran in (self._run(["cmake", "-S", ".", "-B", "build", *options], BUILD_S), self._build()):
            if ran.code != 0:
                return f"the native core does not build\n{ran.output[-4000:]}"
        for killer in dict.fromkeys(m.killer for m in mutants if m.killer.startswith(NATIVE)):
            ran = self._native_test(killer)
            if ran.code != 0:
                return f"not green without any mutation: {killer}\n{ran.output[-2000:]}"
        return None

    def _built_and_run(self, killer: str) -> Ran:
        built = self._build()
        if built.code != 0:
            return Ran(2, built.output)
        if killer.startswith(NATIVE):
            return self._native_test(killer)
        library = self.folder / "src" / "torpor" / "_native" / LIBRARY
        plain = library.read_bytes()
        try:
            library.write_bytes((self.folder / "build" / LIBRARY).read_bytes())
            return self._python_test(killer)
        finally:
            library.write_bytes(plain)

    def _build(self) -> Ran:
        return self._run(["cmake", "--build", "build", "--target", "native_tests", "torpor_native"], BUILD_S)

    def _native_test(self, killer: str) -> Ran:
        ran = self._run(["build/tests/native/native_tests", "host", killer.removeprefix(NATIVE)], TEST_S)
        # A test that was skipped has shown nothing.
        return Ran(2, ran.output) if ran.code == 0 and "0 skipped" not in ran.output else ran

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _run(self, command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Ran:
        """In a process group of its own, which is gone when this returns."""
        if self._stopped:
            return Ran(None, "stopped")
        paths = os.pathsep.join(str(self.folder / name) for name in ("site", "src"))
        env = {**os.environ, **ENVIRONMENT, **(environment or {}), "PYTHONPATH": paths}
        self._process = process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return Ran(process.returncode, output)
        except subprocess.TimeoutExpired:
            _end(process)
            output, _ = process.communicate()
            return Ran(None, output)
        finally:
            _end(process)
            self._process = None


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def reason_of(ran: Ran) -> str:
    """One line that says how it ended."""
    if ran.code is None:
        return "it did not end"
    if ran.code < 0:
        return f"it died of {signal.Signals(-ran.code).name}"
    _, _, failures = ran.output.partition("= FAILURES =")  # errors of the clean-up after a failure stand before it
    said = [line for line in (failures or ran.output).splitlines() if line.startswith(("E  ", "FAIL "))]
    return " ".join((said[0] if said else ran.output.strip().rpartition("\n")[2]).split())[:160]
