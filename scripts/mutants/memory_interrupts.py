"""Memory when an interrupt comes, threads meet, or a call is made at the wrong moment (M11, M12)."""

from __future__ import annotations

from mutants.mutant import Mutant

BACKING = "src/torpor/memory/backing.py"
KEPT_TESTS = "tests/unit/test_memory_kept_errors.py::"
CALLS_TESTS = "tests/unit/test_memory_interrupted_calls.py::"

MUTANTS = (
    Mutant(
        "m10-an-error-keeps-what-its-thread-had",
        "src/torpor/memory/futures.py",
        "    finally:\n        del error\n",
        "    finally:\n        pass\n",
        "after a failed load its tensors stay until somebody collects garbage",
        KEPT_TESTS + "test_what_failed_on_a_thread_keeps_nothing",
    ),
    Mutant(
        "m10-a-read-that-failed-keeps-its-targets",
        "src/torpor/models/checkpoint.py",
        "                while jobs:\n                    result_of(jobs.popleft())\n",
        "                for job in jobs:\n                    job.result()\n",
        "after weights that could not be read there is no room for others",
        KEPT_TESTS + "test_targets_of_a_read_that_failed_die_with_their_last_name",
    ),
    Mutant(
        "m10-who-waits-for-memory-keeps-the-tensors",
        "src/torpor/memory/loading.py",
        "                    result_of(self._taking)\n                self._state",
        "                    taking = self._taking\n                    taking.result()\n                self._state",
        "after a load that failed its tensors keep their regions",
        "tests/unit/test_memory_loading_steps.py::test_m12_every_driver_call_may_fail_and_the_load_be_repeated",
    ),
    Mutant(
        "m12-a-file-of-an-interrupted-adopt-stays",
        BACKING,
        "                    self._arena_memory().decommit(*place)\n",
        "",
        "the next sleep writes to a sealed file, and the process dies",
        CALLS_TESTS + "test_a_shared_file_that_was_being_adopted_is_not_left_for_a_sleep_to_write_to",
    ),
    Mutant(
        "m12-an-interrupted-decommit-is-not-counted",
        BACKING,
        "                self._count_out(image, part, size)\n                raise\n",
        "                raise\n",
        "a Ctrl-C in release_images, and the tag can never sleep again",
        CALLS_TESTS + "test_images_that_were_being_released_are_gone_and_made_again",
    ),
    Mutant(
        "m12-an-arena-of-an-interrupt-is-nobodys",
        "src/torpor/_native/device.py",
        'with _nobodys(out, "tp_arena_destroy"):',
        "with contextlib.nullcontext():",
        "twice the machine's memory stays reserved, and the device cannot be closed",
        CALLS_TESTS + "test_what_was_being_made_is_nobodys_and_goes",
    ),
    Mutant(
        "m12-an-interrupted-share-does-not-wait-for-its-makers",
        "src/torpor/memory/sharing.py",
        "                self._end_making(slots, lanes)\n",
        "",
        "a thread goes on to write to memory that is gone, and image files stay open",
        CALLS_TESTS + "test_a_share_that_is_interrupted_while_a_piece_is_made_leaves_no_file",
        crash=True,
    ),
    Mutant(
        "hooks-of-two-threads-are-lost",
        "src/torpor/memory/hooks.py",
        "            self._hooks.pop(hook.order, None)\n",
        "            self._hooks = {o: h for o, h in list(self._hooks.items()) if h is not hook}\n",
        "a transport is not told of the sleep: its peers read old pages",
        "tests/unit/test_memory_hooks_threads.py::test_two_threads_that_register_and_unregister_lose_no_hook",
    ),
    Mutant(
        "a-tensor-may-be-made-inside-a-load",
        "src/torpor/memory/pool.py",
        '            self._shared.require_no_load("empty")\n',
        "",
        "the load overwrites it",
        "tests/unit/test_memory_inside_load.py::test_it_is_refused_and_the_load_ends_right",
    ),
    Mutant(
        "a-mapping-of-a-failed-wake-has-the-number-of-the-one-before",
        "src/torpor/memory/wake.py",
        "fresh = [s for s in rise.pool.segments if s.fresh]",
        "fresh = rise.to_map",
        "a peer takes its import of the old pages for one of the new",
        "tests/unit/test_memory_wake_again.py::test_a_wake_that_is_interrupted_once_it_has_mapped_has_made_another_mapping",
    ),
    Mutant(
        "m4-host-limit-forgets-what-is-taken-ahead",
        BACKING,
        "        self._end_ahead_at_limit(offset, size)\n",
        "",
        "images and what was taken ahead of them together pass the limit",
        "tests/unit/test_memory_ahead_limit.py::test_images_that_lie_elsewhere_end_what_was_taken_ahead",
    ),
)
