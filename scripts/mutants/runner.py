"""The runner: step inputs, graphs, fused layers (E1)."""

from __future__ import annotations

from mutants.mutant import Mutant

GRAPHS = "src/torpor/engine/graphs.py"
INPUTS = "src/torpor/engine/inputs.py"
RUNNER = "src/torpor/engine/runner.py"
DECODER = "src/torpor/models/fused/decoder.py"
MERGE = "src/torpor/models/fused/merge.py"
ATTENTION = "src/torpor/models/attention/base.py"
FUSED_TESTS = "tests/unit/test_fused_layers.py::"
GRAPH_TESTS = "tests/unit/test_graph_runner.py::"
INPUT_TESTS = "tests/unit/test_step_inputs.py::"
SAMPLER = "src/torpor/engine/sampler.py"
COUNTS = "src/torpor/scheduler/token_counts.py"

MUTANTS = (
    Mutant(
        "padding-has-a-slot",
        INPUTS,
        "_Part(slots, tokens, -1)",
        "_Part(slots, tokens, 0)",
        "padded rows of a replay write into somebody's block",
        INPUT_TESTS + "test_a_padded_step_is_where_the_captured_one_reads_and_its_padding_writes_nothing",
    ),
    Mutant(
        "block-tables-only-grow",
        INPUTS,
        "kept = len(have) if have == table[: len(have)] else 0",
        "kept = min(len(have), len(table))",
        "a sequence reads the blocks of the one whose row it took",
        INPUT_TESTS + "test_steps_in_any_order_say_what_was_asked",
    ),
    Mutant(
        "a-failed-step-is-believed",
        RUNNER,
        "self.inputs.forget()  # nobody knows how much of them the device has",
        "pass",
        "the device computes with block tables that never reached it",
        INPUT_TESTS + "test_after_a_failed_step_the_block_tables_are_sent_again",
    ),
    Mutant(
        "graphs-replay-beside-a-prompt",
        GRAPHS,
        "if self.events is not None or len(sequences[-1].token_ids) > 1:",
        "if self.events is not None or len(sequences[0].token_ids) > 1:",
        "of a prompt's chunk only one token is computed",
        GRAPH_TESTS + "test_only_steps_of_single_tokens_are_replayed",
    ),
    Mutant(
        "e1-merged-weights-are-copies",
        MERGE,
        "        if part.data_ptr() != end",
        "        if part.data_ptr() == end",
        "a second set of weights lies in no pool, and a reload does not reach it",
        "tests/unit/test_fused_layers.py::test_e1_merged_parameters_lie_together_in_the_pool_and_nowhere_else",
    ),
    Mutant(
        "a-capture-meets-a-kernel-that-is-not-compiled",
        DECODER,
        "return tuple(sorted({*first.values(), min(1, len(self._layers) - 1)}))",
        "return tuple(sorted(first.values()))",
        "a kernel is compiled in the middle of a capture",
        FUSED_TESTS + "test_one_layer_of_each_kind_runs_all_kernels",
    ),
    Mutant(
        "keys-are-stored-before-a-load",
        ATTENTION,
        "return self.events is None and self.step.stored_elsewhere",
        "return self.step.stored_elsewhere",
        "what a connector still loads into a layer overwrites the step's own keys",
        FUSED_TESTS + "test_keys_are_not_stored_before_a_connector_has_loaded_the_layer",
    ),
    Mutant(
        "penalties-count-outputs-again",
        COUNTS,
        "        self._num_outputs = len(self.outputs)\n",
        "        self._num_outputs = 0\n",
        "a token is penalised for every step since it came",
        "tests/unit/test_token_counts.py::test_a_token_at_a_time",
    ),
    Mutant(
        "penalties-meet-the-row-beside",
        SAMPLER,
        "np.repeat([row for row, _, _ in rows]",
        "np.repeat([row // 2 for row, _, _ in rows]",
        "one request's penalties change another's tokens",
        "tests/unit/test_sampler_choice.py::test_penalties_of_many_rows_are_each_row_s_own",
    ),
)
