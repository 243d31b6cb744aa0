"""Registrations: what NIXL and UCX are told, what is remembered of it, and what the kernel says (P2, P4a, E4)."""

from __future__ import annotations

from mutants.mutant import Mutant

AGENT = "src/torpor/connectors/nixl_agent.py"
LEASES = "src/torpor/connectors/leases.py"
NIXL = "src/torpor/connectors/nixl.py"
PINS = "src/torpor/connectors/pins.py"
READS = "src/torpor/connectors/nixl_reads.py"
REGISTRATIONS = "src/torpor/connectors/nixl_registrations.py"
SETTINGS = "src/torpor/connectors/nixl_settings.py"
SLEEP = "src/torpor/memory/sleep.py"
STAGED = "src/torpor/connectors/staged.py"
WIRE = "src/torpor/connectors/wire.py"
WORKER = "src/torpor/connectors/worker.py"
HOLDER_TESTS = "tests/unit/test_memory_holders.py::"
NIXL_TESTS = "tests/unit/test_connectors_nixl.py::"
PIN_TESTS = "tests/unit/test_connectors_registry.py::TestPins::"
VM_TESTS = "tests/unit/test_rdma_vm.py::"

MUTANTS = (
    Mutant(
        "p4a-pins-not-looked-at",
        WORKER,
        "        with self._pins.deregistering():\n            let_go()\n",
        "        let_go()\n",
        "a transport's cache keeps the memory that a sleep says is free",
        PIN_TESTS + "test_p4a_a_registration_that_stays_stops_the_sleep",
    ),
    Mutant(
        "p4a-pins-not-waited-for",
        PINS,
        "and time.monotonic() < deadline:",
        "and time.monotonic() > deadline:",
        "a driver that unpins a moment later stops every sleep",
        PIN_TESTS + "test_p4a_what_goes_a_moment_later_is_waited_for",
    ),
    Mutant(
        "p4a-the-transports-own-pins-asked-back",
        PINS,
        "found = min(nbytes, max(0, ",
        "found = max(0, max(0, ",
        "over RDMA no engine ever sleeps: UCX keeps 20 MiB of its own",
        PIN_TESTS + "test_p4a_what_the_transport_pins_for_itself_is_not_asked_back",
    ),
    Mutant(
        "p4a-a-growth-taken-for-a-registration",
        PINS,
        "whole and not self._held and found < nbytes",
        "False",
        "over TCP a sleep is refused because the transport's own memory has grown",
        PIN_TESTS + "test_p4a_a_transport_that_pins_nothing_owes_nothing",
    ),
    Mutant(
        "p4a-pins-of-a-failed-release-forgotten",
        PINS,
        "self._held + self._pinned() - before)",
        "self._pinned() - before)",
        "the second sleep unmaps what the registration cache still has",
        PIN_TESTS + "test_p4a_what_a_failed_release_left_is_asked_back_once",
    ),
    Mutant(
        "m11-what-a-reader-pins-is-its-cache",
        WORKER,
        "            elif self._transport.stages:\n",
        "            elif not self._transport.stages:\n",
        "over RDMA a reader that sleeps in the middle of a read is told that its memory did not come back",
        NIXL_TESTS + "test_m11_what_a_reader_pins_beside_its_cache_is_held_of_nobody",
        needs="nixl_cu13",
    ),
    Mutant(
        "m11-explained-pins-count-for-the-next-sleep",
        SLEEP,
        "            self._shared.explained_pins = 0\n",
        "            pass\n",
        "what somebody pinned of the KV cache since then is reported as free",
        HOLDER_TESTS + "test_m11_what_a_hook_explains_is_no_memory_of_the_pool",
    ),
    Mutant(
        "m11-explained-pins-not-asked",
        SLEEP,
        "pinned_at_map=max(traces.pinned_at_map, explained_pins)",
        "pinned_at_map=traces.pinned_at_map",
        "over RDMA every sleep reports that nothing came back",
        HOLDER_TESTS + "test_m11_what_a_hook_explains_is_no_memory_of_the_pool",
    ),
    Mutant(
        "p4a-a-half-made-registration-stays",
        REGISTRATIONS,
        "            with contextlib.suppress(TransportError):\n                self.drop()\n            raise\n",
        "            raise\n",
        "after a failed wake NIXL has ranges that nobody knows of",
        NIXL_TESTS + "TestRegistrations::test_p4a_a_range_that_fails_takes_those_before_it_back",
    ),
    Mutant(
        "p4a-the-first-refusal-ends-the-release",
        REGISTRATIONS,
        "                left.insert(0, registered)\n",
        "                left.insert(0, registered)\n                break\n",
        "one range that NIXL refuses keeps all the others pinned, and forgets them",
        NIXL_TESTS + "TestRegistrations::test_p4a_one_that_is_refused_keeps_no_other",
    ),
    Mutant(
        "p4a-what-is-left-is-forgotten",
        REGISTRATIONS,
        "        self._made = left\n",
        "        self._made = []\n",
        "the next sleep unmaps under a registration",
        NIXL_TESTS + "TestRegistrations::test_p4a_what_cannot_be_taken_back_is_remembered_and_tried_again",
    ),
    Mutant(
        "p2-the-owners-agent-is-not-forgotten",
        READS,
        "        self.agent.remove_remote(self._peer)\n",
        "",
        "a reader that has let go can still address the owner's memory",
        NIXL_TESTS + "test_p2_a_withdrawal_forgets_the_owner_s_agent_and_a_wake_makes_new_lists",
    ),
    Mutant(
        "p2-a-step-that-failed-is-not-tried-again",
        READS,
        "                return False\n            self._undo.popleft()\n",
        "                pass\n            self._undo.popleft()\n",
        "a buffer stays registered, and its pages pinned, for ever",
        NIXL_TESTS + "test_p2_a_buffer_that_nixl_does_not_let_go_keeps_no_owner_waiting",
    ),
    Mutant(
        "p2-attached-counts-as-detached",
        READS,
        "return self._peer is None and (",
        "return (",
        "an owner is told that its reader let go, and it did not",
        NIXL_TESTS + "test_p2_a_peer_that_cannot_be_forgotten_is_not_acknowledged",
    ),
    Mutant(
        "p2-a-spare-buffer-outlives-its-engine",
        STAGED,
        "[*self._set_aside, *([self._spare] if self._spare is not None else [])]",
        "[*self._set_aside]",
        "an engine that ended keeps its buffer registered, and an agent with it",
        NIXL_TESTS + "test_p2_an_end_gives_up_the_spare_buffer_too",
    ),
    Mutant(
        "p2-a-refused-offer-keeps-its-buffer",
        STAGED,
        "        except BaseException:\n            self._dispose(station)\n            raise\n",
        "        except ZeroDivisionError:\n            self._dispose(station)\n            raise\n",
        "every peer that sends nonsense costs a buffer of the reader's",
        NIXL_TESTS + "test_p2_an_offer_that_is_none_costs_no_buffer",
    ),
    Mutant(
        "nixl-a-wrong-setting-is-a-riddle",
        SETTINGS,
        "    if not any(map(_WRONG.search, said)):\n",
        "    if said:\n",
        "a typing error in ucx_tls ends the engine with NIXL_ERR_BACKEND",
        NIXL_TESTS + "TestSettings::test_a_transport_that_is_not_there_lists_those_that_are",
        needs="nixl_cu13",
    ),
    Mutant(
        "nixl-every-failure-is-a-setting",
        SETTINGS,
        "    if not any(map(_WRONG.search, said)):\n",
        "    if not said:\n",
        "who is short of memory is sent to look for a typing error",
        NIXL_TESTS + "TestSettings::test_other_failures_are_the_transports",
        needs="nixl_cu13",
    ),
    Mutant(
        "nixl-the-wrong-setting-is-named",
        SETTINGS,
        "    if named:\n",
        "    if False:\n",
        "a variable of the environment is wrong, and the message says ucx_tls or UCX_TLS",
        NIXL_TESTS + "TestSettings::test_a_variable_of_the_environment_is_named",
        needs="nixl_cu13",
    ),
    Mutant(
        "nixl-a-comma-ends-the-setting",
        SETTINGS,
        '    if tls is not None and "," in tls:\n',
        "    if tls is not None and not tls:\n",
        "of several transports all but the first are dropped in silence",
        NIXL_TESTS + "TestSettings::test_several_transports_are_refused",
        needs="nixl_cu13",
    ),
    Mutant(
        "notices-pile-up",
        NIXL,
        "        notices = self._agent.take_notices()\n",
        "        notices: list[bytes] = []\n",
        "a peer can fill the owner's memory",
        NIXL_TESTS + "test_notices_of_no_meaning_are_thrown_away",
    ),
    Mutant(
        "p5-any-notice-ends-a-lease",
        LEASES,
        "if lease is not None and lease.word == word and not lease.arrived:",
        "if lease is not None and not lease.arrived:",
        "a peer that was told nothing ends other readers' leases",
        NIXL_TESTS + "test_p5_blocks_of_a_reader_that_died_after_its_read_are_free_before_the_lease_ends",
    ),
    Mutant(
        "p5-a-repeated-notice-prolongs-a-lease",
        LEASES,
        "lease.word == word and not lease.arrived:",
        "lease.word == word:",
        "a peer keeps the owner's blocks for the whole lease",
        NIXL_TESTS + "test_p5_blocks_of_a_reader_that_died_after_its_read_are_free_before_the_lease_ends",
        also=(("min(lease.deadline, self._clock() + CONFIRM_S)", "self._clock() + CONFIRM_S"),),
    ),
    Mutant(
        "notices-without-their-mark",
        WIRE,
        "if mark == _NOTICE_MARK else None",
        "if mark else None",
        "what another version of a peer sends is taken for ours",
        NIXL_TESTS + "test_other_notices_are_none_of_ours",
    ),
    Mutant(
        "e4-any-backend-sleeps",
        NIXL,
        "return cls if _options(config).backend == UCX else _AwakeOnly",
        "return cls",
        "an engine sleeps under a backend whose registrations nobody has seen to go",
        NIXL_TESTS + "test_e4_other_backends_than_ucx_do_not_sleep",
    ),
    Mutant(
        "p4a-the-list-of-ranges-in-one-call",
        NIXL,
        "self._registrations.add(list(zip(self._geometry.bases, self._geometry.sizes, strict=True)))",
        "self._registrations.add([(a, self._geometry.spec.layer_bytes // 2) for a in self._geometry.arrays()])",
        "a registration per tensor: hundreds of regions in the network card",
        NIXL_TESTS + "test_one_registration_per_region_not_per_tensor",
    ),
    Mutant(
        "rdma-vm-a-signed-module",
        "scripts/rdma_vm/kernel.py",
        "return module[: end - SIGNATURE_INFO_BYTES - length]",
        "return module[: end - length]",
        "the machine's kernel is given modules with half a signature",
        VM_TESTS + "test_a_signature_is_cut_off",
    ),
    Mutant(
        "rdma-vm-dependencies-after",
        "scripts/rdma_vm/kernel.py",
        "        for dependency in dependencies(module):\n            visit(dependency)\n",
        "",
        "the machine cannot load its drivers",
        VM_TESTS + "test_dependencies_are_loaded_first",
    ),
)
