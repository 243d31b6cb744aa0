"""``mooncake``: what is registered, what is believed, and what is handed on."""

from __future__ import annotations

from mutants.mutant import Mutant

ENGINE = "src/torpor/connectors/mooncake_engine.py"
MOONCAKE = "src/torpor/connectors/mooncake.py"
READS = "src/torpor/connectors/mooncake_reads.py"
STAGED = "src/torpor/connectors/staged.py"
TESTS = "tests/unit/test_connectors_mooncake.py::"

MUTANTS = (
    Mutant(
        "mooncake-regions-stay-registered",
        MOONCAKE,
        "        while self._published:\n            self._live_engine.unregister(self._published[-1])\n"
        "            self._published.pop()",
        "        self._published.clear()",
        "memory goes under a registration (P2)",
        TESTS + "TestEngines::test_p2_the_regions_are_registered_exactly_while_they_are_mapped",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-a-failed-unregister-is-forgotten",
        MOONCAKE,
        "            self._live_engine.unregister(self._published[-1])\n            self._published.pop()",
        "            address = self._published.pop()\n            self._live_engine.unregister(address)",
        "the next sleep unmaps under a registration that is still there",
        TESTS + "TestEngines::test_an_unregister_that_fails_is_remembered",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-rdma-becomes-tcp-in-silence",
        ENGINE,
        "    if missing or not present:\n",
        "    if missing:\n",
        "the user believes in RDMA",
        TESTS + "TestSettings::test_rdma_without_a_device_is_refused_and_not_tcp_in_silence",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-return-codes-are-not-looked-at",
        ENGINE,
        "    if code != 0:\n",
        "    if code > 0:\n",
        "a failed read counts as bytes",
        TESTS + "TestEngines::test_what_mooncake_refuses_is_an_error_with_its_code",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-a-flight-is-cut-short",
        STAGED,
        "        if self.flight is not None and self.flight.in_flight:\n            return False\n",
        "",
        "a buffer is given to the next peer while bytes still land in it",
        TESTS + "TestReads::test_one_that_does_not_end_is_set_aside_and_its_bytes_go_nowhere",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-neighbours-of-the-wrong-kind",
        READS,
        "firsts = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] + np.uint64(7)) != 1)",
        "firsts = np.array([0])",
        "blocks that do not lie side by side are read as if they did",
        TESTS + "TestReads::test_neighbours_go_in_one_slice[blocks1]",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-any-protocol-will-do",
        READS,
        "    if handle.protocol != protocol:\n",
        "    if False:\n",
        "engines that cannot reach each other find it out one load at a time",
        TESTS + "TestMetadata::test_what_is_no_handle_is_refused",
        needs="mooncake",
    ),
    Mutant(
        "mooncake-what-is-not-given-up-is-forgotten",
        READS,
        "                return False\n            self.engine = None\n",
        "                self.engine = None\n                raise\n            self.engine = None\n",
        "buffers with a read in flight are forgotten with it, and bytes land in freed memory",
        TESTS + "TestEngines::test_p2_a_reader_s_buffer_that_cannot_be_given_up_waits_beside_one_with_a_read_in_flight",
        needs="mooncake",
    ),
)
