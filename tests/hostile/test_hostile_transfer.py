"""``kv_transfer_params`` that were forged, at the HTTP door of a decode engine and at the connector's own check (P1, P3, P5).

Whatever a client sends, its answer is the one the engine would have computed alone, or a 400 that names the field; and whoever
asks at the same time is answered as ever.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_kit
import httpx
import pytest
import pytest_asyncio
from engine_models import save_model, tiny_engine
from web_fakes import client_of

from torpor.connectors.base import KVConnectorScheduler
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.ipc import IpcConnector
from torpor.connectors.nixl import NixlConnector
from torpor.connectors.params import build
from torpor.engine.client import InprocEngineClient
from torpor.engine.frontend import Frontend
from torpor.errors import RequestError
from torpor.kvcache.types import BlockId
from torpor.request import GenerationRequest, SamplingParams
from torpor.server import create_app
from torpor.testing.kv_engine import SMALL_SPEC

pytestmark = [pytest.mark.timeout(1800 if hostile_kit.SCALE > 1 else 120), pytest.mark.asyncio(loop_scope="module")]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPTS = [list(f"{i}: a prompt of a few blocks, the same for all".encode()) for i in range(4)]
TOKENS = 5


@dataclass
class Pair:
    """Two engines behind their HTTP doors, and what D says when it computes alone."""

    connector: str
    prefill: httpx.AsyncClient
    decode: httpx.AsyncClient
    reference: list[list[int]]

    async def hand_off(self, which: int) -> dict[str, Any]:
        answer = await self.prefill.post(
            "/v1/completions", json={"prompt": PROMPTS[which], "max_tokens": 1, "temperature": 0, "kv_transfer_params": PREFILL}
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["kv_transfer_params"])

    async def ask(self, which: int, params: Any = None) -> httpx.Response:
        body = {"prompt": PROMPTS[which], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        text = json.dumps(body | ({} if params is None else {"kv_transfer_params": params}))
        return await self.decode.post("/v1/completions", content=text, headers={"content-type": "application/json"})

    async def connector_stats(self) -> dict[str, Any]:
        return dict((await self.decode.get("/memory")).json()["connector"])

    def check(self, which: int, params: Any, answer: httpx.Response) -> None:
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].startswith("kv_transfer_params"), answer.text
            return
        assert answer.status_code == 200, (params, answer.text)
        assert answer.json()["choices"][0]["token_ids"] == self.reference[which], params


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ipc", "nixl"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    folder: Path = save_model(tmp_path_factory.mktemp("model"))
    extra = {"handshake_timeout_s": 0.5, "connect_timeout_s": 0.5}
    async with AsyncExitStack() as stack:
        doors = []
        for role in ("producer", "consumer"):
            connector = ConnectorConfig(connector=request.param, role=role, extra=extra)  # type: ignore[arg-type]
            settings = {"num_blocks": 1024, "handoff_lease_s": 1.0, "enable_prefix_caching": role == "producer"}
            client = await InprocEngineClient.start(tiny_engine(folder, connector=connector, **settings), timeout_s=90)
            stack.push_async_callback(client.shutdown)
            doors.append(await stack.enter_async_context(client_of(create_app(Frontend.for_client(client)))))
            doors[-1].timeout = httpx.Timeout(60)
        made = Pair(request.param, doors[0], doors[1], [])
        for which in range(len(PROMPTS)):
            made.reference.append((await made.ask(which)).json()["choices"][0]["token_ids"])
        assert len({tuple(tokens) for tokens in made.reference}) == len(PROMPTS)
        yield made


async def test_a_true_hand_off_is_read(pair: Pair) -> None:
    before = await pair.connector_stats()
    params = await pair.hand_off(0)
    pair.check(0, params, await pair.ask(0, params))
    assert (await pair.connector_stats())["loads_done"] == before["loads_done"] + 1


async def test_forged_hand_offs_change_no_answer(pair: Pair) -> None:
    rand = hostile_kit.rng(f"transfer {pair.connector}")
    used: list[dict[str, Any]] = [await pair.hand_off(0)]
    refused = 0
    for _ in range(hostile_kit.scaled(20)):
        asked = []
        for _ in range(3):
            which = rand.randrange(len(PROMPTS))
            asked.append((which, forged(rand, await pair.hand_off(which), used)))
        used.append(await pair.hand_off(which))
        asked.append((which, used[-1]))  # a true one among them
        asked.append((rand.randrange(len(PROMPTS)), None))
        answers = await asyncio.gather(*(pair.ask(which, params) for which, params in asked))
        for (which, params), answer in zip(asked, answers, strict=True):
            pair.check(which, params, answer)
            refused += answer.status_code == 400
        assert [a.status_code for a in answers[-2:]] == [200, 200]
        hostile_kit.tried(f"forged hand-offs over HTTP, {pair.connector}", 3)
    hostile_kit.tried(f"  of them refused with 400, {pair.connector}", refused)
    assert (await pair.ask(0)).status_code == 200


def forged(rand: random.Random, true: dict[str, Any], used: list[dict[str, Any]]) -> Any:
    epoch, lease = true["torpor"]["epoch"], true["torpor"]["lease"]
    boot, _, counter = epoch.partition(".")
    how = rand.randrange(8)
    if how == 0:
        return rand.choice(used)  # a replay, mostly of another prompt
    if how == 1:
        return true | {"torpor": rand.choice(used)["torpor"]}
    if how == 2:
        made_up = rand.choice((f"{boot}.{int(counter) + rand.choice((-1, 1, 1000))}", f"{'0' * 16}.{counter}", f"{boot}.0"))
        return true | {"torpor": {"epoch": made_up, "lease": lease}}
    if how == 3:
        return true | {"torpor": {"epoch": epoch, "lease": max(1, lease + rand.choice((-1, 1, 1024, 2**61)))}}
    if how == 4:
        return true | {"remote_block_ids": [rand.randrange(1024) for _ in true["remote_block_ids"]]}
    if how == 5:
        return hostile_kit.any_json(rand)
    return hostile_kit.mutated_object(rand, true)


async def test_hand_offs_from_before_a_sleep_are_recomputed(pair: Pair) -> None:
    stale = [await pair.hand_off(which) for which in range(len(PROMPTS))]
    assert (await pair.prefill.post("/sleep", params={"level": 1})).status_code == 200
    for which, params in enumerate(stale):
        pair.check(which, params, await pair.ask(which, params))
    assert (await pair.prefill.post("/wake_up")).status_code == 200
    for which, params in enumerate(stale):
        answer = await pair.ask(which, params)
        assert answer.status_code == 200
        pair.check(which, params, answer)
    hostile_kit.tried(f"hand-offs of an old epoch, {pair.connector}", 2 * len(stale))


@pytest.mark.parametrize("kind", [IpcConnector, NixlConnector])
async def test_the_connectors_check_takes_anything(kind: Any) -> None:
    """RequestError that names the field; what it lets through can be worked with."""
    rand = hostile_kit.rng(f"check_params {kind.__name__}")
    side: KVConnectorScheduler = kind.create_scheduler(ConnectorConfig(connector="x", engine_id="D"), SMALL_SPEC)
    metadata = {"engine_id": "P", "host": "127.0.0.1", "port": 5, "epoch": "0123456789abcdef.3"}
    good = build(metadata, request_id="r", block_ids=[1, 2, 3], num_tokens=10, lease=7)
    passed = 0
    for _ in range(hostile_kit.scaled(3000)):
        params = hostile_kit.mutated_object(rand, good)
        refusal = None
        try:
            side.check_params(params, 10)
        except RequestError as error:
            refusal = error
        if refusal is not None:
            assert str(refusal.fields["param"]).startswith("kv_transfer_params"), refusal
            assert len(str(refusal)) < 1000, "an error that repeats the whole request helps nobody"
            continue
        passed += 1
        request = GenerationRequest(
            request_id="q", prompt_token_ids=list(range(10)), sampling=SamplingParams(), kv_transfer_params=params
        )
        tokens, _ = side.get_num_new_matched_tokens(request, 0)
        assert 0 <= tokens < 10
        side.update_state_after_alloc(request, [BlockId(b) for b in range(3)], tokens)
        side.build_connector_meta()
    hostile_kit.tried("kv_transfer_params at check_params", hostile_kit.scaled(3000))
    assert passed > 0
