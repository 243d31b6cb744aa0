"""Host memory taken ahead of the images, and the start that begins it: only a matter of time, and never lost."""

from __future__ import annotations

from mutants.mutant import NATIVE, Mutant

NATIVE_AHEAD = "csrc/src/arena_ahead.cpp"
ARENA = "csrc/src/arena.cpp"
BACKING = "src/torpor/memory/backing.py"
CLOCK = "src/torpor/memory/clock.py"
HEAD_START = "src/torpor/engine/head_start.py"
CHECKPOINT = "src/torpor/models/checkpoint.py"
TESTS = "tests/unit/test_memory_ahead.py::"
STARTS = "tests/unit/test_engine_head_start.py::"

MUTANTS = (
    Mutant(
        "ahead-a-commit-waits-for-what-never-comes",
        NATIVE_AHEAD,
        "std::max(range.address, next) < std::min(range.end(), end)",
        "(range.address < end && next < range.end())",
        "an image larger than was guessed hangs the start",
        NATIVE + "ahead_memory_is_spare_until_it_is_committed",
        hang=True,
    ),
    Mutant(
        "ahead-what-is-being-taken-is-taken-twice",
        NATIVE_AHEAD,
        " || !taking.present(range).empty()",
        "",
        "the end of it gives back pages of an image",
        NATIVE + "ahead_a_commit_waits_for_its_own_and_takes_what_lies_beyond",
        crash=True,
    ),
    Mutant(
        "ahead-goes-on-after-a-failure",
        NATIVE_AHEAD,
        "      ahead_.end = ahead_.next;  // the other lane begins nothing new either\n",
        "",
        "a machine without memory is asked again and again",
        NATIVE + "ahead_that_fails_is_no_failure_of_who_commits",
    ),
    Mutant(
        "ahead-does-not-ask-for-all-of-it",
        NATIVE_AHEAD,
        "  require_host_memory(TP_OP_COMMIT, pages.bytes);  //",
        "  //",
        "a start fills the machine half way up before it fails",
        NATIVE + "ahead_refuses_what_cannot_be",
    ),
    Mutant(
        "ahead-asks-for-no-part",
        NATIVE_AHEAD,
        "      require_host_memory(TP_OP_COMMIT, gap.bytes);  //",
        "      //",
        "two engines that start together end in the OOM killer",
        "tests/unit/test_native_cgroup.py::test_those_who_take_memory_ahead_at_once_do_not_fill_the_cgroup",
    ),
    Mutant(
        "ahead-page-locks-go-under-a-copy",
        NATIVE_AHEAD,
        "  const Closing closing(device_.access, entry_);\n",
        "",
        "a copy from an image whose pages are not locked any more",
        NATIVE + "threads_ending_it_waits_for_copies_in_what_was_committed",
    ),
    Mutant(
        "ahead-is-over-after-a-refusal",
        BACKING,
        "            self._arena = None\n            raise\n",
        "            self._arena, self._space = None, space\n            raise\n",
        "who asks for less gets nothing, and is not told",
        TESTS + "test_what_cannot_be_had_is_not_begun",
    ),
    Mutant(
        "ahead-takes-over-what-is-committed",
        NATIVE_AHEAD,
        "for (const Range &gap : entry_.committed.missing(part)) {",
        "for (const Range &gap : {part}) {",
        "pages of an image are counted twice, and given back",
        NATIVE + "ahead_passes_over_what_is_committed",
        crash=True,
    ),
    Mutant(
        "ahead-files-lie-over-spare-memory",
        ARENA,
        "  give_back_spare(asked);\n",
        "",
        "the end of it takes a shared image away",
        NATIVE + "ahead_a_file_takes_the_place_of_spare_memory",
        crash=True,
    ),
    Mutant(
        "ahead-outlives-its-arena",
        ARENA,
        "void Arena::clear() {\n  end_ahead();\n",
        "void Arena::clear() {\n",
        "a start that fails leaves host memory taken",
        NATIVE + "ahead_ends_with_its_arena",
        crash=True,
    ),
    Mutant(
        "ahead-passes-the-limit",
        BACKING,
        "        self._require_limit(nbytes)\n        if self._space is not None:\n",
        "        if self._space is not None:\n",
        "host_limit_bytes holds for images only when they are late",
        TESTS + "test_the_limit_holds_for_it",
    ),
    Mutant(
        "ahead-is-begun-again",
        BACKING,
        "        if self._space is not None:\n            return\n        space = self._open_arena()\n",
        "        if self._space is not None and self._space.empty:\n            return\n"
        "        space = self._space or self._open_arena()\n",
        "memory is taken for images that are there already",
        TESTS + "test_it_is_taken_once_and_only_before_there_are_images",
    ),
    Mutant(
        "waits-at-once-are-added-up",
        CLOCK,
        "            if self._waiting == 0:\n                self._began = time.perf_counter()\n",
        "            self._began = time.perf_counter()\n",
        "the start-up table tells of other waits than there were",
        TESTS + "test_waits_at_once_count_once",
    ),
    Mutant(
        "head-start-is-never-closed",
        HEAD_START,
        "            self._memory.close()\n",
        "",
        "a start that fails in its imports keeps the device and the host's memory",
        STARTS + "test_a_start_that_fails_gives_all_back",
    ),
    Mutant(
        "head-start-takes-private-memory-for-shared-images",
        HEAD_START,
        "if sleep.prepares_images(memory.driver) and not memory.share_images and (",
        "if sleep.prepares_images(memory.driver) and (",
        "every engine of a host takes the memory that they were to share",
        STARTS + "test_nothing_is_taken_where_no_image_is_prepared",
    ),
    Mutant(
        "head-start-keeps-what-the-engine-has-got",
        HEAD_START,
        '        """Somebody else closes the memory."""\n        self._memory = None\n',
        '        """Somebody else closes the memory."""\n',
        "the memory is closed under an engine that has just come up",
        STARTS + "test_the_engine_gets_the_memory_that_was_opened_ahead",
    ),
    Mutant(
        "weights-are-guessed-as-they-are-stored",
        CHECKPOINT,
        "kinds = [(e, dtype if e.dtype.is_floating_point else e.dtype) for e in self.entries.values()]",
        "kinds = [(e, e.dtype) for e in self.entries.values()]",
        "twice the memory is taken for a model that is served in half its precision",
        STARTS + "test_what_is_expected_is_what_the_weights_take",
    ),
)
