"""What one mutation is, and whether it still fits the source."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

NATIVE = "native:"  # a killer of the native tests: "native:region_guarded_reads_zeros_while_asleep"
NATIVE_CUDA = NATIVE + "cuda:"  # the same on the cuda driver, over the stand-in for CUDA's own


class Outdated(Exception):
    """The source has moved on: the mutation has to be written anew."""


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs exactly once in ``file`` and is replaced by ``new``; ``also`` are further replacements in the same file."""

    name: str
    file: str
    old: str
    new: str
    why: str  # what goes wrong for a user, or which invariant is gone
    killer: str  # the node id of the test that must fail
    also: tuple[tuple[str, str], ...] = ()
    hang: bool = False  # that the test does not end counts too
    crash: bool = False  # that the test's process dies of a signal counts too
    needs: str = ""  # an optional package without which its test is skipped

    @property
    def can_run(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    @property
    def is_native(self) -> bool:
        """It has to be compiled."""
        return self.file.startswith("csrc/")

    def applied(self, text: str) -> str:
        """The file's text with the mutation in it. Outdated unless every old text occurs exactly once."""
        for old, new in ((self.old, self.new), *self.also):
            count = text.count(old)
            if count != 1 or old == new:
                raise Outdated(f"{self.name}: this occurs {count} times in {self.file}, not once:\n{old}")
            text = text.replace(old, new)
        return text

    def problem(self, repository: Path) -> str | None:
        """What is wrong with it, if anything. Looks at texts only."""
        path = repository / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        try:
            self.applied(path.read_text(encoding="utf-8"))
        except Outdated as outdated:
            return str(outdated)
        if not self._killer_exists(repository):
            return f"{self.name}: there is no test {self.killer}"
        return None

    def _killer_exists(self, repository: Path) -> bool:
        if self.killer.startswith(NATIVE):
            name = self.killer.rpartition(":")[2]
            tests = {f"TEST({name})", f"FAULTS({name.removeprefix('fault_')})"}
            sources = [path.read_text(encoding="utf-8") for path in (repository / "tests" / "native").glob("*_test.cpp")]
            return any(test in source for test in tests for source in sources)
        file, _, name = self.killer.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        path = repository / file
        return path.is_file() and f"def {function}(" in path.read_text(encoding="utf-8")
