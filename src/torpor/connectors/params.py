"""``kv_transfer_params``: what travels from the prefill engine through the client or router to the decode engine. Plain JSON,
vLLM's names, and under ``torpor`` what makes them safe to believe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torpor.connectors.transport import Target
from torpor.errors import RequestError
from torpor.kvcache.types import Epoch

Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _Torpor(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Annotated[str, Meta(max_length=64)]
    lease: Annotated[int, Meta(ge=1, le=1 << 62)]


class RemoteParams(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a hand-off; others that routers add are passed over."""

    remote_engine_id: Name
    remote_request_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    remote_block_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1, max_length=1 << 20)]
    remote_host: Annotated[str, Meta(max_length=255)]
    remote_port: Port
    remote_num_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    torpor: _Torpor
    tp_size: Annotated[int, Meta(ge=1, le=1)] = 1

    @property
    def epoch(self) -> Epoch:
        return Epoch.parse(self.torpor.epoch)

    @property
    def target(self) -> Target:
        return Target(engine_id=self.remote_engine_id, host=self.remote_host, port=self.remote_port)


def wants(params: dict[str, Any] | None, what: str) -> bool:
    """what: "do_remote_prefill" (read from a peer) or "do_remote_decode" (hand over to one)."""
    return bool(params and params.get(what))


def parse(params: dict[str, Any]) -> RemoteParams:
    """RequestError naming the field."""
    try:
        parsed = msgspec.convert(params, RemoteParams)
        parsed.epoch  # noqa: B018  (its check)
    except (msgspec.ValidationError, ValueError) as error:
        raise RequestError(f"kv_transfer_params: {error}", param="kv_transfer_params") from error
    return parsed


def build(metadata: dict[str, Any], *, request_id: str, block_ids: Sequence[int], num_tokens: int, lease: int) -> dict[str, Any]:
    """metadata: the worker side's, with engine_id, host, port and epoch."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": metadata["engine_id"],
        "remote_request_id": request_id,
        "remote_block_ids": list(block_ids),
        "remote_host": metadata["host"],
        "remote_port": metadata["port"],
        "remote_num_tokens": num_tokens,
        "tp_size": 1,
        "torpor": {"epoch": metadata["epoch"], "lease": lease},
    }
