"""The scheduler side of ``ipc`` and ``nixl``: which tokens come from a peer, which blocks wait for one."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from torpor.connectors import params as kv_params
from torpor.connectors.auth import is_loopback
from torpor.connectors.base import ConnectorMetadata, HandOff, KVConnectorScheduler, LoadRequest, token_digest
from torpor.connectors.config import ConnectorConfig
from torpor.errors import RequestError
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.request import GenerationRequest


class PullScheduler(KVConnectorScheduler):
    """The decode side pulls: a prefill that ends with ``do_remote_decode`` keeps its blocks under a lease, and what names that
    lease goes to the client."""

    def __init__(self, config: ConnectorConfig, spec: KVCacheSpec, *, dials_hosts: bool = False) -> None:
        self._config = config
        self._spec = spec
        self._dials_hosts = dials_hosts  # the request's remote_host is connected to
        self._metadata: dict[str, Any] | None = None
        self._next_lease = 1
        self._loads: list[LoadRequest] = []
        self._hand_offs: list[HandOff] = []
        self._cancelled: list[str] = []
        self._parsed: tuple[dict[str, Any], kv_params.RemoteParams] | None = None  # the last ones

    def set_kv_metadata(self, metadata: dict[str, Any] | None) -> None:
        self._metadata = metadata

    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        for what in ("do_remote_prefill", "do_remote_decode"):
            if not isinstance(params.get(what, False), (bool, type(None))):
                raise RequestError(
                    f"kv_transfer_params.{what} is {reprlib.repr(params[what])}, not true or false",
                    param=f"kv_transfer_params.{what}",
                )
        if kv_params.wants(params, "do_remote_decode"):
            self._check_role("producer", "do_remote_decode")
        if kv_params.wants(params, "do_remote_prefill"):
            self._check_role("consumer", "do_remote_prefill")
            self._check_remote(self._parse(params), num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        external = self._readable_tokens(request) - num_computed_tokens
        return (external, True) if external > 0 else (0, False)

    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if params is None or not kv_params.wants(params, "do_remote_prefill"):
            return
        first_token = self._readable_tokens(request) - num_external_tokens
        self._loads.append(
            LoadRequest(
                request_id=request.request_id,
                local_block_ids=list(block_ids) if num_external_tokens else [],
                params=params,
                first_block=first_token // self._spec.block_size,
                parsed=self._parse(params),
                prompt=_beginning(request.prompt_token_ids, int(params["remote_num_tokens"])),
            )
        )

    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._metadata is None or not kv_params.wants(request.kv_transfer_params, "do_remote_decode"):
            return False, None
        # Only the prompt's KV: that of generated tokens is of no use to somebody who has not seen them.
        num_tokens = min(num_computed_tokens, len(request.prompt_token_ids))
        blocks = block_ids[: -(-num_tokens // self._spec.block_size)]
        if not blocks:
            return False, None
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._hand_offs.append(
            HandOff(
                request_id=request.request_id,
                block_ids=blocks,
                num_tokens=num_tokens,
                lease_s=self._config.handoff_lease_s,
                epoch=self._metadata["epoch"],
                lease=lease,
                digest=token_digest(_beginning(request.prompt_token_ids, num_tokens)),
            )
        )
        return True, kv_params.build(
            self._metadata, request_id=request.request_id, block_ids=blocks, num_tokens=num_tokens, lease=lease
        )

    def cancel_load(self, request_id: str) -> None:
        self._cancelled.append(request_id)

    def build_connector_meta(self) -> ConnectorMetadata:
        metadata = ConnectorMetadata(loads=self._loads, hand_offs=self._hand_offs, cancelled=self._cancelled)
        self._loads, self._hand_offs, self._cancelled = [], [], []
        return metadata

    def _readable_tokens(self, request: GenerationRequest) -> int:
        """Tokens from the prompt's begin whose KV a peer holds and we can use: the last one is computed here, to sample from."""
        params = request.kv_transfer_params
        if params is None or not kv_params.wants(params, "do_remote_prefill"):
            return 0
        return min(int(params["remote_num_tokens"]), len(request.prompt_token_ids) - 1)

    def _parse(self, params: dict[str, Any]) -> kv_params.RemoteParams:
        """Once for a request whose load follows its admission at once: it takes 50 us for 512 blocks."""
        if self._parsed is None or self._parsed[0] is not params:
            self._parsed = params, kv_params.parse(params)
        return self._parsed[1]

    def _check_role(self, needed: str, what: str) -> None:
        if self._config.role not in (needed, "both"):
            raise RequestError(
                f"kv_transfer_params.{what} needs an engine whose kv_role is {needed} or both; this one's is {self._config.role}",
                param=f"kv_transfer_params.{what}",
            )

    def _check_remote(self, parsed: kv_params.RemoteParams, num_prompt_tokens: int) -> None:
        needed = -(-parsed.remote_num_tokens // self._spec.block_size)
        if len(parsed.remote_block_ids) != needed:
            raise RequestError(
                f"kv_transfer_params.remote_block_ids has {len(parsed.remote_block_ids)} blocks; "
                f"remote_num_tokens {parsed.remote_num_tokens} are {needed} blocks of {self._spec.block_size} (block_size)",
                param="kv_transfer_params.remote_block_ids",
            )
        if parsed.remote_num_tokens > num_prompt_tokens:
            raise RequestError(
                f"kv_transfer_params.remote_num_tokens is {parsed.remote_num_tokens}, the prompt has {num_prompt_tokens} tokens",
                param="kv_transfer_params.remote_num_tokens",
            )
        if parsed.remote_engine_id == self._config.engine_id:
            raise RequestError(
                "kv_transfer_params.remote_engine_id is this engine itself", param="kv_transfer_params.remote_engine_id"
            )
        if self._dials_hosts and self._config.secret_file is None and not is_loopback(parsed.remote_host):
            raise RequestError(
                f"kv_transfer_params.remote_host {parsed.remote_host!r} is another machine: that needs a kv_secret_file",
                param="kv_transfer_params.remote_host",
            )


def _beginning(token_ids: list[int], count: int) -> Sequence[int]:
    return token_ids if count == len(token_ids) else token_ids[:count]
