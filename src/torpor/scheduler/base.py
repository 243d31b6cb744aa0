"""What the scheduler needs of a KV connector. ``torpor.connectors.base.KVConnectorScheduler`` is one; the scheduler imports no
connector."""

from __future__ import annotations

from typing import Any, Protocol

from torpor.kvcache.types import BlockId
from torpor.request import GenerationRequest


class SchedulerConnector(Protocol):
    """The scheduler side of a connector. Called on the engine's loop thread, between steps; every method returns quickly."""

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond ``num_computed_tokens`` (a multiple of the block size) a peer holds, and whether they arrive
        asynchronously. May be asked again for the same request while that one waits for room. Changes nothing."""
        ...

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        """Exactly once per request, when it begins or ends before it began. ``block_ids`` are those of the external tokens
        only, in order: the first one begins at ``num_computed_tokens``. With no blocks and 0 tokens nothing will be read for
        this request, and the peer may let go."""
        ...

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended with the KV of its first ``num_computed_tokens`` tokens in ``block_ids`` (a copy; the last may be
        partial). (True, params): the blocks are kept until ``RunnerOutput.finished_sending`` names the request."""
        ...

    def cancel_load(self, request_id: str) -> None:
        """The blocks are kept until ``RunnerOutput.finished_recving`` or ``.failed_recving`` names the request."""
        ...

    def build_connector_meta(self) -> Any:
        """What came up since the last call; false when nothing did."""
        ...

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        """RequestError when a client's ``kv_transfer_params`` are malformed."""
        ...
