"""Owner, reader, worker, and who may talk to whom (P1-P5, the doors)."""

from __future__ import annotations

from mutants.mutant import Mutant

AUTH = "src/torpor/connectors/auth.py"
BASE = "src/torpor/connectors/base.py"
CHANNEL = "src/torpor/connectors/channel.py"
DOORS = "src/torpor/connectors/doors.py"
GUEST = "src/torpor/connectors/guest.py"
HANDSHAKE = "src/torpor/connectors/handshake.py"
IPC = "src/torpor/connectors/ipc.py"
LINK = "src/torpor/connectors/link.py"
OWNER = "src/torpor/connectors/owner.py"
PULLER = "src/torpor/connectors/puller.py"
READER = "src/torpor/connectors/reader.py"
WORKER = "src/torpor/connectors/worker.py"
CHANNEL_TESTS = "tests/unit/test_connectors_channel.py::"
DEVICE_TESTS = "tests/unit/test_connectors_device_memory.py::"
HANDSHAKE_TESTS = "tests/unit/test_connectors_handshake.py::"
HOSTILE_TESTS = "tests/unit/test_connectors_hostile.py::"
MEANWHILE = "tests/unit/test_connectors_meanwhile.py::"
PAIR_TESTS = "tests/unit/test_connectors_pair.py::"
PULLER_TESTS = "tests/unit/test_connectors_puller.py::"
REGISTRY_TESTS = "tests/unit/test_connectors_registry.py::"

MUTANTS = (
    Mutant(
        "p1-link-of-a-newer-epoch-is-kept",
        PULLER,
        "if link is None or link.epoch != load.epoch:\n            self._drop_link()",
        "if link is None or link.epoch.counter < load.epoch.counter:\n            self._drop_link()",
        "epochs compared with <",
        PULLER_TESTS + "test_p1_an_older_epoch_is_lost_after_one_fresh_handshake",
    ),
    Mutant(
        "p1-an-older-hand-off-is-read",
        PULLER,
        "        if link.epoch != load.epoch:\n            raise StaleEpochError(",
        "        if link.epoch.counter < load.epoch.counter:\n            raise StaleEpochError(",
        "epochs compared with <: blocks of another mapping are taken for those handed off",
        PULLER_TESTS + "test_p1_there_is_no_order_between_epochs",
    ),
    Mutant(
        "p1-the-epoch-stays-after-a-wake",
        WORKER,
        'raise StateError("register_kv_caches comes first", state="new")\n            begun = time.monotonic()\n'
        "            try:\n                self._publish(self._epoch.next())",
        'raise StateError("register_kv_caches comes first", state="new")\n            begun = time.monotonic()\n'
        "            try:\n                self._publish(self._epoch)",
        "a new mapping passes for the old one",
        PAIR_TESTS + "TestEpochs::test_p1_every_mapping_has_an_epoch_of_its_own[ipc]",
    ),
    Mutant(
        "p2-acknowledgement-not-awaited",
        OWNER,
        "        left = self._see_off(deadline)\n",
        "        left = [guest for guest in self.guests() if guest.ask_to_leave()]\n",
        "memory goes under a peer that still reads",
        PAIR_TESTS + "TestWithdrawal::test_p2_nothing_is_unmapped_while_a_peer_reads[ipc]",
    ),
    Mutant(
        "p2-peers-are-not-told",
        OWNER,
        "            guest.ask_to_leave()\n",
        "            pass\n",
        "no sleep ever ends while a peer is connected",
        PAIR_TESTS + "TestWithdrawal::test_p2_an_idle_peer_lets_go_at_once[ipc]",
    ),
    Mutant(
        "p2-acknowledged-before-the-read-has-ended",
        LINK,
        "        with self._uses.alone():\n            dropped = self._dropped()\n        if dropped:\n"
        "            self._channel.send(",
        "        dropped = True\n        if dropped:\n            self._channel.send(",
        "the owner unmaps what is being read",
        PAIR_TESTS + "TestWithdrawal::test_p2_nothing_is_unmapped_while_a_peer_reads[ipc]",
    ),
    Mutant(
        "p2-any-acknowledgement-counts",
        GUEST,
        "if message.epoch == str(self.epoch):",
        "if message.epoch:",
        "a late answer about the last epoch ends the wait for this one",
        HOSTILE_TESTS + "TestGarbageAtTheDoor::test_p1_a_withdrawal_acknowledged_for_another_epoch_is_none",
    ),
    Mutant(
        "p2-readers-are-let-in-while-others-leave",
        OWNER,
        "if self._state is not OwnerState.SERVING or self._epoch is None or self._publication is None:",
        "if self._epoch is None or self._publication is None:",
        "somebody imports memory that is about to go",
        PAIR_TESTS + "TestWithdrawal::test_p2_nobody_is_let_in_while_others_are_seen_off[ipc]",
    ),
    Mutant(
        "p2-silent-peers-are-not-named",
        OWNER,
        'names = ", ".join(str(guest) for guest in left)',
        'names = f"{len(left)} peers"',
        "nobody knows which engine to stop",
        PAIR_TESTS + "TestWithdrawal::test_p2_a_silent_peer_is_met_by_the_deadline_by_name[ipc]",
    ),
    Mutant(
        "p2-not-served-again-after-a-failed-release",
        WORKER,
        'error.fields["undo_failures"] = self._serve_again()',
        'error.fields["undo_failures"] = ()',
        "a sleep that failed leaves every peer locked out",
        PAIR_TESTS + "TestWithdrawal::test_p2_a_silent_peer_is_met_by_the_deadline_by_name[ipc]",
    ),
    Mutant(
        "p2-grants-never-end",
        GUEST,
        "        if to is GuestState.GONE:\n            self._end_grant()\n",
        "",
        "the report of a sleep names peers that left long ago",
        PAIR_TESTS + "TestWithdrawal::test_p2_an_idle_peer_lets_go_at_once[ipc]",
    ),
    Mutant(
        "p2-a-sleeping-reader-keeps-its-imports",
        WORKER,
        "            self._live_reader.release(deadline)\n",
        "",
        "an engine that sleeps holds the memory of others",
        PAIR_TESTS + "TestWithdrawal::test_a_reader_that_sleeps_holds_nothing_of_others[ipc]",
    ),
    Mutant(
        "p5-arrived-before-the-sleep-counts-after-it",
        READER,
        "            self._failed |= self._done\n            self._done = set()\n",
        "            pass\n",
        "KV that went with the memory is taken for loaded",
        PAIR_TESTS + "TestWithdrawal::test_what_arrived_but_was_not_taken_note_of_goes_with_a_sleep[ipc]",
    ),
    Mutant(
        "p4-guard-not-asked-for",
        "src/torpor/engine/worker.py",
        "guarded=self._kv_guarded)",
        "guarded=False)",
        "a late read kills the owner",
        "tests/unit/test_runner_worker.py::test_the_kv_cache_can_be_exported_exactly_when_there_is_a_connector",
    ),
    Mutant(
        "p4-the-agent-stays-where-there-is-no-guard",
        "src/torpor/connectors/nixl.py",
        "        if self._unguarded:\n",
        "        if False:\n",
        "a late read of device memory kills the owner",
        DEVICE_TESTS + "test_p4_where_there_is_no_guard_a_late_read_finds_no_agent",
    ),
    Mutant(
        "p2-a-lost-peer-is-not-looked-for-on-a-gpu",
        IPC,
        "else (self._fence.fd,)",
        "else ()",
        "device memory goes while a peer that lost its connection still has it",
        DEVICE_TESTS + "test_p2_of_device_memory_the_fence_tells_whether_a_peer_still_has_it",
    ),
    Mutant(
        "p2-the-fence-is-dropped-before-the-import",
        IPC,
        "        if not self._imports:\n            self._fence.close()\n",
        "        self._fence.close()\n",
        "the owner believes that a reader let go whose driver did not",
        DEVICE_TESTS + "test_the_fence_goes_after_the_last_import",
    ),
    Mutant(
        "p3-handed-off-before-it-is-written",
        WORKER,
        "            self._settle()\n",
        "            pass\n",
        "a reader gets KV that the GPU has not computed yet",
        DEVICE_TESTS + "test_a_hand_off_is_granted_after_the_device_has_settled",
    ),
    Mutant(
        "p5-a-cancelled-load-still-writes",
        "src/torpor/connectors/loads.py",
        "return self._failing or self.state in ENDED",
        "return self.state is LoadState.DONE",
        "bytes land in blocks that belong to somebody else",
        PAIR_TESTS + "TestCancelling::test_p5_a_cancelled_load_is_reported_when_nothing_writes_any_more[ipc]",
    ),
    Mutant(
        "p5-who-waits-behind-a-dead-peer-waits-on",
        PULLER,
        '            self._fail_queued(f"{type(error).__name__}: {error}")\n',
        "            self._turns.take_waiting()\n",
        "requests hang behind a peer that is gone",
        PULLER_TESTS + "test_whoever_waits_behind_a_peer_that_cannot_be_reached_hears_it_too",
    ),
    Mutant(
        "door-with-a-full-queue-refuses-at-once",
        DOORS,
        "            if time.monotonic() >= deadline:\n",
        "            if deadline:\n",
        "whoever knocks a thousand times keeps every reader out",
        HANDSHAKE_TESTS + "TestUnixDoor::test_a_queue_that_is_full_is_waited_for",
    ),
    Mutant(
        "door-uid-check-removed",
        DOORS,
        "if credentials.uid != os.geteuid():",
        "if credentials.uid < 0:",
        "another user of the machine gets the descriptors of the KV cache",
        HANDSHAKE_TESTS + "TestUnixDoor::test_another_user_is_turned_away_before_a_byte_is_sent",
    ),
    Mutant(
        "door-reader-does-not-check-the-owner",
        DOORS,
        "        check(peer_credentials(sock))\n",
        "",
        "a reader takes KV from another user's socket",
        HANDSHAKE_TESTS + "TestUnixDoor::test_the_reader_checks_the_owner_too",
    ),
    Mutant(
        "door-socket-open-to-all",
        DOORS,
        "        path.chmod(0o600)\n",
        "        path.chmod(0o666)\n",
        "everybody may knock",
        HANDSHAKE_TESTS + "TestUnixDoor::test_it_is_for_this_user_alone",
    ),
    Mutant(
        "secret-proof-of-the-reader-not-checked",
        HANDSHAKE,
        'if not auth.proves(proof.mac, secret, "reader", digest):',
        "if len(proof.mac) != wire.MAC_BYTES:",
        "whoever reaches the port reads the KV cache",
        HANDSHAKE_TESTS + "test_another_secret_is_refused_by_the_name_of_the_setting",
    ),
    Mutant(
        "secret-proof-of-the-owner-not-checked",
        HANDSHAKE,
        'if not auth.proves(accept.mac, secret, "owner", digest):',
        "if len(accept.mac) != wire.MAC_BYTES:",
        "KV of an impostor is believed",
        HANDSHAKE_TESTS + "test_an_owner_that_does_not_prove_the_secret_is_left",
    ),
    Mutant(
        "secret-both-roles-prove-the-same",
        AUTH,
        'b"torpor control 1 " + role.encode() + transcript',
        'b"torpor control 1 " + transcript',
        "a proof sent back is a proof",
        HANDSHAKE_TESTS + "test_a_proof_sent_back_is_no_proof",
    ),
    Mutant(
        "frame-mac-not-checked",
        CHANNEL,
        "if not hmac.compare_digest(mac, auth.frame_mac(self._receive_key, self._received, payload)):",
        "if len(mac) != wire.MAC_BYTES:",
        "somebody on the wire acknowledges withdrawals",
        CHANNEL_TESTS + "TestSigned::test_a_frame_cannot_be_repeated_changed_or_sent_back[changed]",
    ),
    Mutant(
        "frame-mac-without-its-place",
        AUTH,
        'return hmac.digest(key, sequence.to_bytes(8, "big") + payload, "sha256")',
        'return hmac.digest(key, payload, "sha256")',
        "a recorded frame can be sent again",
        CHANNEL_TESTS + "TestSigned::test_a_frame_cannot_be_repeated_changed_or_sent_back[twice]",
    ),
    Mutant(
        "frame-limit-removed",
        CHANNEL,
        "if not 0 < length <= self._max_frame_bytes:",
        "if not 0 < length:",
        "four bytes make an engine allocate 4 GiB",
        CHANNEL_TESTS + "test_an_oversized_frame_is_refused_before_it_is_read",
    ),
    Mutant(
        "support-is-assumed",
        BASE,
        "supports_sleep_mode: ClassVar[bool] = False",
        "supports_sleep_mode: ClassVar[bool] = True",
        "a connector whose author never thought of it is taken to follow a sleep",
        REGISTRY_TESTS + "TestNames::test_support_is_declared_and_not_assumed",
    ),
    Mutant(
        "p5-a-handshake-outlives-a-release",
        PULLER,
        "if asked == self._stops and self._admits",
        "if self._admits",
        "an engine with new weights reads KV of the old ones",
        MEANWHILE + "test_p5_a_handshake_from_before_an_update_of_the_weights_serves_nothing_after_it",
    ),
    Mutant(
        "p2-an-owner-that-serves-is-told-to-serve-again",
        WORKER,
        "self._owner.state is OwnerState.SERVING:",
        "self._owner.state is OwnerState.CLOSED:",
        "after a release that failed an engine is served to nobody, until it sleeps",
        MEANWHILE + "test_p2_a_release_that_fails_at_the_reader_s_end_leaves_the_owner_serving",
    ),
    Mutant(
        "a-missing-thread-ends-the-engine",
        READER,
        "        except RuntimeError as error:",
        "        except KeyError as error:",
        "a load where the system is out of threads ends the engine",
        MEANWHILE + "test_p5_without_a_thread_for_a_peer_a_load_fails_and_the_engine_goes_on",
    ),
    Mutant(
        "p2-who-cannot-be-looked-at-is-gone",
        DOORS,
        "            raise\n        return None\n",
        "            return None\n        return None\n",
        "an owner that is out of descriptors unmaps under its readers",
        DEVICE_TESTS + "test_p2_of_device_memory_the_fence_tells_whether_a_peer_still_has_it",
    ),
)
