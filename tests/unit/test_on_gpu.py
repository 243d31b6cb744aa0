"""scripts/gpu without a GPU: a part that fails or hangs is a line of its own, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "on_gpu"
MODULES = ("parts", "board", "place", "report", "watch")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of its main module, and the modules beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    main = runpy.run_path(str(SCRIPTS / "__main__.py"), run_name="on_gpu")
    return {**main, **{name: sys.modules.pop(name) for name in MODULES}}


def part(on_gpu: dict[str, Any], name: str, code: str = "", takes_s: float = 0.0, use: str = "ALONE", benchmark: str = "") -> Any:
    return on_gpu["parts"].Part(name, ("-c", code), takes_s, on_gpu["parts"].Use[use], benchmark)


def run_all(on_gpu: dict[str, Any], folder: Path, *parts: Any, seconds: float = 60.0, gpus: int = 1) -> list[Any]:
    place = on_gpu["place"].Place(sys.executable, {"PATH": "/usr/bin"}, gpus=tuple("01"[:gpus]), share=2)
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: handler)
        return list(on_gpu["Run"](place, folder, folder, now, now + seconds).all(parts))


def run(on_gpu: dict[str, Any], folder: Path, code: str, limit_s: float = 20.0, benchmark: str = "", name: str = "tried") -> Any:
    tried = part(on_gpu, name, code, 0.0, benchmark=benchmark)
    place = on_gpu["place"].Place(sys.executable, {"PATH": "/usr/bin"})
    start = on_gpu["board"].Start(tried, (0,), limit_s)
    return on_gpu["Run"](place, folder, folder, 0.0, 0.0).one(start)


# ---- one part ---------------------------------------------------------------------------------------------------------------


def test_what_a_part_says_last_is_what_it_says(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    result = run(on_gpu, tmp_path, "print('=== 3 passed ===')")
    assert (result.failure, result.says) == ("", "3 passed")
    assert (tmp_path / "tried.log").read_text() == "=== 3 passed ===\n"


def test_a_part_that_fails_has_its_status_in_its_line(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    assert run(on_gpu, tmp_path, "raise SystemExit(3)").failure == "exit status 3"
    assert run(on_gpu, tmp_path, "import os; os.kill(os.getpid(), 9)").failure == "killed by signal 9"
    assert run(on_gpu, tmp_path, "", benchmark="gpu_nothing").failure == "wrote no figures"


def is_gone(pid: int) -> bool:
    stat = Path("/proc", str(pid), "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


CHILD_THAT_HANGS = """
import subprocess, sys, time
def waits_in_the_child(): time.sleep(600)
if len(sys.argv) > 1: waits_in_the_child()
child = subprocess.Popen([sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], "child"])
print(child.pid, flush=True)
def waits_in_the_parent(): time.sleep(600)
try:
    waits_in_the_parent()
finally:
    child.kill()
"""


@pytest.mark.usefixtures("interruptible")
def test_a_part_that_hangs_is_stopped_with_what_it_started_and_says_where_it_was(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    began = time.monotonic()
    assert run(on_gpu, tmp_path, CHILD_THAT_HANGS, limit_s=2.0).failure == "stopped after 2 s"
    assert time.monotonic() - began < 15
    log = (tmp_path / "tried.log").read_text()
    assert is_gone(int(log.split()[0]))
    assert "in waits_in_the_child" in log
    assert "KeyboardInterrupt" in log
    assert "in waits_in_the_parent" in log


NATIVE_HANG = """
import ctypes, signal
def native(): ctypes.PyDLL(None).pause()  # with the interpreter's lock, as a library that was called wrong
signal.signal(signal.SIGINT, signal.SIG_IGN)
native()
"""


def test_native_code_that_hears_no_interrupt_leaves_its_stacks(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    assert run(on_gpu, tmp_path, NATIVE_HANG, limit_s=1.0).failure == "stopped after 1 s"
    log = (tmp_path / "tried.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "in native" in log


def test_what_a_part_leaves_behind_ends_with_it(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    result = run(on_gpu, tmp_path, code)
    assert (result.failure, is_gone(int(result.says))) == ("", True)


def test_goals_come_from_the_figures_of_this_run(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    goals = [{"what": "wake", "measured": "0.5 s", "needed": "0.4 s", "reached": False}]
    figures = {
        "gpu_sleep": {"when": "2999-01-01T00:00:00+00:00", "goals": goals},
        "gpu_old": {"when": "2020-01-01T00:00:00+00:00"},
    }
    (tmp_path / "h200.json").write_text(json.dumps(figures))
    result = run(on_gpu, tmp_path, "", benchmark="gpu_sleep")
    assert (result.failure, result.missed, result.says) == ("", 1, "0 of 1 goals reached")
    assert run(on_gpu, tmp_path, "", benchmark="gpu_old").failure == "wrote no figures"


PYTEST = """
print("tests/gpu/test_gpu_x.py::test_a[1-2 3] PASSED      [ 25%]")
print("tests/gpu/test_gpu_x.py::test_b FAILED             [ 50%]")
print("tests/gpu/test_gpu_x.py::test_b ERROR              [ 50%]")
print("tests/gpu/test_gpu_x.py::test_c SKIPPED (no nixl)  [ 75%]")
print("FAILED tests/gpu/test_gpu_x.py::test_b - assert 1 == 2")
"""


def test_tests_are_counted_also_of_a_run_without_a_summary(
    on_gpu: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(on_gpu, tmp_path, PYTEST + "raise SystemExit(1)", name="tests:x")
    assert (result.failure, result.says) == ("exit status 1", "1 failed, 1 passed, 1 skipped")
    on_gpu["report"].print_table([result], tmp_path)
    assert "assert 1 == 2" in capsys.readouterr().out
    hangs = "print('tests/gpu/test_gpu_x.py::test_d ', end='', flush=True); import os; os._exit(1)"
    assert run(on_gpu, tmp_path, PYTEST + hangs, name="tests:x").says.endswith("; in test_gpu_x.py::test_d when it ended")


def test_a_file_of_which_no_test_ran_is_no_success(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    line = "print('tests/gpu/test_gpu_x.py::test_c SKIPPED (no GPU)  [ 75%]')"
    assert run(on_gpu, tmp_path, line, name="tests:x").failure == "no test passed"


# ---- all of them ------------------------------------------------------------------------------------------------------------

STAMPED = "import time; print(time.monotonic()); time.sleep(0.7); print(time.monotonic())"


def test_parts_run_side_by_side_on_two_gpus_and_what_needs_both_comes_last(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    shows = "import os; print(os.environ['CUDA_VISIBLE_DEVICES']);" + STAMPED
    parts = [part(on_gpu, name, shows, use=use) for name, use in (("w", "WHOLE"), ("m", "MEASURED"), ("a", "ALONE"))]
    results = run_all(on_gpu, tmp_path, *parts, gpus=2)
    assert [(r.part.name, r.failure, r.gpus) for r in results] == [("w", "", ("0", "1")), ("m", "", ("0",)), ("a", "", ("1",))]
    said = {name: (tmp_path / f"{name}.log").read_text().split() for name in "wma"}
    assert {name: words[0] for name, words in said.items()} == {"w": "0,1", "m": "0", "a": "1"}
    (m_from, m_to), (a_from, a_to) = ([float(word) for word in said[name][1:]] for name in "ma")
    assert max(m_from, a_from) < min(m_to, a_to)
    assert float(said["w"][1]) >= max(m_to, a_to)


def test_what_no_time_is_left_for_is_not_begun_and_says_how_much_it_takes(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    long, short = part(on_gpu, "long", "print('ran')", 100.0), part(on_gpu, "short", "print('ran')", 1.0)
    first, second = run_all(on_gpu, tmp_path, long, short, seconds=30.0)
    assert first.failure.startswith("not begun: it takes about 100 s")
    assert (second.failure, second.says) == ("", "ran")
    assert not (tmp_path / "long.log").exists()


def test_a_signal_ends_all_parts_and_what_is_known_is_told(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
import runpy
from pathlib import Path
names = runpy.run_path({str(SCRIPTS / "__main__.py")!r}, run_name="on_gpu")
import parts, place
here, now = Path({str(tmp_path)!r}), time.monotonic()
codes = {{"one": "print(1)", "two": "import time; time.sleep(600)", "three": ""}}
tried = [parts.Part(name, ("-c", code), 1.0) for name, code in codes.items()]
run = names["Run"](place.Place(sys.executable, {{"PATH": "/usr/bin"}}), here, here, now, now + 100)
for result in run.all(tried):
    print(result.part.name, result.failure or "fine")
""")
    with subprocess.Popen([sys.executable, str(main)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "two begins" in line:
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=30)
    assert rest.splitlines()[-3:] == ["one fine", "two ended by SIGTERM", "three not begun: ended by SIGTERM"]


def test_a_first_start_finds_no_compiled_kernels(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    code = "import os; print(os.environ.get('TRITON_CACHE_DIR', 'shared'))"
    warm = part(on_gpu, "warm", code)
    cold = dataclasses.replace(warm, name="cold", cold=True)
    said = [result.says for result in run_all(on_gpu, tmp_path, warm, cold)]
    assert said[0] == "shared"
    assert not Path(said[1]).parent.exists()


# ---- the plan ---------------------------------------------------------------------------------------------------------------


def played(
    on_gpu: dict[str, Any], parts: list[Any], gpus: int, left_s: float, **more: Any
) -> dict[str, tuple[float, float, Any]]:
    found = on_gpu["board"].played(parts, gpus, on_gpu["board"].SHARE, left_s, **more)
    return {start.part.name: (begun, ended, start) for begun, start, ended in found}


def all_parts(on_gpu: dict[str, Any], gpus: int, **more: Any) -> list[Any]:
    given = {"quick": False, "slow": False} | more
    parts = on_gpu["parts"]
    return list(parts.chosen(parts.all_parts(Path("out"), "random", gpus=gpus, **given), ""))


@pytest.mark.parametrize(("gpus", "quick", "minutes"), [(2, True, 9), (2, False, 11.5), (1, True, 11)])
def test_everything_is_done_in_time(on_gpu: dict[str, Any], gpus: int, quick: bool, minutes: float) -> None:
    """Set-up and the last stop taken off. Nine minutes are for two GPUs and short benchmarks."""
    parts = all_parts(on_gpu, gpus, quick=quick)
    done = played(on_gpu, parts, gpus, 60 * minutes - 25 - on_gpu["STOP_S"])
    assert set(done) == {part.name for part in parts}


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_parts_take_nobody_is_disturbed_and_the_deadline_holds(on_gpu: dict[str, Any], gpus: int, seed: int) -> None:
    rng = random.Random(seed)
    takes = {part.name: part.takes_s * rng.choice((0.2, 0.8, 1.0, 1.3, 5.0)) for part in all_parts(on_gpu, gpus)}
    left_s = rng.uniform(100, 900)
    done = played(on_gpu, all_parts(on_gpu, gpus), gpus, left_s, takes=lambda part: takes[part.name])
    assert all(ended <= left_s + 1e-6 for _, ended, _ in done.values())
    use = on_gpu["parts"].Use
    for a, (begun, ended, start) in done.items():
        beside = [other for b, (from_, to, other) in done.items() if b != a and from_ < ended and begun < to]
        same_gpu = [other for other in beside if set(other.gpus) & set(start.gpus)]
        if start.part.use is use.WHOLE:
            assert not beside
        elif start.part.use is use.MEASURED:
            assert start.gpus == (0,)
            assert not same_gpu
            assert all(other.part.use is not use.MEASURED for other in beside)
        elif start.part.use is use.ALONE:
            assert not same_gpu
        else:
            assert all(other.part.use is use.SHARED for other in same_gpu)
    for at in sorted({begun for begun, _, _ in done.values()}):
        now = [start for begun, ended, start in done.values() if begun <= at < ended]
        measuring = any(start.part.use is use.MEASURED and done[start.part.name][0] < at for start in now)
        begins = [start for start in now if start.part.use is use.SHARED and done[start.part.name][0] == at]
        if measuring and begins:
            assert sum(start.part.use is use.SHARED for start in now) <= on_gpu["board"].QUIET_SHARE


def test_when_time_is_short_the_goals_come_first(on_gpu: dict[str, Any]) -> None:
    done = played(on_gpu, all_parts(on_gpu, 1), 1, 400)
    assert list(done)[:2] == ["sleep", "peers"]
    assert "transfer" in done


def test_the_time_of_what_comes_last_is_kept_for_it(on_gpu: dict[str, Any]) -> None:
    first, last = part(on_gpu, "first", takes_s=50), part(on_gpu, "last", takes_s=40, use="WHOLE")
    done = played(on_gpu, [last, first], 1, 100, takes=lambda part: 1000.0)
    assert [(begun, ended) for begun, ended, _ in done.values()] == [(0, 60), (60, 100)]


def test_every_benchmark_and_test_file_is_a_part(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    root, parts = SCRIPTS.parents[1], on_gpu["parts"]
    found = parts.all_parts(tmp_path, "random", quick=True, slow=True, gpus=2)
    names = {part.name for part in found}
    assert {path.stem.removeprefix("gpu_") for path in (root / "benchmarks").glob("gpu_*.py")} <= names
    files = {path.relative_to(root).as_posix() for path in (root / "tests" / "gpu").rglob("test_*.py")}
    assert files == {word for part in found for word in part.arguments if word.startswith("tests/gpu/") and word.endswith(".py")}
    assert {"demo", "demo-8b", "unfollowed", "tests:alone", "tests:two-gpus"} <= names
    assert names - {part.name for part in parts.chosen(found, "")} == parts.ON_REQUEST & names


def test_every_test_of_a_gpu_is_in_one_part(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    """By its marks: each part's expression chooses some, none is chosen twice, none is left out."""
    parts = on_gpu["parts"]
    for gpus in (1, 2):
        found = [
            part for part in parts.all_parts(tmp_path, "random", quick=False, slow=True, gpus=gpus) if "-m" in part.arguments
        ]
        tests = [part for part in found if part.name.startswith("tests:")]
        for marks in ((), ("alone",), ("two",), ("alone", "two")):
            chosen = [part for part in tests if _chooses(part, "memory", marks)]
            assert len(chosen) == 1, (gpus, marks)


def _chooses(part: Any, file: str, marks: tuple[str, ...]) -> bool:
    expression = part.arguments[part.arguments.index("-m", 2) + 1]
    facts = {"gpu(count=2)": "two" in marks, "alone": "alone" in marks, "slow": False, "gpu": True}
    for name, value in facts.items():
        expression = expression.replace(name, str(value))
    return f"tests/gpu/test_gpu_{file}.py" in part.arguments and bool(eval(expression))


def test_only_chooses_by_name(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    parts = on_gpu["parts"].all_parts(tmp_path, "random", quick=True, slow=False)
    assert [part.name for part in on_gpu["parts"].chosen(parts, "demo, tests:kit")] == ["demo", "tests:kit"]
    assert all(part.name.startswith("tests:") for part in on_gpu["parts"].chosen(parts, "tests"))
    with pytest.raises(SystemExit, match="sleeep"):
        on_gpu["parts"].chosen(parts, "sleeep")


def test_benchmarks_are_short_where_they_do_not_fit(on_gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked = on_gpu["options"](["--minutes", "9"])
    assert not any("--quick" in part.arguments for part in on_gpu["parts_for"](asked, Path("out"), "random", 2, 650.0))
    assert any("--quick" in part.arguments for part in on_gpu["parts_for"](asked, Path("out"), "random", 1, 515.0))
    assert "--minutes" in capsys.readouterr().out


# ---- the place --------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_there_is(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS), "--logs", str(tmp_path), "--only", "tests"]
    done = subprocess.run(command, env={"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/test" in done.stderr or "nvidia-smi" in done.stderr


def test_parts_see_their_gpus_by_the_names_that_were_given(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    place = on_gpu["place"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 5")
    assert place.visible_gpus(2) == ("GPU-a", "5")
    assert place.Place("python", {}, gpus=("GPU-a", "5")).shows((1,)) == {"CUDA_VISIBLE_DEVICES": "5"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert place.visible_gpus(2) == ("0", "1")


def test_without_a_model_the_demo_takes_a_random_one(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_gpu["options"]([])
    assert on_gpu["place"].model_for_demo(asked.model, system_python=False) == "builtin:smollm2-135m"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert on_gpu["place"].model_for_demo(asked.model, system_python=True) == "random"


def test_a_model_in_pieces_is_joined(on_gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu["place"], "ROOT", tmp_path)
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for number, text in enumerate(("one ", "two")):
        (pieces / f"small.gguf.part{number}").write_text(text)
    joined = Path(on_gpu["place"].whole_model(str(pieces)))
    assert (joined.name, joined.read_text()) == ("small.gguf", "one two")
    assert on_gpu["place"].whole_model("random") == "random"


def test_the_run_is_among_the_figures(on_gpu: dict[str, Any], tmp_path: Path) -> None:
    result = on_gpu["report"].Result(part(on_gpu, "tests:x"), 1.0, "", "2 passed", tests={"passed": 2}, gpus=("0",))
    place = on_gpu["place"].Place(sys.executable, {}, gpus=("0",))
    path = on_gpu["report"].write_run(
        [result, result], tmp_path, place, ["--out", "/x", "--logs=/z", "--model=/y/small"], time.monotonic()
    )
    entry = json.loads(path.read_text())["gpu_run"]
    assert entry["command"] == "scripts/gpu --model=small"
    assert entry["tests"] == {"passed": 4}
    assert entry["parts"]["tests:x"] == {
        "seconds": 1.0,
        "ended_well": True,
        "says": "2 passed",
        "gpus": 1,
        "tests": {"passed": 2},
    }
