"""The mutants themselves: each still fits the source, and what a run means is judged strictly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def scripts_are_importable() -> Iterator[None]:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    yield
    sys.path.remove(str(REPOSITORY / "scripts"))


def mutant(**fields: Any) -> Any:
    from mutants.mutant import Mutant

    given = {"name": "m", "file": "f", "old": "a == b", "new": "a != b", "why": "", "killer": "tests/test_f.py::test_f"}
    return Mutant(**(given | fields))


def test_every_mutant_fits_the_source_and_names_a_test() -> None:
    from mutants.catalogue import MUTANTS

    names = [m.name for m in MUTANTS]
    assert len(set(names)) == len(names) >= 40
    assert [p for m in MUTANTS if (p := m.problem(REPOSITORY))] == []
    assert sum(m.is_native for m in MUTANTS) >= 4


@pytest.mark.parametrize("text", ["", "a == b or a == b"])
def test_a_source_that_moved_on_is_told(text: str) -> None:
    from mutants.mutant import Outdated

    with pytest.raises(Outdated, match="times in f, not once"):
        mutant().applied(text)


def test_every_replacement_is_made() -> None:
    assert mutant(also=(("c", "d"),)).applied("a == b, c") == "a != b, d"


@pytest.mark.parametrize(
    ("code", "output", "allowed", "verdict"),
    [
        (1, "E   assert 1 == 2", {}, "KILLED"),
        (0, "1 passed", {}, "SURVIVED"),
        (1, "E   NameError: name 'x' is not defined", {}, "BROKEN"),
        (2, "ERROR collecting", {}, "BROKEN"),
        (None, "", {}, "HUNG"),
        (None, "", {"hang": True}, "KILLED"),
        (-11, "", {}, "CRASHED"),
        (-11, "", {"crash": True}, "KILLED"),
    ],
)
def test_only_a_failing_test_kills(code: int | None, output: str, allowed: dict[str, bool], verdict: str) -> None:
    from mutants.bench import Ran, judge

    assert judge(mutant(**allowed), Ran(code, output)).name == verdict


def test_a_bench_works_on_a_copy_and_puts_it_back(tmp_path: Path) -> None:
    from mutants import bench

    origin = tmp_path / "origin"
    for name in bench.COPIED:
        path = origin / name
        if path.suffix:
            path.write_text("")
        else:
            path.mkdir(parents=True)
    (origin / "src" / "f.py").write_text("a == b")
    (origin / "tests" / "test_f.py").write_text("def test_f():\n    assert open('src/f.py').read() == 'a == b'\n")
    copy = bench.Bench(origin, tmp_path / "copy")
    outcome = copy.trial(mutant(file="src/f.py", killer="tests/test_f.py::test_f"))
    assert outcome.verdict is bench.Verdict.KILLED
    assert outcome.reason.startswith("E ")
    assert copy.trial(mutant(file="src/f.py", new="a == b ", killer="tests/test_f.py")).verdict is bench.Verdict.KILLED
    assert {(d / "src" / "f.py").read_text() for d in (origin, copy.folder)} == {"a == b"}
    copy.stop()
    assert copy.trial(mutant(file="src/f.py", killer="tests/test_f.py::test_f")).verdict is bench.Verdict.HUNG


def test_a_hunt_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its copies are the size of the tree, and the test that runs in one may hang."""
    command = [sys.executable, "-m", "mutants", "--only", "padding-has-a-slot", "--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts"), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as hunt:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("mutants-*/0/site")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        hunt.send_signal(signal.SIGTERM)
        assert hunt.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("mutants-*"))
