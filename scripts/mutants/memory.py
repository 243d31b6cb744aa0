"""Hooks, the order of a sleep and a wake, reports (M2, M3, M5, M8-M12)."""

from __future__ import annotations

from mutants.mutant import Mutant

HOLDERS = "src/torpor/memory/holders.py"
HOOKS = "src/torpor/memory/hooks.py"
MEMORY = "src/torpor/memory/memory.py"
POOL = "src/torpor/memory/pool.py"
SLEEP = "src/torpor/memory/sleep.py"
WAKE = "src/torpor/memory/wake.py"
POOL_TESTS = "tests/unit/test_memory_pools.py::"
SLEEP_TESTS = "tests/unit/test_memory_sleep.py::"
WAKE_TESTS = "tests/unit/test_memory_wake.py::"
HOLDER_TESTS = "tests/unit/test_memory_holders.py::"

MUTANTS = (
    Mutant(
        "m2-before-unmap-never-called",
        SLEEP,
        "released = self._shared.hooks.release(losing)",
        "released: list[Hook] = []",
        "nobody lets go before the unmap: peers go on reading the old pages",
        SLEEP_TESTS + "test_m2_every_hook_runs_newest_first_before_anything_is_unmapped",
    ),
    Mutant(
        "m2-hooks-oldest-first",
        HOOKS,
        "for hook in [h for h in reversed(self._hooks) if h.tag in wanted]:",
        "for hook in [h for h in self._hooks if h.tag in wanted]:",
        "what was built on something else is taken down after it",
        SLEEP_TESTS + "test_m2_every_hook_runs_newest_first_before_anything_is_unmapped",
    ),
    Mutant(
        "m2-tag-filter-wrong",
        HOOKS,
        "for hook in [h for h in reversed(self._hooks) if h.tag in wanted]:",
        "for hook in [h for h in reversed(self._hooks) if wanted]:",
        "connectors let go although their memory stays",
        SLEEP_TESTS + "test_hooks_run_only_for_tags_that_lose_memory_and_only_while_registered",
    ),
    Mutant(
        "m2-no-undo-after-a-failed-hook",
        HOOKS,
        "failures = self._own_failures(hook, error) + self.undo(ran)",
        "failures = self._own_failures(hook, error)",
        "a sleep that one hook stopped leaves the others released: nobody is served",
        SLEEP_TESTS + "test_m2_one_that_raises_undoes_the_others_and_everything_stays_mapped",
    ),
    Mutant(
        "m2-undo-in-the-wrong-order",
        HOOKS,
        "_run_after(reversed(released))",
        "_run_after(released)",
        "hooks come back before what they are built on",
        SLEEP_TESTS + "test_m2_one_that_raises_undoes_the_others_and_everything_stays_mapped",
    ),
    Mutant(
        "m2-no-undo-after-failed-images",
        SLEEP,
        "            self._undo(released, error)\n            raise",
        "            raise",
        "no host memory for an image, and the connector stays released for ever",
        SLEEP_TESTS + "test_m4_no_host_memory_leaves_everything_mapped_and_undoes_the_hooks",
    ),
    Mutant(
        "m2-a-failing-hook-is-swallowed",
        HOOKS,
        'raise _error(HookFailure(hook, error), "before_unmap", "nothing was unmapped", undo_failures=failures) from error',
        "continue",
        "memory goes although somebody could not let go of it",
        SLEEP_TESTS + "test_m2_one_that_raises_undoes_the_others_and_everything_stays_mapped",
    ),
    Mutant(
        "unsubscribing-does-nothing",
        HOOKS,
        "self._hooks = [h for h in self._hooks if h is not hook]",
        "self._hooks = list(self._hooks)",
        "a closed connector is called again by the next sleep",
        SLEEP_TESTS + "test_hooks_run_only_for_tags_that_lose_memory_and_only_while_registered",
    ),
    Mutant(
        "m3-after-map-never-called",
        WAKE,
        "failures = self._early_failures + self._come_back(late)",
        "failures: list[HookFailure] = []",
        "nobody registers the new pages",
        WAKE_TESTS + "test_m3_after_map_runs_oldest_first_once_content_is_back",
    ),
    Mutant(
        "m3-after-map-skipped-when-nothing-was-mapped",
        WAKE,
        "for r in rises if r.pool.residency is Residency.RESIDENT)",
        "for r in rises if r.to_map)",
        "a restore that failed is never retried",
        WAKE_TESTS + "test_m3_after_map_runs_also_when_nothing_was_mapped_but_only_for_asked_tags_that_are",
    ),
    Mutant(
        "m3-after-map-of-sleeping-tags",
        HOOKS,
        "return self._run_after(h for h in self._hooks if h.tag in wanted)",
        "return self._run_after(self._hooks if wanted else [])",
        "a connector registers a range that has no memory",
        WAKE_TESTS + "test_m3_after_map_runs_also_when_nothing_was_mapped_but_only_for_asked_tags_that_are",
    ),
    Mutant(
        "m3-the-first-failure-stops-the-rest",
        HOOKS,
        "                failures.append(HookFailure(hook, error))",
        "                failures.append(HookFailure(hook, error))\n                break",
        "one broken connector keeps all others from coming back",
        WAKE_TESTS + "test_m3_a_failing_hook_leaves_memory_mapped_is_reported_and_retried",
    ),
    Mutant(
        "m3-failures-are-not-reported",
        WAKE,
        "        if failures:\n            raise restore_error(failures, report)\n",
        "",
        "an engine that no peer can reach says that it is awake",
        WAKE_TESTS + "test_m3_a_failing_hook_leaves_memory_mapped_is_reported_and_retried",
    ),
    Mutant(
        "m5-pools-mapped-one-after-another",
        WAKE,
        "self._shared.device.map([s.region for s in self._to_map])",
        "[self._shared.device.map([s.region]) for s in self._to_map]",
        "out of memory half way leaves some pools awake",
        WAKE_TESTS + "test_m5_nothing_is_mapped_before_everything_asked_is_created",
    ),
    Mutant(
        "m9-noop-of-a-sleep-not-reported",
        SLEEP,
        "noop=move.step is Step.NOTHING,",
        "noop=False,",
        "a retry cannot be told from a sleep",
        SLEEP_TESTS + "test_m9_repeating_a_finished_move_says_so",
    ),
    Mutant(
        "m9-noop-of-a-wake-not-reported",
        WAKE,
        "noop = residency is Residency.RESIDENT and not to_restore",
        "noop = False",
        "a retry cannot be told from a wake",
        SLEEP_TESTS + "test_m9_repeating_a_finished_move_says_so",
    ),
    Mutant(
        "m9-unknown-tags-pass",
        MEMORY,
        "        self._require_known(policies)\n",
        "",
        "a misspelt tag is a sleep that frees nothing",
        SLEEP_TESTS + "test_m9_unknown_tags_and_policies_are_refused_before_anything_happens",
    ),
    Mutant(
        "m10-allocating-in-a-sleeping-pool",
        POOL,
        "if residency is not Residency.RESIDENT or content is Content.ON_HOST:\n            state =",
        "if content is Content.ON_HOST and residency is Residency.RESIDENT:\n            state =",
        "a tensor in memory that is not there",
        POOL_TESTS + "test_m10_allocating_in_a_sleeping_pool_names_the_wake",
    ),
    Mutant(
        "m11-holders-ignored",
        HOLDERS,
        "returned = total - held - pinned",
        "returned = total - pinned",
        "the report claims memory that a peer still holds",
        HOLDER_TESTS + "test_m11_a_peer_that_still_maps_it_is_named_and_reads_old_bytes",
    ),
    Mutant(
        "m11-open-descriptors-not-looked-for",
        HOLDERS,
        "                found[pid] |= {inode for _, inode in open_memfds(pid) if inode in sizes}\n",
        "",
        "a process that only keeps the descriptor holds the memory unseen",
        HOLDER_TESTS + "test_m11_a_process_that_only_keeps_the_descriptor_holds_it_too",
    ),
    Mutant(
        "m11-shared-pieces-count-twice",
        HOLDERS,
        "total = sum(sizes[i] for i in held)",
        "total = sum(h.bytes for h in holders)",
        "two holders of one piece make the report negative",
        HOLDER_TESTS + "test_m11_two_holders_of_the_same_memory_do_not_count_twice",
    ),
    Mutant(
        "m12-half-an-unmap-counts-as-a-whole-one",
        SLEEP,
        "            _take_stock(unmaps, was_lost, was_stale)\n",
        "",
        "content that was never unmapped counts as lost",
        WAKE_TESTS + "test_m12_half_discarded_is_lost_and_what_was_not_reached_is_not",
    ),
    Mutant(
        "m12-condemned-memory-is-forgotten",
        SLEEP,
        "if residency is not Residency.ASLEEP or any(s.region.condemned_bytes for s in pool.segments):",
        "if residency is not Residency.ASLEEP:",
        "what the driver would not release once is held for ever",
        WAKE_TESTS + "test_m12_memory_that_the_driver_will_not_release_is_asked_for_again",
    ),
    Mutant(
        "memory-extents-of-the-wrong-driver",
        "src/torpor/memory/config.py",
        "if by_driver and self.driver != AUTO:",
        "if by_driver:",
        "every engine on a GPU sleeps and wakes in pieces of 64 MiB, which take twice as long",
        "tests/unit/test_memory_pools.py::test_the_size_of_extents_follows_the_driver_that_auto_turns_out_to_be",
    ),
    Mutant(
        "m3-early-failures-unsaid",
        "src/torpor/memory/wake.py",
        "failures = self._early_failures + self._come_back(late)",
        "failures = self._come_back(late)",
        "a registration that did not come back beside the copies is believed",
        "tests/unit/test_memory_wake_beside.py::test_m3_a_hook_that_fails_beside_the_copies_is_reported_and_tried_again",
    ),
    Mutant(
        "m5-early-hooks-keep-their-pages",
        "src/torpor/memory/wake.py",
        "            self._shared.hooks.release(r.pool.tag for r in self._early)\n",
        "",
        "a wake that fails unmaps pages that a connector has registered",
        "tests/unit/test_memory_wake_beside.py::test_m5_hooks_that_came_back_early_let_go_when_the_copies_fail",
    ),
)
