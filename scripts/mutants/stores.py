"""Connectors that keep KV themselves: what is served is right or nothing, and sleeps wait for copies."""

from __future__ import annotations

from mutants.mutant import Mutant

DISK = "src/torpor/connectors/offload_disk.py"
HOST = "src/torpor/connectors/offload_host.py"
MOVER = "src/torpor/connectors/mover.py"
OFFLOAD = "src/torpor/connectors/offload.py"
NAMES = "src/torpor/connectors/store_names.py"
STORE = "src/torpor/connectors/store.py"
WORKER = "src/torpor/connectors/store_worker.py"
OFFLOAD_TESTS = "tests/unit/test_connectors_offload.py::"
DISK_TESTS = "tests/unit/test_connectors_offload_disk.py::"

MUTANTS = (
    Mutant(
        "store-release-does-not-wait",
        WORKER,
        "if not mover.wait_idle(time.monotonic() + self._config.withdraw_timeout_s):",
        "if False:",
        "memory goes under a copy that still reads it",
        OFFLOAD_TESTS + "TestSleeping::test_nothing_is_unmapped_while_a_copy_reads",
        crash=True,
    ),
    Mutant(
        "store-release-forgets-the-desk",
        WORKER,
        "        mover.cancel_loads()\n        self._keep(self._store.take_orders())\n        if not",
        "        mover.cancel_loads()\n        if not",
        "what ended just before the sleep is not kept",
        OFFLOAD_TESTS + "TestKeeping::test_a_request_that_ends_as_the_sleep_begins_is_kept",
    ),
    Mutant(
        "store-old-orders-are-copied",
        WORKER,
        "if self._registered and order.epoch == str(self._epoch):",
        "if self._registered:",
        "blocks of another mapping are kept under a prompt that is not theirs",
        OFFLOAD_TESTS + "TestSleeping::test_p1_what_was_ordered_before_a_sleep_is_not_copied_after_it",
    ),
    Mutant(
        "store-names-without-the-weights",
        NAMES,
        "told = json.dumps([version, *layout]).encode()",
        "told = json.dumps([*layout]).encode()",
        "KV of other weights is found and served (E6)",
        DISK_TESTS + "TestEngines::test_e6_an_engine_with_other_weights_finds_nothing",
    ),
    Mutant(
        "store-names-without-the-layout",
        NAMES,
        "told = json.dumps([version, *layout]).encode()",
        "told = json.dumps([version]).encode()",
        "bytes of another layout are taken for KV",
        DISK_TESTS + "test_every_field_of_the_layout_is_in_the_names",
    ),
    Mutant(
        "store-an-update-leaves-the-old",
        STORE,
        "    def set_weights_version(self, version: str) -> None:\n        self._store.set_version(version)",
        "    def set_weights_version(self, version: str) -> None:\n        return",
        "after an update old KV is served (E6)",
        OFFLOAD_TESTS + "TestWeights::test_e6_other_weights_find_nothing",
    ),
    Mutant(
        "store-late-orders-pass-for-the-new-weights",
        OFFLOAD,
        "            if version == self.version:\n                self._host.fill(name)",
        "            if True:\n                self._host.fill(name)",
        "KV computed with the old weights gets a name of the new ones",
        OFFLOAD_TESTS + "TestWeights::test_e6_kv_that_was_ordered_with_older_weights_is_not_kept",
    ),
    Mutant(
        "store-the-whole-prompt-is-loaded",
        STORE,
        "full = self._full_blocks(len(request.prompt_token_ids) - 1)",
        "full = self._full_blocks(len(request.prompt_token_ids))",
        "nothing is left to compute: the token to sample from",
        OFFLOAD_TESTS + "TestKeeping::test_the_last_token_is_always_computed",
    ),
    Mutant(
        "store-the-beginning-goes-first",
        HOST,
        "            for name in reversed(names):\n                if name in self._entries:",
        "            for name in names:\n                if name in self._entries:",
        "what is left of a text is of no use",
        OFFLOAD_TESTS + "TestRoom::test_the_block_unused_for_longest_is_given_up",
    ),
    Mutant(
        "store-blocks-in-use-are-given-up",
        HOST,
        "oldest = next((name for name, entry in self._entries.items() if not entry.users), None)",
        "oldest = next((name for name, entry in self._entries.items()), None)",
        "a slot is overwritten while somebody reads it",
        OFFLOAD_TESTS + "TestRoom::test_of_a_prompt_that_does_not_fit_the_beginning_is_kept",
    ),
    Mutant(
        "store-a-digest-is-not-checked",
        DISK,
        "if len(found) != self.file_bytes or found[:HEADER_BYTES] != _header(name, content):",
        "if len(found) != self.file_bytes:",
        "a damaged file becomes KV",
        DISK_TESTS + "TestDamage::test_it_is_a_miss[flip_84]",
    ),
    Mutant(
        "store-the-folder-is-shared",
        DISK,
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "two engines evict each other's files and both caps are wrong",
        DISK_TESTS + "TestFiles::test_two_engines_cannot_have_one_folder",
    ),
    Mutant(
        "store-a-full-disk-ends-the-writer",
        DISK,
        '            self._failed("write", part, error)\n            return False',
        '            self._failed("write", part, error)\n            raise',
        "the failure is told for every block, and counted by nobody who reads the log",
        DISK_TESTS + "TestAFailingDisk::test_it_is_counted_and_told_once_and_tried_again[28]",
    ),
    Mutant(
        "store-half-written-files-stay",
        DISK,
        "            with contextlib.suppress(OSError):\n                part.unlink()\n",
        "",
        "a full disk stays full of halves",
        DISK_TESTS + "TestAFailingDisk::test_it_is_counted_and_told_once_and_tried_again[28]",
    ),
    Mutant(
        "store-a-cancelled-load-is-reported-at-once",
        MOVER,
        "            self._unwanted |= running\n",
        "            self._unwanted |= running\n            if running:\n                self._lost.add(request_id)\n",
        "blocks are given away while a copy writes to them",
        OFFLOAD_TESTS + "TestSleeping::test_a_load_that_is_cancelled_writes_nothing_more",
    ),
    Mutant(
        "store-keeps-after-its-end",
        MOVER,
        "            if not self._closed:  # else",
        "            if True:  # else",
        "a copy goes into freed memory",
        OFFLOAD_TESTS + "test_nothing_is_kept_in_a_buffer_that_was_given_back_at_the_end",
    ),
    Mutant(
        "disk-waits-for-its-folder",
        DISK,
        "            self._present.mkdir(mode=0o700, exist_ok=True)  # ",
        "            pass  # ",
        "a disk that was away for a moment is not used until the next start",
        DISK_TESTS + "TestEngines::test_a_disk_that_was_away_during_an_update_is_used_when_it_is_back",
    ),
)
