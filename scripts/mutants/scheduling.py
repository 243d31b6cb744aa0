"""KV blocks, the prefix cache and the scheduler (E6, P5)."""

from __future__ import annotations

from mutants.mutant import Mutant

ADMISSION = "src/torpor/scheduler/admission.py"
BLOCKS = "src/torpor/kvcache/blocks.py"
MANAGER = "src/torpor/kvcache/manager.py"
OUTCOME = "src/torpor/scheduler/outcome.py"
PLANNER = "src/torpor/scheduler/planner.py"
PREFIX = "src/torpor/kvcache/prefix.py"
QUEUES = "src/torpor/scheduler/queues.py"
SCHEDULER = "src/torpor/scheduler/scheduler.py"
TRANSFERS = "src/torpor/scheduler/transfers.py"
BATCHING_TESTS = "tests/unit/test_scheduler_batching.py::"
BLOCK_TESTS = "tests/unit/test_kvcache_blocks.py::"
LIFECYCLE_TESTS = "tests/unit/test_scheduler_lifecycle.py::"
MANAGER_TESTS = "tests/unit/test_kvcache_manager.py::"
PREEMPTION_TESTS = "tests/unit/test_scheduler_preemption.py::"
PREFIX_TESTS = "tests/unit/test_kvcache_prefix.py::"
TRANSFER_TESTS = "tests/unit/test_scheduler_transfers.py::"

MUTANTS = (
    Mutant(
        "block-count-off-by-one",
        MANAGER,
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
        "a text that fills its blocks takes one more",
        MANAGER_TESTS + "test_growing_adds_a_block_only_when_the_last_one_is_full",
    ),
    Mutant(
        "whole-prompt-hit",
        MANAGER,
        "limit = (len(tokens) - 1) // self.block_size",
        "limit = len(tokens) // self.block_size",
        "nothing is left to compute, and so nothing to sample from",
        MANAGER_TESTS + "test_a_whole_prompt_hit_leaves_a_token_to_compute",
    ),
    Mutant(
        "half-full-blocks-are-hit",
        MANAGER,
        "full = num_computed // self.block_size",
        "full = min(len(tokens) // self.block_size, -(-num_computed // self.block_size))",
        "KV that is not computed yet is shared",
        MANAGER_TESTS + "test_only_full_blocks_of_computed_tokens_are_hit",
    ),
    Mutant(
        "shared-blocks-stay-in-the-free-list",
        BLOCKS,
        "        if self._counts[block] == 0:\n            del self._free[block]\n        self._counts[block] += 1",
        "        self._counts[block] += 1",
        "a block is given to somebody else while it is read",
        BLOCK_TESTS + "test_sharing_a_free_block_revives_it",
    ),
    Mutant(
        "freed-by-the-first-holder",
        BLOCKS,
        "        if count == 1:\n            self._free[block] = None",
        "        if count >= 1:\n            self._free[block] = None",
        "a block is given to somebody else while it is read",
        BLOCK_TESTS + "test_a_shared_block_is_free_only_when_its_last_holder_let_go",
    ),
    Mutant(
        "hash-chain-without-the-weights",
        PREFIX,
        "return blake2b(weights_version.encode(), digest_size",
        'return blake2b(b"", digest_size',
        "KV computed with other weights is hit",
        MANAGER_TESTS + "test_e6_kv_of_other_weights_never_matches",
    ),
    Mutant(
        "hash-chain-without-the-beginning",
        PREFIX,
        'blake2b(parent + array("I", block).tobytes(), digest_size',
        'blake2b(root + array("I", block).tobytes(), digest_size',
        "the same words after another beginning are hit",
        PREFIX_TESTS + "test_equal_names_mean_an_equal_beginning",
    ),
    Mutant(
        "e6-the-index-survives-a-reset",
        MANAGER,
        "        self._index.clear()\n",
        "",
        "content that is gone is hit",
        MANAGER_TESTS + "test_e6_a_reset_leaves_no_index_over_lost_content",
    ),
    Mutant(
        "e6-a-reset-under-held-blocks",
        MANAGER,
        "        if self._tables:\n            names =",
        "        if not self._tables and self._committed:\n            names =",
        "two requests are given the same block",
        MANAGER_TESTS + "test_e6_a_reset_while_blocks_are_held_is_refused_and_changes_nothing",
    ),
    Mutant(
        "evicted-blocks-are-still-found",
        MANAGER,
        "self._evictions += self._index.drop(block)",
        "self._evictions += block in self._index",
        "a block is hit whose content is somebody else's",
        MANAGER_TESTS + "test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning",
    ),
    Mutant(
        "kv-of-bad-logits-is-hit",
        OUTCOME,
        "        self._kv.forget(seq.request_id)\n",
        "",
        "one bad request spoils those that share its beginning",
        BATCHING_TESTS + "test_a_request_whose_logits_are_bad_ends_with_an_error_and_its_kv_is_not_hit",
    ),
    Mutant(
        "e3-closed-admission-lets-in",
        SCHEDULER,
        "admit=self._open)",
        "admit=True)",
        "a drain never ends",
        LIFECYCLE_TESTS + "test_while_admission_is_closed_nothing_begins_and_what_has_begun_ends",
    ),
    Mutant(
        "frozen-requests-go-to-the-back",
        QUEUES,
        "self.waiting.move_to_end(seq.request_id, last=False)",
        "self.waiting.move_to_end(seq.request_id)",
        "whoever was served before the sleep waits for everybody after it",
        LIFECYCLE_TESTS + "test_frozen_requests_come_before_those_that_never_began_and_keep_their_seed",
    ),
    Mutant(
        "frozen-requests-keep-their-blocks",
        SCHEDULER,
        "            if seq.state is RequestState.RUNNING:\n                self.kv.free(seq.request_id)\n",
        "",
        "blocks leak with every sleep",
        LIFECYCLE_TESTS + "test_frozen_requests_go_on_after_the_wake_with_the_same_text",
    ),
    Mutant(
        "a-freeze-under-a-load",
        SCHEDULER,
        "        if self.has_loading:\n            raise StateError(",
        "        if self.has_loading and not self.has_transfers:\n            raise StateError(",
        "a peer's bytes land in blocks that were given away",
        LIFECYCLE_TESTS + "test_loads_must_be_drained_before_a_freeze",
    ),
    Mutant(
        "the-result-of-a-frozen-step-counts",
        OUTCOME,
        "if seq is None or seq.scheduled_step != step:",
        "if seq is None:",
        "a token is appended twice",
        LIFECYCLE_TESTS + "test_the_result_of_a_step_from_before_a_freeze_is_passed_over",
    ),
    Mutant(
        "the-oldest-gives-way",
        PLANNER,
        "victim = self._queues.running[-1]",
        "victim = self._queues.running[0]",
        "under pressure nobody ever gets on",
        PREEMPTION_TESTS + "test_the_youngest_gives_way_and_the_oldest_never_does",
    ),
    Mutant(
        "seats-not-counted",
        PLANNER,
        "while queues.num_seats_taken < self._config.seats:",
        "while len(queues.running) <= self._config.seats:",
        "a step has more sequences than the runner's tensors",
        BATCHING_TESTS + "test_seats_limit_the_sequences_of_a_step",
    ),
    Mutant(
        "p5-a-failed-load-counts",
        TRANSFERS,
        "            seq.num_computed = load.num_local\n",
        "            seq.num_computed = min(load.num_local + load.num_external, len(seq.tokens) - 1)\n",
        "tokens come from KV that never arrived",
        TRANSFER_TESTS + "test_p5_a_failed_load_is_recomputed_and_counted",
    ),
    Mutant(
        "p5-loads-never-time-out",
        TRANSFERS,
        "and now >= seq.load.deadline:",
        "and now >= seq.load.deadline + 1e9:",
        "a request waits for ever for a peer",
        TRANSFER_TESTS + "test_p5_a_late_load_is_cancelled_and_its_blocks_are_left_alone_until_the_connector_says_so",
    ),
    Mutant(
        "p5-blocks-of-a-cancelled-load-are-free-at-once",
        OUTCOME,
        "            self._transfers.cancel(seq)\n            self._queues.move(seq, RequestState.CANCELLING)\n",
        "            self._transfers.cancel(seq)\n            self._queues.move(seq, RequestState.CANCELLING)\n"
        "            self._kv.free(seq.request_id)\n            self._kv.allocate(seq.request_id, 1)\n",
        "a peer writes into the blocks of another request",
        TRANSFER_TESTS + "test_abort_of_a_loading_one_answers_at_once_and_frees_when_the_connector_lets_go",
    ),
    Mutant(
        "a-loaded-prompt-leaves-nothing-to-compute",
        TRANSFERS,
        "seq.num_computed = min(load.num_local + load.num_external, len(seq.tokens) - 1)",
        "seq.num_computed = load.num_local + load.num_external",
        "there are no logits to sample from",
        TRANSFER_TESTS + "test_a_load_is_not_computed_again_but_for_the_last_token",
    ),
    Mutant(
        "prompts-as-long-as-the-context",
        ADMISSION,
        "if len(prompt) >= max_model_len:",
        "if len(prompt) > max_model_len:",
        "a request without room for one token",
        BATCHING_TESTS + "test_a_request_that_can_never_run_is_refused_by_name",
    ),
    Mutant(
        "any-number-may-wait",
        SCHEDULER,
        "if self.num_waiting >= self.config.max_waiting:",
        "if self.num_waiting > self.config.max_waiting:",
        "max_waiting is one too many",
        BATCHING_TESTS + "test_too_many_waiting_requests_are_a_capacity_error",
    ),
)
