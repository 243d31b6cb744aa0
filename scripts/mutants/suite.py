"""The conformance suite's own eyes, ``multi``, and what pins (P1-P5, E1-E7)."""

from __future__ import annotations

from mutants.mutant import Mutant

BYTES = "src/torpor/testing/connectors/items_bytes.py"
DOORS = "src/torpor/testing/connectors/items_doors.py"
FLAT = "src/torpor/testing/connectors/items_flat.py"
MOVES = "src/torpor/testing/connectors/items_moves.py"
MULTI = "src/torpor/connectors/multi.py"
MULTI_SCHEDULER = "src/torpor/connectors/multi_scheduler.py"
MULTI_WORKER = "src/torpor/connectors/multi_worker.py"
MULTI_CONFIG = "src/torpor/connectors/multi_config.py"
PINNED = "src/torpor/testing/connectors/pinned.py"
STAGE = "src/torpor/testing/connectors/stage.py"
SUITE = "src/torpor/testing/connectors/suite.py"
SUBJECT = "src/torpor/testing/connectors/subject.py"
CAUGHT = "tests/unit/test_connectors_suite.py::TestFaults::test_it_is_caught"
LIMITS = "tests/unit/test_connectors_suite.py::TestLimits::"
MULTI_TESTS = "tests/unit/test_connectors_multi.py::"
VITALS = "src/torpor/testing/connectors/vitals.py"
WHOLE = "tests/unit/test_connectors_suite.py::"
PIN_TESTS = "tests/unit/test_connectors_registry.py::TestPinnedConnector::"

MUTANTS = (
    Mutant(
        "suite-a-child-that-cannot-follow-is-overlooked",
        DOORS,
        "    if deaf and kind.supports_sleep_mode:\n",
        "    if deaf and not kind.supports_sleep_mode:\n",
        "E4: several connectors in one promise what one of them cannot keep",
        f"{CAUGHT}[SpeaksForItsChildren]",
    ),
    Mutant(
        "suite-blind-behind-a-prefix",
        BYTES,
        "_place(stage, p, d, spec, there, here, prefix=index % 2)",
        "_place(stage, p, d, spec, there, here, prefix=0)",
        "a connector that reads the wrong blocks where a prefix is cached conforms",
        f"{CAUGHT}[PrefixBlind]",
    ),
    Mutant(
        "suite-bytes-not-compared",
        STAGE,
        "        if not d.has(prompt, here[:loaded]):\n",
        "        if loaded > len(here):\n",
        "a connector that gives old bytes after a sleep conforms",
        "tests/unit/test_connectors_suite.py::TestFaults::test_it_is_caught_between_processes[OldBytes]",
    ),
    Mutant(
        "suite-buffers-in-pools-are-overlooked",
        MOVES,
        "    if taken:\n",
        "    if len(taken) > 1:\n",
        "E1: a buffer that sleeps under its connector",
        f"{CAUGHT}[Greedy]",
    ),
    Mutant(
        "suite-blocks-that-never-end-are-overlooked",
        BYTES,
        'if kept and (found := p.call("reported", name, stage.patient(ENDS_S))) != "sending":',
        'if kept and (found := p.call("reported", name, 0.1)) == "failed":',
        "a prefill engine runs out of blocks",
        f"{CAUGHT}[Miserly]",
    ),
    Mutant(
        "suite-reports-of-what-was-only-told-are-overlooked",
        BYTES,
        '    if (found := d.call("reported", name, stage.patient(QUIET_S))) is not None:\n',
        '    if (found := d.call("reported", name, stage.patient(QUIET_S))) == "failed":\n',
        "an engine uses blocks before they have arrived",
        f"{CAUGHT}[Talkative]",
    ),
    Mutant(
        "suite-any-params-will-do",
        DOORS,
        '        if outcome != "refused":\n',
        '        if outcome == "recving":\n',
        "a client's params reach the transport unchecked",
        f"{CAUGHT}[Credulous]",
        also=(
            ("        outcome = d.read(stage.request(), stage.prompt(), params, [4, 5, 6])\n", '        outcome = "nothing"\n'),
        ),
    ),
    Mutant(
        "suite-other-models-are-not-tried",
        DOORS,
        '        "model": dataclasses.replace(SMALL_SPEC, model_id="stand-in@2"),\n',
        "",
        "KV of other weights is taken",
        f"{CAUGHT}[ModelBlind]",
    ),
    Mutant(
        "suite-loads-in-flight-are-overlooked",
        BYTES,
        '        if outcome == "recving" and flying:\n',
        '        if outcome == "sending" and flying:\n',
        "KV that went with a sleep counts as loaded",
        f"{CAUGHT}[Optimist]",
    ),
    Mutant(
        "suite-the-same-epoch-is-overlooked",
        BYTES,
        "    if p.epoch() in (None, first):\n",
        "    if p.epoch() is None:\n",
        "P1: a new mapping passes for the old one",
        f"{CAUGHT}[SameEpoch]",
    ),
    Mutant(
        "suite-a-release-is-done-once",
        MOVES,
        '    p.call("release")\n    p.call("release")\n',
        '    p.call("release")\n',
        "a sleep that is tried again fails for good",
        f"{CAUGHT}[OnceOnly]",
    ),
    Mutant(
        "suite-published-is-not-looked-at",
        MOVES,
        '    if p.epoch() is None or not p.call("published"):\n        raise Failure(f"the KV cache is published to nobody',
        '    if p.call("residency") != "asleep":\n        return\n        raise Failure(f"the KV cache is published to nobody',
        "a sleep that failed leaves every peer locked out",
        f"{CAUGHT}[Sulking]",
    ),
    Mutant(
        "suite-a-failed-restore-is-not-tried-again",
        MOVES,
        '    if p.call("fail_next", "restore"):\n',
        '    if p.call("subscribed") is None:\n',
        "a wake that failed once never serves peers again",
        f"{CAUGHT}[OneTry]",
    ),
    Mutant(
        "suite-a-partial-wake-is-overlooked",
        MOVES,
        '    p.call("rise", ["weights"])\n    if p.epoch() is not None or p.call("published"):\n',
        '    if p.epoch() is not None or p.call("published"):\n',
        "E7: a KV cache that sleeps is published",
        f"{CAUGHT}[EarlyBird]",
    ),
    Mutant(
        "suite-hooks-left-behind-are-overlooked",
        MOVES,
        '    if engine.call("subscribed"):\n',
        '    if engine.call("subscribed") is None:\n',
        "E5: the memory layer calls a connector that is gone",
        f"{CAUGHT}[Clinging]",
    ),
    Mutant(
        "suite-growth-is-overlooked",
        FLAT,
        "        if after[engine][name] > then[name]\n",
        "        if after[engine][name] > 2 * then[name]\n",
        "every sleep leaves something behind",
        f"{CAUGHT}[KeepsMappings]",
    ),
    Mutant(
        "suite-what-the-allocator-keeps-counts-as-grown",
        VITALS,
        "        trim(ctypes.c_size_t(0))\n",
        "        pass\n",
        "over RDMA no connector passes: an agent of UCX's leaves megabytes of free memory behind",
        WHOLE + "TestVitals::test_memory_that_was_freed_is_not_resident",
    ),
    Mutant(
        "suite-patience-is-for-items-alone",
        SUBJECT,
        '            "patience": self.patience,\n',
        '            "patience": 1.0,\n',
        "on an emulated machine engines of other processes are given up too early",
        WHOLE + "TestPatience::test_engines_of_other_processes_have_it_too",
    ),
    Mutant(
        "suite-items-have-no-patience",
        SUITE,
        "        limit_s = subject.patient(item.limit_s)\n",
        "        limit_s = item.limit_s\n",
        "no connector passes on an emulated machine",
        WHOLE + "TestPatience::test_limits_are_so_many_times_longer",
    ),
    Mutant(
        "suite-owner-and-reader-in-one-process",
        STAGE,
        "apart=self.between_processes and not here, spec=spec",
        "apart=False, spec=spec",
        "what one engine has pinned is reported as held by the other, or the other way round",
        WHOLE + "TestPatience::test_an_owner_has_a_process_of_its_own",
    ),
    Mutant(
        "suite-resident-memory-is-overlooked",
        FLAT,
        "    if resident > CYCLES * RESIDENT_SLACK_BYTES:\n",
        "    if resident < 0:\n",
        "every sleep costs host memory",
        f"{CAUGHT}[KeepsBytes]",
    ),
    Mutant(
        "suite-an-item-may-hang",
        SUITE,
        "    thread.join(limit_s)\n",
        "    thread.join()\n",
        "a connector that hangs hangs the suite",
        LIMITS + "test_an_item_that_hangs_has_failed",
        hang=True,
    ),
    Mutant(
        "multi-siblings-stay-released",
        MULTI_WORKER,
        "                undone = self._restore(reversed(released))\n",
        "                undone: tuple[str, ...] = ()\n",
        "a sleep that one child refused takes the others from their peers",
        MULTI_TESTS + "TestSleep::test_if_one_fails_to_release_the_others_are_restored[0]",
    ),
    Mutant(
        "multi-released-in-order",
        MULTI_WORKER,
        "        for index in reversed(range(len(self._children))):\n",
        "        for index in range(len(self._children)):\n",
        "a child takes what another one has pinned for its own",
        MULTI_TESTS + "TestSleep::test_if_one_fails_to_release_the_others_are_restored[0]",
    ),
    Mutant(
        "multi-one-child-that-follows-is-enough",
        MULTI,
        "supports_sleep_mode: ClassVar[bool] = all(",
        "supports_sleep_mode: ClassVar[bool] = any(",
        "E4: memory goes under a child that does not know of it",
        MULTI_TESTS + "TestSupport::test_e4_it_sleeps_only_if_every_child_does",
    ),
    Mutant(
        "multi-free-with-the-first-end",
        MULTI_WORKER,
        "        if left:\n            self._kept[request_id] = left\n        return not left\n",
        "        return True\n",
        "blocks are written again while a child still offers them",
        MULTI_TESTS + "TestTransfers::test_blocks_are_free_when_the_last_child_has_ended_the_hand_off",
    ),
    Mutant(
        "multi-published-while-a-child-is-away",
        MULTI_WORKER,
        "return None if None in epochs else epochs[0]",
        "return epochs[0]",
        "hand-offs name a child that serves nobody",
        MULTI_TESTS + "TestSleep::test_a_child_that_fails_to_come_back_is_named_and_tried_again",
    ),
    Mutant(
        "multi-others-are-not-told",
        MULTI_SCHEDULER,
        "                child.update_state_after_alloc(own, [], 0)\n",
        "                pass\n",
        "blocks that nobody reads stay for the whole lease",
        MULTI_TESTS + "TestTransfers::test_one_with_less_hears_at_once_that_it_may_let_go",
    ),
    Mutant(
        "multi-a-failed-load-is-the-end",
        MULTI_WORKER,
        "if not self._next_is_asked(name)",
        "if True",
        "a prompt is computed that another child has",
        MULTI_TESTS + "TestTransfers::test_a_load_that_failed_is_asked_of_the_next_that_has_it",
    ),
    Mutant(
        "multi-the-cancelled-is-asked-of-the-next",
        MULTI_WORKER,
        "            for name in part.cancelled:\n                self._spare(name)\n",
        "            pass\n",
        "blocks of a request that has ended are written to",
        MULTI_TESTS + "TestTransfers::test_what_was_cancelled_is_asked_of_nobody_else",
    ),
    Mutant(
        "multi-a-sleep-asks-the-next",
        MULTI_WORKER,
        "            self._spare(name)\n        released: list[int] = []",
        "            pass\n        released: list[int] = []",
        "a load is begun while its memory goes",
        MULTI_TESTS + "TestTransfers::test_p2_what_a_sleep_has_ended_is_asked_of_nobody_else",
    ),
    Mutant(
        "multi-the-spared-never-hear",
        MULTI_WORKER,
        "        for name in recving:\n            self._spare(name)\n",
        "",
        "blocks that nobody reads stay for the whole lease",
        MULTI_TESTS + "TestTransfers::test_the_others_hear_that_they_may_let_go",
    ),
    Mutant(
        "multi-one-with-less-is-asked",
        MULTI_SCHEDULER,
        ">= num_external_tokens:",
        "> 0:",
        "the last tokens of a prompt count as loaded and are not there (P5)",
        MULTI_TESTS + "TestTransfers::test_p5_one_that_has_less_is_not_asked",
    ),
    Mutant(
        "multi-the-child-is-not-named",
        MULTI_CONFIG,
        '    error.message = f"{label}: {error.message}"\n',
        "    error.message = str(error.message)\n",
        "nobody knows which connector failed",
        MULTI_TESTS + "TestSleep::test_if_one_fails_to_release_the_others_are_restored[1]",
    ),
    Mutant(
        "multi-each-child-has-the-whole-deadline",
        MULTI_CONFIG,
        "withdraw_timeout_s=parent.withdraw_timeout_s / count,",
        "withdraw_timeout_s=parent.withdraw_timeout_s,",
        "a sleep takes as many times withdraw_timeout_s as there are children",
        MULTI_TESTS + "TestOptions::test_children_are_names_or_vllms_objects",
    ),
    Mutant(
        "pinned-a-closed-registration-opens",
        PINNED,
        "                self._pins.pop().close()\n",
        "                self._pins[0].close()\n                break\n",
        "the stand-in for RDMA is none: what was deregistered can be read",
        PIN_TESTS + "test_a_key_of_before_opens_nothing",
    ),
    Mutant(
        "pinned-nothing-is-unpinned",
        PINNED,
        "            self.regions.pop().close()\n",
        "            self.regions.pop()\n",
        "P4a: memory that a sleep says is free is held",
        PIN_TESTS + "test_p4a_what_is_published_is_pinned_until_it_is_released",
    ),
)
