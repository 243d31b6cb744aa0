# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Cutting the contexts of single-token sequences into pieces of about equal work, on the device.

    sequence 0   |----- 0 -----|----- 1 -----|- 2 -|        a piece is a range of positions of one sequence; all pieces of a
    sequence 1   |-- 3 --|                                  step begin at multiples of one length, chosen from the sum of the
    sequence 2   |----- 4 -----|-- 5 --|                    contexts so that there are at most ``target`` whole ones

The length of a piece is decided by the kernel and the number of programs by the bound on the number of pieces, so a captured step
adapts to the lengths of each replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torpor.models.attention.triton_kernels.softmax import power_of_two

_SEQS = 256  # lanes of the kernel at least: one kernel for all smaller batches


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors of int32 on the device. P is the bound on the number of pieces."""

    pieces: torch.Tensor  # [5, P]: sequence, first position, end; first piece of the sequence, number of its pieces
    total: torch.Tensor  # [1]: pieces there are
    arrived: torch.Tensor  # [S * kv heads], zeros: pieces that are done; whoever comes last sets it back


@triton.jit(
    do_not_specialize=["num_seqs", "bound", "target", "window", "shortest", "multiple", "num_arrived"]
)  # one kernel for all steps
def _make_plan(
    seq_lens,
    pieces,
    total,
    arrived,
    num_seqs,
    bound,
    target,
    window,
    shortest,
    multiple,
    num_arrived,
    SEQS: tl.constexpr,
):
    seq = tl.arange(0, SEQS)
    real = seq < num_seqs
    ends = tl.load(seq_lens + seq, mask=real, other=0).to(tl.int32)
    begins = tl.maximum(ends - window, 0)
    length = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(ends - begins), target), multiple) * multiple, shortest)
    skipped = begins // length
    count = tl.where(real, tl.maximum(tl.cdiv(ends, length) - skipped, 1), 0)  # padding has a piece too: it writes the zeros
    first = tl.cumsum(count, 0) - count
    tl.store(total, tl.sum(count))
    for i in range(tl.max(count)):
        mask = real & (i < count)
        tl.store(pieces + first + i, seq, mask=mask)
        tl.store(pieces + bound + first + i, tl.maximum((skipped + i) * length, begins), mask=mask)
        tl.store(pieces + 2 * bound + first + i, tl.minimum((skipped + i + 1) * length, ends), mask=mask)
        tl.store(pieces + 3 * bound + first + i, first, mask=mask)
        tl.store(pieces + 4 * bound + first + i, count, mask=mask)
    for i in range(0, num_arrived, SEQS):
        tl.store(arrived + i + seq, 0, mask=i + seq < num_arrived)


def make_plan(
    seq_lens: torch.Tensor,
    kv_heads: int,
    *,
    max_seq_len: int,
    window: int | None,
    target: int,
    shortest: int,
    multiple: int,
) -> Plan:
    """``target``: pieces wanted, counting whole ones; ``shortest``: the fewest positions of a whole one, a ``multiple``.

    A window makes a sequence's first piece a partial one too, which costs a second piece beyond the target.
    """
    num_seqs, device = seq_lens.shape[0], seq_lens.device
    partial = 1 if window is None else 2
    bound = num_seqs * partial + min(target, num_seqs * (max_seq_len // shortest))
    pieces, total, arrived = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((5, bound), (1,), (num_seqs * kv_heads,))
    )
    _make_plan[(1,)](
        seq_lens,
        pieces,
        total,
        arrived,
        num_seqs,
        bound,
        target,
        2**30 if window is None else window,
        shortest,
        multiple,
        len(arrived),
        SEQS=max(_SEQS, power_of_two(num_seqs)),
        num_warps=4,
    )
    return Plan(pieces, total, arrived)
