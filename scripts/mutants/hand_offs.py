"""Fence, leases, loads and their parameters (P1, P3, P5)."""

from __future__ import annotations

from mutants.mutant import Mutant

FENCE = "src/torpor/connectors/fence.py"
GEOMETRY = "src/torpor/connectors/geometry.py"
LEASES = "src/torpor/connectors/leases.py"
LINK = "src/torpor/connectors/link.py"
LOADS = "src/torpor/connectors/loads.py"
PULLER = "src/torpor/connectors/puller.py"
TURNS = "src/torpor/connectors/turns.py"
SCHEDULER = "src/torpor/connectors/scheduler.py"
FENCE_TESTS = "tests/unit/test_connectors_fence.py::"
HOSTILE_TESTS = "tests/unit/test_connectors_hostile.py::"
PAIR_TESTS = "tests/unit/test_connectors_pair.py::"
PULLER_TESTS = "tests/unit/test_connectors_puller.py::"
SCHEDULER_TESTS = "tests/unit/test_connectors_scheduler.py::"

MUTANTS = (
    Mutant(
        "p1-fence-epoch-compared-with-less",
        FENCE,
        "if header[_COUNTER] != epoch.counter:",
        "if header[_COUNTER] < epoch.counter:",
        "bytes of a newer mapping pass for the blocks handed off",
        FENCE_TESTS + "TestVerdicts::test_p1_only_the_same_epoch_counts",
    ),
    Mutant(
        "p1-boot-id-ignored",
        FENCE,
        "if header[_BOOT] != int(epoch.boot, 16):",
        "if header[_BOOT] == 0:",
        "a restarted engine passes for the one before it",
        FENCE_TESTS + "TestVerdicts::test_p1_only_the_same_epoch_counts",
    ),
    Mutant(
        "p3-recheck-after-the-read-removed",
        LINK,
        "lambda: self._confirm(load))\n            self._confirm(load)\n",
        "lambda: self._confirm(load))\n",
        "blocks that were freed and used again during the read are believed",
        PAIR_TESTS + "TestTheCheckAfterTheRead::test_p3_a_lease_that_expires_during_the_read_yields_nothing[ipc]",
    ),
    Mutant(
        "p2-a-killed-owner-s-words-are-believed",
        LINK,
        "if self._channel.hung_up():",
        "if not self.epoch:",
        "a lease outlives its engine",
        PAIR_TESTS + "TestTheCheckAfterTheRead::test_p2_an_owner_that_goes_during_the_read_ends_its_leases[ipc]",
    ),
    Mutant(
        "p3-checked-before-the-read",
        LINK,
        "                moved = self._remote.read(self._request(",
        "                self._confirm(load)\n                moved = self._remote.read(self._request(",
        "the answer is older than the bytes",
        PAIR_TESTS + "TestTheCheckAfterTheRead::test_p3_a_lease_that_expires_during_the_read_yields_nothing[ipc]",
        also=(("self._confirm(load))\n            self._confirm(load)\n", "self._confirm(load))\n"),),
    ),
    Mutant(
        "p3-read-before-the-hand-off-has-come",
        PULLER,
        "                    return False\n                self._read_over(link, load)\n",
        "                self._read_over(link, load)\n",
        "blocks are read before they are written",
        PAIR_TESTS + "TestReading::test_an_early_reader_waits_for_the_owner_s_worker[ipc]",
    ),
    Mutant(
        "p2-the-owner-is-told-before-its-grant",
        PULLER,
        "            if not link.ready(load):\n                return False\n        except TorporError:",
        "            link.ready(load)\n        except TorporError:",
        "blocks that nobody reads stay for the whole lease",
        PULLER_TESTS + "test_what_was_cancelled_while_its_hand_off_was_awaited_is_told_once_it_has_come",
    ),
    Mutant(
        "p5-all-wait-for-a-hand-off-that-does-not-come",
        TURNS,
        "            self._aside.append(Turn(turn.load, time.monotonic() + GRACE_LOOK_S, turn.first))\n",
        "            self._queue.appendleft(turn.load)\n",
        "one forged request holds up all others of that peer",
        PULLER_TESTS + "test_a_hand_off_that_does_not_come_holds_up_no_other_load",
    ),
    Mutant(
        "p5-a-release-forgets-what-waits-for-its-hand-off",
        TURNS,
        "map(_turn_of, self._queue), *self._aside]\n\n    def prepare",
        "map(_turn_of, self._queue)]\n\n    def prepare",
        "a load never ends, and its request hangs",
        PULLER_TESTS + "test_a_release_ends_what_waits_for_its_hand_off",
    ),
    Mutant(
        "the-engine-is-not-told-of-a-load",
        "src/torpor/connectors/reader.py",
        "            self._counts[state] += 1\n        self._tell()\n",
        "            self._counts[state] += 1\n",
        "every load takes as long as the engine naps",
        PAIR_TESTS + "TestReading::test_the_engine_is_told_when_a_load_has_ended[ipc]",
    ),
    Mutant(
        "p3-fence-not-cleared",
        LEASES,
        "            self._fence.shut()\n",
        "",
        "reads of a sleeping engine are believed",
        FENCE_TESTS + "TestVerdicts::test_p3_nothing_is_valid_once_it_is_shut",
    ),
    Mutant(
        "p3-word-of-an-ended-lease-stays",
        LEASES,
        "        self._fence.end(lease.number)\n",
        "",
        "blocks are free while a reader still finds its read valid",
        FENCE_TESTS + "TestLeases::test_it_expires_and_the_word_goes_first",
    ),
    Mutant(
        "p3-leases-stay-open-during-a-withdrawal",
        LEASES,
        "            self._epoch = None\n            self._fence.shut()\n",
        "            self._fence.shut()\n",
        "a hand-off is granted in an epoch that has ended",
        FENCE_TESTS + "TestLeases::test_a_hand_off_while_shut_ends_at_once",
    ),
    Mutant(
        "p3-slots-not-shared-out",
        LEASES,
        "            self._make_room(hand_off.lease)\n",
        "",
        "the end of an old lease ends a new one",
        FENCE_TESTS + "TestLeases::test_slots_are_used_again_and_the_older_lease_gives_way",
    ),
    Mutant(
        "lease-never-expires",
        LEASES,
        "if lease.deadline <= now]:",
        "if lease.deadline <= 0.0]:",
        "blocks of a reader that never came are held for ever",
        FENCE_TESTS + "TestLeases::test_it_expires_and_the_word_goes_first",
    ),
    Mutant(
        "lease-ended-by-anybody",
        LEASES,
        "if lease is None or lease.word != word:",
        "if lease is None:",
        "a client ends leases that it was not given",
        FENCE_TESTS + "TestLeases::test_an_invented_message_ends_nothing",
    ),
    Mutant(
        "commitment-without-the-blocks",
        FENCE,
        "(str(epoch), lease, request_id, num_tokens, list(block_ids), digest)",
        "(str(epoch), lease, request_id, num_tokens, len(block_ids), digest)",
        "a forged request reads the blocks of others",
        FENCE_TESTS + "TestVerdicts::test_a_lease_is_for_what_was_handed_off[forged0]",
    ),
    Mutant(
        "commitment-without-the-prompt",
        FENCE,
        "(str(epoch), lease, request_id, num_tokens, list(block_ids), digest)",
        "(str(epoch), lease, request_id, num_tokens, list(block_ids))",
        "the KV of another prompt poisons the prefix cache",
        HOSTILE_TESTS + "TestForgedRequests::test_the_kv_of_another_prompt_is_not_taken[ipc]",
    ),
    Mutant(
        "block-bounds-off-by-one",
        LOADS,
        "if worst >= theirs.spec.num_blocks:",
        "if worst > theirs.spec.num_blocks:",
        "a request names the block after the last: somebody else's memory",
        HOSTILE_TESTS + "TestForgedRequests::test_a_block_outside_the_cache_is_refused_before_it_is_read[ipc-remote0-local0]",
    ),
    Mutant(
        "offer-bounds-not-checked",
        GEOMETRY,
        "if place.region >= len(sizes) or place.offset + spec.layer_bytes > sizes[place.region]:",
        "if place.region >= len(sizes):",
        "an owner makes its readers read outside its memory",
        HOSTILE_TESTS + "TestAnOwnerThatLies::test_layers_outside_what_is_offered_are_refused",
    ),
    Mutant(
        "k-and-v-overlap",
        GEOMETRY,
        "half = self.spec.num_blocks * self.spec.block_bytes",
        "half = (self.spec.num_blocks - 1) * self.spec.block_bytes",
        "V comes from one block before its place",
        HOSTILE_TESTS + "TestAnOwnerThatLies::test_a_true_offer_is_understood",
    ),
    Mutant(
        "load-begins-one-block-late",
        SCHEDULER,
        "first_block=first_token // self._spec.block_size,",
        "first_block=-(-(first_token + 1) // self._spec.block_size),",
        "blocks land one place too far",
        SCHEDULER_TESTS + "TestLoad::test_blocks_after_those_of_the_prefix_cache",
    ),
    Mutant(
        "hand-off-one-block-short",
        SCHEDULER,
        "blocks = block_ids[: -(-num_tokens // self._spec.block_size)]",
        "blocks = block_ids[: num_tokens // self._spec.block_size]",
        "the end of the prompt is missing",
        SCHEDULER_TESTS + "TestHandOff::test_params_are_plain_json_with_vllm_s_names",
    ),
    Mutant(
        "hand-off-while-released",
        SCHEDULER,
        'if self._metadata is None or not kv_params.wants(request.kv_transfer_params, "do_remote_decode"):',
        'if not kv_params.wants(request.kv_transfer_params, "do_remote_decode"):',
        "a hand-off of memory that is going",
        SCHEDULER_TESTS + "TestHandOff::test_nothing_is_while_released",
    ),
    Mutant(
        "other-machines-need-no-secret",
        SCHEDULER,
        "if self._dials_hosts and self._config.secret_file is None and not is_loopback(parsed.remote_host):",
        "if self._dials_hosts and self._config.secret_file is None and not parsed.remote_host:",
        "a client makes the engine connect anywhere",
        SCHEDULER_TESTS + "TestParams::test_another_machine_needs_a_secret",
    ),
)
