"""scripts/gpu: who runs beside whom, and what is left of a part that hangs."""

from __future__ import annotations

from mutants.mutant import Mutant

BOARD = "scripts/on_gpu/board.py"
WATCH = "scripts/on_gpu/watch.py"
REPORT = "scripts/on_gpu/report.py"
CONFTEST = "tests/gpu/conftest.py"
TESTS = "tests/unit/test_on_gpu.py::"
NOBODY_DISTURBED = TESTS + "test_whatever_parts_take_nobody_is_disturbed_and_the_deadline_holds"
HANGS = "tests/unit/test_gpu_watch.py::test_native_code_that_hangs_ends_the_process_with_its_stacks"

MUTANTS = (
    Mutant(
        "gpu-two-measurements-at-once",
        BOARD,
        "gpus = [0] if part.use is Use.MEASURED else",
        "gpus = list(range(self._gpus)) if part.use is Use.MEASURED else",
        "two benchmarks share the host's memory: figures that nobody sees again",
        NOBODY_DISTURBED,
    ),
    Mutant(
        "gpu-tests-beside-a-measurement",
        BOARD,
        "return len(here) < self._most() if shared else not here",
        "return len(here) < self._most()",
        "tests run on the GPU that is measured",
        NOBODY_DISTURBED,
    ),
    Mutant(
        "gpu-beside-what-needs-the-whole-machine",
        BOARD,
        "return () if self.running else tuple(range(self._gpus))",
        "return tuple(range(self._gpus))",
        "a transfer between two GPUs is measured while tests use them",
        NOBODY_DISTURBED,
    ),
    Mutant(
        "gpu-limits-pass-the-deadline",
        BOARD,
        "return Start(part, gpus, min(part.limit_s, left))",
        "return Start(part, gpus, part.limit_s)",
        "the run ends when a scheduler kills it, without its table",
        NOBODY_DISTURBED,
    ),
    Mutant(
        "gpu-no-time-is-kept",
        BOARD,
        "return left_s if part.use is Use.WHOLE else left_s - kept_s",
        "return left_s",
        "what needs two GPUs is never measured when a test is slow",
        TESTS + "test_the_time_of_what_comes_last_is_kept_for_it",
    ),
    Mutant(
        "gpu-a-hang-leaves-nothing",
        WATCH,
        '"PYTHONFAULTHANDLER": "1"',
        '"PYTHONFAULTHANDLER": ""',
        "native code hangs on a machine that is gone, and nobody knows where",
        TESTS + "test_native_code_that_hears_no_interrupt_leaves_its_stacks",
    ),
    Mutant(
        "gpu-the-child-s-stacks-are-lost",
        WATCH,
        "        for pid in set(members(leader)) - {leader}:\n            _send(pid, signal.SIGABRT)\n",
        "",
        "the engine's core hung, and the log shows who waited for it",
        TESTS + "test_a_part_that_hangs_is_stopped_with_what_it_started_and_says_where_it_was",
    ),
    Mutant(
        "gpu-skipped-counts-as-tested",
        REPORT,
        'if result.tests and not result.tests.get("passed"):',
        "if not result.tests:",
        "a table in green of tests that all were skipped",
        TESTS + "test_a_file_of_which_no_test_ran_is_no_success",
    ),
    Mutant(
        "gpu-closing-is-not-watched",
        CONFTEST,
        "    with _watched(item):  # pytest ends any such watch when a test fails\n        return (yield)\n",
        "    return (yield)\n",
        "a failed test whose memory cannot be closed takes the rest of the time",
        HANGS + "[test_fails_and_hangs_at_its_end]",
    ),
)
