"""Memory that torch allocates in pools (M10)."""

from __future__ import annotations

from mutants.mutant import NATIVE, Mutant

BRIDGE = "csrc/src/torch_bridge.cpp"
MEMPOOLS = "src/torpor/memory/mempools.py"
POOL = "src/torpor/memory/pool.py"
SHARED = "src/torpor/memory/shared.py"
SLEEP = "src/torpor/memory/sleep.py"
TORCH_CUDA = "src/torpor/memory/torch_cuda.py"
TESTS = "tests/unit/test_memory_torch.py::"
SETTINGS_TESTS = "tests/unit/test_memory_torch_settings.py::"

MUTANTS = (
    Mutant(
        "torch-frees-go-in-mid-transaction",
        SHARED,
        "            if self._depth == 1:",
        "            if self._depth == -1:",
        "a region goes while its content is copied",
        TESTS + "test_m10_frees_never_wait_for_the_transaction_they_happen_in",
    ),
    Mutant(
        "torch-allocates-in-mid-sleep",
        SLEEP,
        "                move.pool.shut_torch()\n",
        "                move.pool.mapped_segments()\n",
        "memory made after the images is unmapped without one",
        TESTS + "test_torch_gets_nothing_between_the_image_and_the_unmap",
    ),
    Mutant(
        "torch-sleep-with-somebody-inside",
        SLEEP,
        "            move.pool.require_nobody_inside()\n",
        "            move.pool.mapped_segments()\n",
        "a thread inside is given cached memory that sleeps",
        TESTS + "test_a_sleep_while_somebody_is_inside_is_refused_before_anything_happens",
    ),
    Mutant(
        "torch-copies-what-it-caches",
        POOL,
        "            self._torch.mempools.trim()\n            self._torch.admit(False)",
        "            self._torch.admit(False)",
        "the temporaries of a loader are copied to the host at every sleep",
        TESTS + "test_what_torch_caches_is_given_back_by_trim_and_by_a_sleep",
    ),
    Mutant(
        "torch-innermost-ignored",
        MEMPOOLS,
        "if mine and self._everybody.innermost() is self:",
        "if mine:",
        "tensors land in the pool entered between",
        TESTS + "test_pools_nest_and_a_pool_may_be_entered_again",
    ),
    Mutant(
        "torch-expandable-segments-left-on",
        TORCH_CUDA,
        "    _set(ours)\n",
        "    _joined(ours)\n",
        "what is allocated inside never reaches the pool",
        SETTINGS_TESTS + "test_expandable_segments_are_off_while_anybody_is_inside",
    ),
    Mutant(
        "torch-other-options-reset",
        TORCH_CUDA,
        'ours = _joined(others, "expandable_segments:False")',
        'ours = "expandable_segments:False"',
        "torch forgets max_split_size_mb and its like inside",
        SETTINGS_TESTS + "test_expandable_segments_are_off_while_anybody_is_inside",
    ),
    Mutant(
        "native-torch-free-unmaps-while-held",
        BRIDGE,
        "if (mode_ == Mode::open) unmap(",
        "if (mode_ != Mode::disowned) unmap(",
        "a free in mid-sleep waits for the copies of the sleep (M10)",
        NATIVE + "torch_frees_give_memory_back_at_once_only_when_open",
    ),
    Mutant(
        "native-device-closed-under-torch",
        BRIDGE,
        "if (inherited == 0 || stats.live_regions > inherited ||",
        "if (inherited == 0 ||",
        "a device closes although something besides torch's memory lives on it",
        NATIVE + "torch_memory_outlives_its_owner_and_closes_the_device",
        crash=True,
    ),
)
