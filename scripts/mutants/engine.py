"""Start-up, lifecycle, core and executor (E1-E8, E10)."""

from __future__ import annotations

from mutants.mutant import Mutant

BYTECODE = "src/torpor/engine/bytecode.py"
CORE = "src/torpor/engine/core.py"
EXECUTOR = "src/torpor/engine/executor.py"
KV_CONNECTOR = "src/torpor/engine/kv_connector.py"
LIFECYCLE = "src/torpor/engine/lifecycle.py"
LIFECYCLE_PARTS = "src/torpor/engine/lifecycle_parts.py"
PLAN = "src/torpor/engine/sleep_plan.py"
WORKER = "src/torpor/engine/worker.py"
BYTECODE_TESTS = "tests/unit/test_engine_bytecode.py::"
PLACEMENT_TESTS = "tests/unit/test_engine_placement.py::"
ASLEEP_TESTS = "tests/unit/test_engine_asleep.py::"
CONNECTOR_TESTS = "tests/unit/test_engine_connector.py::"
SLEEP_TESTS = "tests/unit/test_lifecycle_sleep.py::"
NOOP_TESTS = "tests/unit/test_lifecycle_noop.py::"
UPDATE_TESTS = "tests/unit/test_lifecycle_weights.py::"
WAKE_TESTS = "tests/unit/test_lifecycle_wake.py::"
WORKER_TESTS = "tests/unit/test_runner_worker.py::"

# Every tensor that is made while the connector registers lands in the KV cache's pool: the mistake that E1 is about.
INSIDE_THE_POOL = """\
        class Inside(torch.overrides.TorchFunctionMode):
            def __torch_function__(mode, function, types, arguments=(), settings=None):
                made = function(*arguments, **(settings or {}))
                if function not in (torch.empty, torch.zeros):
                    return made
                return self.memory.pool("kv_cache").empty(made.shape, made.dtype).copy_(made)

        with Inside():
            connector.register_kv_caches(self.kv_caches, spec, self.memory)
"""

MUTANTS = (
    Mutant(
        "e1-registration-inside-the-pool",
        WORKER,
        "        connector.register_kv_caches(self.kv_caches, spec, self.memory)\n",
        INSIDE_THE_POOL,
        "the connector's own buffers lose their memory with the KV cache",
        WORKER_TESTS + "test_e1_a_buffer_of_the_connectors_belongs_to_no_tag_and_survives",
    ),
    Mutant(
        "e1-the-connector-gets-copies",
        WORKER,
        "connector.register_kv_caches(self.kv_caches, spec, self.memory)",
        "connector.register_kv_caches({n: t.clone() for n, t in self.kv_caches.items()}, spec, self.memory)",
        "peers read tensors that the model never writes",
        WORKER_TESTS + "test_e1_a_buffer_of_the_connectors_belongs_to_no_tag_and_survives",
    ),
    Mutant(
        "e2-deadline-ignored",
        LIFECYCLE,
        "elif self._clock() >= drain.started + plan.deadline_s:",
        "elif self._clock() >= drain.started + 1e9:",
        "a request that never ends keeps a sleep waiting for ever",
        SLEEP_TESTS + "test_a_deadline_aborts_the_sleep_by_name_and_everything_goes_on",
    ),
    Mutant(
        "e2-after-the-deadline-nobody-is-served",
        LIFECYCLE,
        "        self._go_back(drain.origin)\n        fail(drain.tickets, SleepAborted(",
        "        self._move(drain.origin)\n        fail(drain.tickets, SleepAborted(",
        "a sleep that was called off leaves admission closed",
        SLEEP_TESTS + "test_a_deadline_aborts_the_sleep_by_name_and_everything_goes_on",
    ),
    Mutant(
        "e2-level-2-keeps-the-weights",
        PLAN,
        '2: {"weights": "discard", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},',
        '2: {"weights": "host", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},',
        "level 2 takes host memory",
        SLEEP_TESTS + "test_e2_a_level_unmaps_every_pool_and_the_wake_gives_the_same_answers",
    ),
    Mutant(
        "e6-prefixes-of-the-old-weights",
        CORE,
        "        self._scheduler.kv.reset(version)  # first",
        "        self._scheduler.kv.reset()  # first",
        "the prefix cache goes on under the old weights' name",
        UPDATE_TESTS + "test_e6_names_of_kv_follow_the_weights",
    ),
    Mutant(
        "p5-peers-are-not-told-of-new-weights",
        EXECUTOR,
        "            self._connector.set_weights_version(version)\n",
        "            pass\n",
        "a peer with the old weights is read",
        UPDATE_TESTS + "TestConnectors::test_both_sides_are_told_before_the_engine_can_wake",
    ),
    Mutant(
        "p5-update-beside-kv-of-the-old-weights",
        PLAN,
        "not (tag.residency is Residency.ASLEEP and tag.content is Content.LOST)",
        "tag.residency is Residency.RESIDENT",
        "KV of the old weights comes back from its image",
        UPDATE_TESTS + "TestWhen::test_kv_of_the_old_weights_must_be_gone",
    ),
    Mutant(
        "m8-update-keeps-the-old-image",
        EXECUTOR,
        """        self._worker.memory.sleep({WEIGHTS: "discard"})\n        update.take()""",
        "        update.take()",
        "the wake restores the old weights under the new name",
        UPDATE_TESTS + "test_the_wake_loads_the_new_weights",
    ),
    Mutant(
        "m12-update-taken-before-it-is-safe",
        EXECUTOR,
        """        self._worker.memory.sleep({WEIGHTS: "discard"})\n        update.take()""",
        """        update.take()\n        self._worker.memory.sleep({WEIGHTS: "discard"})""",
        "after a driver's failure the wake loads weights that nobody was told of",
        UPDATE_TESTS + "test_m12_a_driver_that_fails_leaves_the_old_weights",
    ),
    Mutant(
        "update-takes-another-configuration",
        "src/torpor/models/update.py",
        "        if here.get(name) != there.get(name):",
        "        if name == 'architectures' and here.get(name) != there.get(name):",
        "weights are computed with another model's constants",
        "tests/unit/test_models_update.py::test_another_configuration_is_refused_by_the_name_of_what_differs",
    ),
    Mutant(
        "e2-lost-weights-not-read-again",
        EXECUTOR,
        "            refill[tag]()\n",
        "",
        "zeros are served as weights",
        SLEEP_TESTS + "test_e2_a_level_unmaps_every_pool_and_the_wake_gives_the_same_answers",
    ),
    Mutant(
        "e2-keep-does-not-freeze",
        LIFECYCLE,
        "        self._scheduler.freeze()\n",
        "",
        "running requests go on over KV that is gone",
        SLEEP_TESTS + "test_keep_freezes_and_the_text_goes_on_as_if_nothing_had_happened",
    ),
    Mutant(
        "e2-abort-of-a-sleeper-ends-nothing",
        LIFECYCLE,
        '        ended = plan.mode == "abort" and self._abort_all()\n',
        "        ended = False\n",
        "what somebody has ended is answered after the wake",
        SLEEP_TESTS + "test_abort_of_an_engine_that_is_asleep_ends_what_is_frozen",
    ),
    Mutant(
        "m9-a-cancelled-drain-is-nothing",
        LIFECYCLE,
        'reason=f"cancelled the {what} that was draining", noop=False)',
        'reason=f"cancelled the {what} that was draining", noop=True)',
        "an operator reads that the wake did nothing, and looks for what ended the pause",
        NOOP_TESTS + "test_m9_what_cancels_a_pause_that_drains_has_done_something",
    ),
    Mutant(
        "m9-an-opening-wake-is-nothing",
        LIFECYCLE,
        " and self._state is _S.ASLEEP and missing == missing_before",
        "",
        "the wake that lets the engine serve says that it did nothing",
        NOOP_TESTS + "test_m9_a_wake_that_only_opens_the_engine_has_done_something",
    ),
    Mutant(
        "e2-loads-not-cancelled",
        LIFECYCLE,
        "            self._scheduler.cancel_loads()\n",
        "            return None\n",
        "a sleep waits for a slow peer until its deadline",
        SLEEP_TESTS + "test_loads_are_cancelled_by_keep_and_recomputed",
    ),
    Mutant(
        "e3-admission-stays-open",
        LIFECYCLE,
        "        self._scheduler.close_admission()\n",
        "",
        "requests begin while the engine drains: it never falls asleep",
        SLEEP_TESTS + "test_wait_does_not_begin_what_was_only_queued",
    ),
    Mutant(
        "e3-drain-does-not-wait",
        LIFECYCLE,
        'if not scheduler.has_loading and (plan.mode == "keep" or not scheduler.has_running):',
        "if not scheduler.has_loading:",
        "mode wait cuts answers in the middle",
        SLEEP_TESTS + "test_wait_lets_running_requests_finish_and_keeps_waiting_ones_queued",
    ),
    Mutant(
        "e3-republish-removed",
        LIFECYCLE,
        "        self._publish()\n        return self.missing_tags(stats)",
        "        return self.missing_tags(stats)",
        "after a wake, hand-offs name the epoch of before: every one is recomputed",
        CONNECTOR_TESTS + "test_e3_metadata_is_published_anew_before_admission_opens",
    ),
    Mutant(
        "e4-refusal-at-start-up-removed",
        KV_CONNECTOR,
        "if sleep.enable_sleep_mode and not kind.supports_sleep_mode:",
        "if sleep.enable_sleep_mode and kind is None:",
        "a connector that cannot follow addresses unmapped memory",
        CONNECTOR_TESTS + "test_e4_a_connector_that_cannot_follow_is_refused_at_start_up",
    ),
    Mutant(
        "e4-refusal-with-pools-only-removed",
        PLAN,
        'if self.unsupported_connector is not None and plan.policies.get("kv_cache", "keep") != "keep":',
        'if self.unsupported_connector is not None and "kv_cache" not in plan.policies:',
        "a sleep unmaps under a connector that cannot follow",
        CONNECTOR_TESTS + "test_e4_with_pools_only_the_sleep_is_refused_before_anything_is_unmapped",
    ),
    Mutant(
        "e4-a-pause-is-refused",
        PLAN,
        "        if not plan.unmaps:\n            return\n",
        "",
        "an engine without sleep mode cannot pause",
        CONNECTOR_TESTS + "test_e4_a_pause_is_never_refused",
        also=(('plan.policies.get("kv_cache", "keep") != "keep"', "True"),),
    ),
    Mutant(
        "e5-subscribed-without-being-asked",
        KV_CONNECTOR,
        "    if not kind.supports_sleep_mode:\n        return ConnectorSubscription(None)\n",
        "",
        "a connector that never promised it is made to let go",
        CONNECTOR_TESTS + "test_e5_a_connector_that_does_not_is_never_called",
    ),
    Mutant(
        "e5-before-unmap-not-registered",
        KV_CONNECTOR,
        "        before_unmap=worker_side.release_kv_caches,\n",
        "",
        "HTTP 200, wrong tokens, and memory that is free yet held",
        CONNECTOR_TESTS + "test_e5_a_connector_that_follows_is_called_around_the_mapping",
    ),
    Mutant(
        "e5-after-map-not-registered",
        KV_CONNECTOR,
        "        after_map=worker_side.restore_kv_caches,\n",
        "",
        "after the first sleep no peer is ever served again",
        CONNECTOR_TESTS + "test_e5_a_connector_that_follows_is_called_around_the_mapping",
    ),
    Mutant(
        "e5-subscribed-to-another-tag",
        KV_CONNECTOR,
        '        "kv_cache",\n        before_unmap',
        '        "weights",\n        before_unmap',
        "the connector lets go of the KV cache when the weights sleep",
        CONNECTOR_TESTS + "test_e5_a_connector_that_follows_is_called_around_the_mapping",
    ),
    Mutant(
        "e5-unsubscription-removed",
        EXECUTOR,
        "            self._subscription.close()\n",
        "            pass\n",
        "the memory layer calls a connector that is shut down",
        CONNECTOR_TESTS + "test_e5_a_connector_is_unsubscribed_at_shutdown",
    ),
    Mutant(
        "e6-prefix-cache-not-reset",
        LIFECYCLE,
        "                self._reset_cache()\n",
        "",
        "the prefix cache finds KV that is gone: wrong tokens",
        WAKE_TESTS + "test_e6_the_prefix_cache_dies_with_the_content",
    ),
    Mutant(
        "e6-hand-offs-outlive-their-memory",
        LIFECYCLE,
        "            self._scheduler.end_hand_offs()\n",
        "",
        "blocks of withdrawn hand-offs are held",
        WAKE_TESTS + "test_e6_hand_offs_end_with_the_mapping",
    ),
    Mutant(
        "e7-partial-wake-serves",
        LIFECYCLE,
        "        if missing:\n            self._move(_S.ASLEEP)\n        else:\n            self._reopen()\n",
        "        self._reopen()\n",
        "requests are computed without weights or KV cache",
        WAKE_TESTS + "test_e7_a_partial_wake_never_serves",
        crash=True,  # it touches memory that is not there
    ),
    Mutant(
        "e7-a-step-while-asleep-passes",
        CORE,
        "            self._check_may_compute(output)\n",
        "",
        "the last line of defence is gone",
        ASLEEP_TESTS + "test_e7_a_step_that_would_compute_while_asleep_is_a_bug",
        crash=True,  # it touches memory that is not there
    ),
    Mutant(
        "e7-a-failed-restore-serves",
        LIFECYCLE,
        "t.content is not Content.VALID or t.hooks_away",
        "t.content is not Content.VALID",
        "an engine that no peer can reach serves",
        WAKE_TESTS + "test_m3_a_connector_that_cannot_come_back_keeps_the_engine_asleep_until_a_wake_retries_it",
    ),
    Mutant(
        "e8-drain-cancel-removed",
        LIFECYCLE,
        '                self._cancel_drain("woken",',
        '                print("woken",',
        "a wake answers awake, and then the engine falls asleep",
        SLEEP_TESTS + "test_e8_a_wake_during_a_drain_cancels_the_sleep",
    ),
    Mutant(
        "e8-queued-sleeps-survive-a-wake",
        LIFECYCLE,
        "self._queue = deque(call for call in self._queue if not call.sleeps)",
        "self._queue = deque(self._queue)",
        "an engine that was just woken falls asleep again",
        SLEEP_TESTS + "test_e8_a_wake_also_cancels_sleeps_that_wait_behind_the_drain",
    ),
    Mutant(
        "e10-nobody-is-turned-away",
        CORE,
        'if asleep and self.config.sleep.while_asleep == "reject":',
        'if asleep and self.config.sleep.while_asleep == "never":',
        "requests to a sleeping engine hang",
        ASLEEP_TESTS + "test_e10_reject_says_when_to_come_back",
    ),
    Mutant(
        "m12-a-failed-unmap-counts-as-awake",
        LIFECYCLE,
        "if missing or drain.origin is _S.ASLEEP:",
        "if drain.origin is _S.ASLEEP:",
        "an engine with half its memory serves",
        WAKE_TESTS + "test_m12_an_unmap_that_fails_half_way_counts_as_asleep",
    ),
    Mutant(
        "a-wake-hangs-silently",
        CORE,
        "            return self._lifecycle.tells_in_s\n",
        "            return None\n",
        "whoever waits for a wake that does not end never learns where it is",
        ASLEEP_TESTS + "test_an_idle_core_waits_and_a_busy_one_does_not",
    ),
    Mutant(
        "a-hang-is-told-without-its-place",
        LIFECYCLE_PARTS,
        "        self._thread = threading.get_ident()\n",
        "",
        "the log says that a wake takes long, which everybody knew",
        PLACEMENT_TESTS + "test_a_wake_that_does_not_end_says_where_it_is",
    ),
    Mutant(
        "a-shutdown-hangs-silently",
        LIFECYCLE_PARTS,
        "            self.tell(clock())\n",
        "            pass\n",
        "an engine that is shut down in a wake that hangs looks dead",
        PLACEMENT_TESTS + "test_a_shutdown_that_waits_for_a_wake_says_what_it_waits_for",
    ),
    Mutant(
        "anybodys-bytecode-is-run",
        BYTECODE,
        "        if not _is_private(folder):\n",
        "        if False:\n",
        "whoever may write to the cache runs code in the engine",
        BYTECODE_TESTS + "test_a_folder_that_others_may_write_to_is_not_believed",
    ),
    Mutant(
        "installed-bytecode-is-passed-over",
        BYTECODE,
        "if sys.pycache_prefix is not None or all(map(_has_bytecode, _LARGEST)):",
        "if sys.pycache_prefix is not None:",
        "the first start compiles everything once more, and the folder grows for nothing",
        BYTECODE_TESTS + "test_an_installation_that_has_its_own_is_left_alone",
    ),
)
