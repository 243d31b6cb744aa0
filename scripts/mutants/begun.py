"""Reads that begin on the engine's thread, and block copies that are begun and awaited apart (P2, P3, P5)."""

from __future__ import annotations

from mutants.mutant import NATIVE, NATIVE_CUDA, Mutant

IPC = "src/torpor/connectors/ipc.py"
LINK = "src/torpor/connectors/link.py"
PULLER = "src/torpor/connectors/puller.py"
BEGUN_TESTS = "tests/unit/test_connectors_begun.py::"

MUTANTS = (
    Mutant(
        "p3-begun-before-the-hand-off-has-come",
        LINK,
        "\n                and heard(self._remote.look(load.lease)[0], self.epoch, load.lease) is Verdict.VALID",
        "",
        "blocks are read before they are written",
        BEGUN_TESTS + "test_a_hand_off_that_has_not_come_is_awaited_by_the_puller",
    ),
    Mutant(
        "p2-a-begun-read-does-not-hold-the-import",
        LINK,
        "            if self._begun is None:\n                self._using.release()\n",
        "            self._using.release()\n",
        "the import is dropped, and the owner told so, while the device reads through it",
        BEGUN_TESTS + "test_p2_an_owner_s_sleep_waits_for_what_the_device_copies",
        crash=True,
        also=(("                held.callback(self._using.release)\n", "                held.callback(lambda: None)\n"),),
    ),
    Mutant(
        "p3-a-begun-read-is-not-checked",
        LINK,
        "                moved = begun.finish()\n            else:",
        "                self.bytes += begun.finish()\n                return\n            else:",
        "blocks that were freed and used again during the read are believed",
        BEGUN_TESTS + "test_p3_a_lease_that_expires_while_the_device_copies_yields_nothing",
    ),
    Mutant(
        "p5-a-cancelled-load-goes-on",
        LINK,
        "stop=lambda: self._stopping.is_set() or load.unwanted,",
        "stop=self._stopping.is_set,",
        "blocks are given away while the rest of a cancelled load is still copied into them",
        BEGUN_TESTS + "test_p5_a_cancelled_load_is_reported_when_the_device_has_stopped",
    ),
    Mutant(
        "p5-a-begun-read-does-not-count-as-a-write",
        IPC,
        "            writing.enter_context(request.writing())\n",
        "",
        "a cancelled load is reported while the device writes to its blocks",
        BEGUN_TESTS + "test_p5_a_cancelled_load_is_reported_when_the_device_has_stopped",
    ),
    Mutant(
        "p5-a-begun-read-reaches-outside-the-cache",
        IPC,
        "begin_copy_blocks(*piece, limits=self._limits)",
        "begin_copy_blocks(*piece)",
        "a forged request has other memory of the peer copied into the cache",
        BEGUN_TESTS + "test_p5_blocks_outside_the_cache_are_not_begun",
    ),
    Mutant(
        "begun-read-only-its-first-piece",
        IPC,
        "                following = flying.enter_context(self._remote.begin_copy(piece))\n",
        "                following = last\n                del piece\n",
        "the rest of a large load is whatever was in its blocks",
        BEGUN_TESTS + "test_all_pieces_of_a_large_load_arrive",
    ),
    Mutant(
        "begun-read-waits-with-nothing-to-do",
        IPC,
        "            self._request.meanwhile()\n",
        "",
        "a tenth of a millisecond of every load goes by after its last byte",
        BEGUN_TESTS + "test_the_lease_s_word_is_computed_by_whoever_waits_for_the_copy",
    ),
    Mutant(
        "p1-begun-in-another-epoch",
        PULLER,
        " or link.epoch != load.epoch or load.only_tells:\n            return False",
        " or load.only_tells:\n            return False",
        "an old reference is read over a new link",
        BEGUN_TESTS + "test_p1_a_load_of_another_epoch_is_not_begun",
    ),
    Mutant(
        "nothing-is-ever-begun",
        PULLER,
        "                if not self._begin_at_once(load):\n                    self._queue.append(load)\n",
        "                self._queue.append(load)\n",
        "every load waits until the engine's thread lets go of the interpreter",
        BEGUN_TESTS + "test_a_read_begins_on_the_engine_s_thread_and_ends_on_the_puller_s",
    ),
    Mutant(
        "native-memory-goes-while-blocks-are-copied",
        "csrc/src/device.cpp",
        "  pin_blocks(copy->pins, blocks.src,",
        "  AccessTable::Pins brief(access);\n  pin_blocks(brief, blocks.src,",
        "pages are unmapped under a copy",
        NATIVE + "threads_memory_stays_while_blocks_are_copied",
    ),
    Mutant(
        "native-block-limits-not-looked-at",
        "csrc/src/device.cpp",
        "if (*high >= std::min(limit, UINT64_MAX / blocks.block_bytes)) {",
        "if (*high >= UINT64_MAX / blocks.block_bytes) {",
        "a block id that the caller says is none is copied",
        NATIVE + "copy_of_many_spans_and_blocks",
    ),
    Mutant(
        "native-device-closed-under-a-copy",
        "csrc/src/device.cpp",
        '  if (counters.block_copies > 0) throw Error::state("blocks are still being copied on the device");\n',
        "",
        "a copy ends on a device that is gone",
        NATIVE + "a_device_is_not_closed_while_blocks_are_copied",
        crash=True,
    ),
    Mutant(
        "native-last-piece-of-a-block-too-long",
        "csrc/src/cuda_kernels.cu",
        "left < kMovedBytes ? static_cast<u32>(left) : kMovedBytes",
        "left < kMovedBytes ? kMovedBytes : kMovedBytes",
        "the block behind is overwritten",
        NATIVE_CUDA + "copy_of_blocks_of_many_arrays",
        crash=True,
    ),
    Mutant(
        "native-small-blocks-are-moved-by-nobody",
        "csrc/src/cuda_kernels.cpp",
        "parts(items * parts(list.block_bytes, kMovedBytes), kMovers)",
        "items * (list.block_bytes / kMovedBytes) / kMovers",
        "a launch of no block of threads: a load of few blocks fails",
        NATIVE_CUDA + "copy_of_blocks_of_many_arrays",
    ),
)
