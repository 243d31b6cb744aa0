"""Does the scheduler's picture agree with itself and with the KV cache?"""

from __future__ import annotations

from torpor.errors import BugError
from torpor.kvcache.manager import KVCacheManager
from torpor.scheduler.queues import RequestQueues
from torpor.scheduler.sequence import HOLDS_BLOCKS, RequestState, Sequence


def check_integrity(queues: RequestQueues, kv: KVCacheManager) -> None:
    """BugError saying what disagrees. For between steps; O(everything)."""
    queues.check_integrity()
    kv.check_integrity()
    holders = {request_id for request_id, seq in queues.by_id.items() if seq.state in HOLDS_BLOCKS}
    if holders != kv.request_ids():
        raise BugError(f"requests that hold blocks and block tables disagree on {sorted(holders ^ kv.request_ids())}")
    for seq in queues.by_id.values():
        _check_sequence(seq, kv)


def _check_sequence(seq: Sequence, kv: KVCacheManager) -> None:
    name = f"request {seq.request_id!r} ({seq.state.value})"
    if seq.tokens != [*seq.request.prompt_token_ids, *seq.outputs]:
        raise BugError(f"{name}: its tokens are not its prompt and outputs")
    if seq.state not in HOLDS_BLOCKS:
        if seq.num_computed or seq.block_ids or seq.load is not None:
            raise BugError(f"{name} holds no blocks, yet {seq.num_computed} of its tokens count as computed")
        return
    if tuple(seq.block_ids) != kv.table(seq.request_id):
        raise BugError(f"{name}: its blocks {seq.block_ids} are not its table {kv.table(seq.request_id)}")
    if not 0 <= seq.num_computed <= min(len(seq.tokens) - 1, len(seq.block_ids) * kv.block_size):
        raise BugError(f"{name}: {seq.num_computed} of {len(seq.tokens)} tokens computed, in {len(seq.block_ids)} blocks")
    if (seq.state in (RequestState.LOADING, RequestState.CANCELLING)) != (seq.load is not None and seq.load.in_background):
        raise BugError(f"{name}: its load is {seq.load}")
