"""Prefill here, decode there. What goes wrong with the first, the second does alone; a decode engine that fails has a next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import Response

from torpor.errors import CapacityError, PeerError
from torpor.router.backends import Backend, Group
from torpor.router.bodies import decode_body, hand_off_of, prefill_body, why_not_split
from torpor.router.config import RouterConfig
from torpor.router.metrics import RouterMetrics
from torpor.router.upstream import RETRYABLE, Call, Stream, Whole, ask, open_stream

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How the first half ended: with a hand-off, without one and why, or with an answer that is the client's."""

    path: str  # "split", or why the decode engine prefills by itself
    params: dict[str, Any] | None = None
    final: Whole | None = None


class Proxy:
    def __init__(
        self, client: httpx.AsyncClient, prefill: Group, decode: Group, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._client = client
        self._prefill = prefill
        self._decode = decode
        self._config = config
        self._metrics = metrics

    async def handle(self, path: str, body: dict[str, Any], headers: Mapping[bytes, bytes]) -> Response:
        """The client's answer. CapacityError when no decode engine could be reached at all, or no connection is free."""
        prefilled = await self._run_prefill(path, body, headers)
        self._metrics.path(prefilled.path)
        if prefilled.final is not None:
            return prefilled.final.response()
        return await self._run_decode(path, body, headers, prefilled.params)

    async def _run_prefill(self, path: str, body: dict[str, Any], headers: Mapping[bytes, bytes]) -> Prefilled:
        if not self._prefill.backends:
            return Prefilled("no_prefill_engine")
        reason = why_not_split(body)
        if reason is not None:
            return Prefilled(reason)
        call = Call(path, prefill_body(body, path == CHAT_PATH), headers)
        usable = self._prefill.usable()
        self._prefill.take_turn()
        for backend in usable:
            found = await self._prefill_at(backend, call)
            if found is not None:
                return found
        return Prefilled("prefill_not_ready" if not usable else "prefill_failed")

    async def _prefill_at(self, backend: Backend, call: Call) -> Prefilled | None:
        """None: this one cannot; the next may. A timeout is not tried again: the client has waited long enough for a prefill."""
        try:
            answer = await ask(self._client, backend, call, self._config.prefill_timeout_s)
        except PeerError as error:
            return None if isinstance(error.__cause__, httpx.ConnectError) else Prefilled("prefill_failed")
        if answer.status in (408, *RETRYABLE):
            return None
        if 400 <= answer.status < 500:
            return Prefilled("refused", final=answer)
        params = hand_off_of(answer.body) if answer.status == 200 else None
        return Prefilled("split", params) if params is not None else Prefilled("no_hand_off")

    async def _run_decode(
        self, path: str, body: dict[str, Any], headers: Mapping[bytes, bytes], params: dict[str, Any] | None
    ) -> Response:
        last: Whole | None = None
        failures: list[str] = []
        candidates = self._decode.candidates()
        self._decode.take_turn()
        for backend in candidates:
            try:
                answer = await self._decode_at(backend, path, body, headers, params)
            except PeerError as error:
                failures.append(str(error))
                continue
            if isinstance(answer, Stream):
                return answer.response(self._config.read_timeout_s)
            if answer.status not in RETRYABLE:
                return answer.response()
            last = answer
        if last is not None:
            return last.response()
        raise CapacityError(f"no decode engine answered: {'; '.join(failures)}", retry_after_s=self._config.backoff_s)

    async def _decode_at(
        self, backend: Backend, path: str, body: dict[str, Any], headers: Mapping[bytes, bytes], params: dict[str, Any] | None
    ) -> Whole | Stream:
        answer = await self._send(backend, Call(path, decode_body(body, params), headers), bool(body.get("stream")))
        if params is None or isinstance(answer, Stream) or not answer.refused_hand_off:
            return answer
        # A hand-off that this engine cannot use is our doing, not the client's: let it prefill by itself.
        self._metrics.path("hand_off_refused")
        return await self._send(backend, Call(path, decode_body(body, None), headers), bool(body.get("stream")))

    async def _send(self, backend: Backend, call: Call, stream: bool) -> Whole | Stream:
        timeout_s = self._config.first_byte_timeout_s
        return await (open_stream if stream else ask)(self._client, backend, call, timeout_s)
