"""The two halves of a request, and what the router does when one of the engines sleeps, fails or is slow (P5, E10)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp
from web_fakes import Network, chat, client_of, completion, events_of, server_app

from torpor.engine.base import SleepRequest
from torpor.errors import BugError, CapacityError, RequestError
from torpor.router import Router, RouterConfig, create_app
from torpor.router.health import probe
from torpor.testing.fake_engine import FakeEngine

P, D, D2 = "http://p", "http://d", "http://d2"
PATHS = ("/v1/completions", "/v1/chat/completions")


class Setup:
    """A router over a network of named apps. Probes run only when a test says so, so nothing here waits."""

    def __init__(self, network: Network, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.network = network
        self.app = app
        self.client = client
        self.router: Router = app.state.router
        self.now = 0.0

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **more)

    async def paths(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("torpor_router_paths_total")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@asynccontextmanager
async def routed(hosts: dict[str, ASGIApp], **config: Any) -> AsyncIterator[Setup]:
    settings = {"prefill": (P,), "decode": (D,), "health_interval_s": 3600.0, **config}
    network = Network(hosts)
    app = create_app(RouterConfig(**settings), network, clock=lambda: setup.now)
    async with client_of(app) as client:
        setup = Setup(network, app, client)
        yield setup
        await app.state.router.client.aclose()


def engines() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("prefill", connector=True), FakeEngine("decode")


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return chat(**more) if "chat" in path else completion(**more)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        choices = [c for e in events_of(response.text) for c in e["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    choice = response.json()["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_prefill_at_p_then_decode_at_d_with_its_hand_off(path: str, stream: bool) -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        body = body_of(
            path, stream=stream, max_tokens=20, min_tokens=3, temperature=0.25, **({"logprobs": True} if "chat" in path else {})
        )
        assert text_of(await setup.post(path, body)) == "decode"
        assert await setup.paths() == {"split": 1}
    (first,), (second,) = p.requests, d.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (first.sampling.max_tokens, first.sampling.min_tokens, first.sampling.logprobs) == (1, 0, None)
    assert first.kv_transfer_params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert (second.sampling.max_tokens, second.sampling.min_tokens, second.sampling.temperature) == (20, 3, 0.25)
    assert second.kv_transfer_params is not None
    assert second.kv_transfer_params["remote_request_id"] == first.request_id


async def test_max_completion_tokens_is_one_at_p() -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        await setup.post("/v1/chat/completions", chat(max_completion_tokens=4))
    assert [e.requests[0].sampling.max_tokens for e in (p, d)] == [1, 4]


async def test_streams_pass_byte_for_byte_with_their_headers() -> None:
    events = [b'data: {"choices": [], "odd":   1}\n\n', b": comment\n\n", 'data: {"t": "é"}\n\ndata: [DO'.encode(), b"NE]\n\n"]
    d = FastAPI()

    @d.post("/v1/completions")
    async def stream(request: Request) -> Response:
        async def content() -> AsyncIterator[bytes]:
            for event in events:
                yield event

        return StreamingResponse(
            content(), media_type="text/event-stream", headers={"x-seen-id": request.headers["x-request-id"]}
        )

    async with routed({"d": d}, prefill=()) as setup:
        response = await setup.post("/v1/completions", completion(stream=True), headers={"X-Request-Id": "trace-7"})
    assert response.content == b"".join(events)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "trace-7"


async def test_ids_and_credentials_reach_both_engines() -> None:
    seen: list[tuple[str, str]] = []

    def recorder(answer: dict[str, Any]) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        async def record(request: Request) -> Response:
            seen.append((request.headers["x-request-id"], request.headers["authorization"]))
            return JSONResponse(answer)

        return app

    p, d = recorder({"kv_transfer_params": {"a": 1}}), recorder({"ok": True})
    async with routed({"p": p, "d": d}) as setup:
        headers = {"X-Request-Id": "r1", "Authorization": "Bearer key"}
        assert (await setup.post("/v1/completions", completion(), headers=headers)).json() == {"ok": True}
    assert seen == [("r1", "Bearer key")] * 2


# ---- when P cannot ------------------------------------------------------------------------------------------------------------


def broken(status: int, body: Any, headers: dict[str, str] | None = None) -> FastAPI:
    app = FastAPI()

    @app.post("/{path:path}")
    async def answer(path: str) -> Response:
        return JSONResponse(body, status, headers)

    return app


HANGS = "hangs"


def patience(app: FastAPI | None) -> float:
    """Seconds to wait for an app: no longer than needed for one that never answers, and never too short for one that does."""
    return 1.0 if app is not None and app.title == HANGS else 30.0


def hanging() -> FastAPI:
    app = FastAPI(title=HANGS)

    @app.post("/{path:path}")
    async def hang(path: str) -> None:
        await asyncio.sleep(3600)

    return app


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_p5_while_p_sleeps_d_prefills_by_itself(path: str, stream: bool) -> None:
    p, d = engines()
    await p.sleep(SleepRequest())
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        for _ in range(2):
            assert text_of(await setup.post(path, body_of(path, stream=stream))) == "decode"
        assert await setup.paths() == {"prefill_failed": 1, "prefill_not_ready": 1}
        assert setup.router.stats().prefill[0].state == "not_ready"
        assert setup.router.stats().prefill[0].detail == "asleep"
    assert [r.kv_transfer_params for r in d.requests] == [None, None]


@pytest.mark.parametrize(
    ("p", "path"),
    [
        (None, "prefill_failed"),
        (broken(500, {"error": {"message": "x"}}), "no_hand_off"),
        (broken(502, "bad gateway"), "prefill_failed"),
        (broken(429, {"error": {"message": "busy"}}), "prefill_failed"),
        (broken(200, {"choices": []}), "no_hand_off"),
        (broken(200, {"kv_transfer_params": None}), "no_hand_off"),
        (broken(200, {"kv_transfer_params": [1]}), "no_hand_off"),
        (broken(200, [1]), "no_hand_off"),
        (hanging(), "prefill_failed"),
    ],
    ids=["refuses", "500", "502", "429", "no params", "null params", "odd params", "no object", "hangs"],
)
async def test_p5_whatever_p_does_d_answers(p: FastAPI | None, path: str) -> None:
    d = FakeEngine("decode")
    hosts: dict[str, ASGIApp] = {"d": server_app(d), **({"p": p} if p is not None else {})}
    async with routed(hosts, prefill_timeout_s=patience(p)) as setup:
        assert text_of(await setup.post("/v1/completions", completion())) == "decode"
        assert await setup.paths() == {path: 1}
    assert d.requests[0].kv_transfer_params is None


async def test_a_p_that_died_is_left_alone_for_a_while_then_asked_again() -> None:
    p, d = engines()
    async with routed({"d": server_app(d)}, backoff_s=3.0) as setup:
        await setup.post("/v1/completions", completion())
        setup.network.hosts["p"] = server_app(p)
        setup.router.prefill.backends[0].saw_ready()  # the next probe
        await setup.post("/v1/completions", completion())
        assert p.requests == []
        setup.now += 3.1
        await setup.post("/v1/completions", completion())
        assert len(p.requests) == 1
        assert setup.router.stats().prefill[0].failures_in_a_row == 0


async def test_a_second_p_is_asked_when_the_first_is_gone() -> None:
    p, d = engines()
    async with routed({"p2": server_app(p), "d": server_app(d)}, prefill=(P, "http://p2")) as setup:
        assert text_of(await setup.post("/v1/completions", completion())) == "decode"
        assert await setup.paths() == {"split": 1}


async def test_what_is_wrong_with_the_request_p_says_and_d_is_not_bothered() -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        for body in (completion(temperature=-1), completion("x" * 300), completion(model="other"), completion(unknown=1)):
            direct = await client_post(server_app(FakeEngine(connector=True)), body)
            through = await setup.post("/v1/completions", body)
            assert (through.status_code, through.json()) == (direct.status_code, direct.json())
            assert through.status_code in (400, 404)
    assert d.requests == []


async def client_post(app: ASGIApp, body: dict[str, Any]) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[97], [98]]}])
async def test_requests_of_several_sequences_are_not_split(more: dict[str, Any]) -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        response = await setup.post("/v1/completions", {**completion(), **more})
        assert len(response.json()["choices"]) == 2
    assert p.requests == []


async def test_prompts_of_one_sequence_are_split() -> None:
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        p, d = engines()
        async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
            assert text_of(await setup.post("/v1/completions", completion(prompt))) == "decode"
        assert len(p.requests) == 1


async def test_clients_cannot_steer_the_engines_channel() -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        response = await setup.post("/v1/completions", completion(kv_transfer_params={"remote_host": "evil"}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert (await setup.post("/v1/completions", completion(kv_transfer_params=None))).status_code == 200
    assert len(d.requests) == 1


@pytest.mark.parametrize("content", [b"", b"{nope", b"[]", b"[" * 100_000, b"\xff"])
async def test_bodies_that_are_no_object(content: bytes) -> None:
    async with routed({"d": server_app(FakeEngine())}) as setup:
        response = await setup.client.post("/v1/completions", content=content)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit() -> None:
    async with routed({"d": server_app(FakeEngine())}, max_body_bytes=100) as setup:
        assert (await setup.post("/v1/completions", completion("x" * 200))).status_code == 413


# ---- when D cannot ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "first", [None, broken(503, {"error": {"code": "over_capacity"}}), hanging()], ids=["refuses", "503", "hangs"]
)
async def test_another_d_answers_when_the_first_cannot(first: FastAPI | None, stream: bool) -> None:
    hosts: dict[str, ASGIApp] = {"d2": server_app(FakeEngine("second")), **({"d": first} if first is not None else {})}
    async with routed(hosts, prefill=(), decode=(D, D2), policy="round_robin", first_byte_timeout_s=patience(first)) as setup:
        assert text_of(await setup.post("/v1/completions", completion(stream=stream))) == "second"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_e10_when_every_d_sleeps_the_client_gets_its_503(stream: bool) -> None:
    first, second = FakeEngine(), FakeEngine()
    for engine in (first, second):
        await engine.sleep(SleepRequest())
    async with routed({"d": server_app(first), "d2": server_app(second)}, prefill=(), decode=(D, D2)) as setup:
        response = await setup.post("/v1/completions", completion(stream=stream))
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["code"] == "engine_asleep"
        await second.wake_up()
        assert (await setup.post("/v1/completions", completion(stream=stream))).status_code == 200


async def test_no_d_at_all_is_503_and_names_them() -> None:
    async with routed({}, prefill=(), decode=(D, D2)) as setup:
        response = await setup.post("/v1/completions", completion())
        error = response.json()["error"]
        assert (response.status_code, response.headers["retry-after"], error["code"]) == (503, "1", "over_capacity")
        assert D in error["message"]
        assert D2 in error["message"]


async def test_an_error_of_the_request_is_not_tried_elsewhere() -> None:
    first, second = FakeEngine(), FakeEngine()
    first.fail_next["generate"] = BugError("this request breaks engines")
    async with routed({"d": server_app(first), "d2": server_app(second)}, prefill=(), decode=(D, D2)) as setup:
        assert (await setup.post("/v1/completions", completion())).status_code == 500
    assert second.requests == []


async def test_a_full_d_is_not_taken_for_a_sleeping_one() -> None:
    d = FakeEngine()
    d.fail_next["generate"] = CapacityError("too many wait")
    async with routed({"d": server_app(d)}, prefill=()) as setup:
        assert (await setup.post("/v1/completions", completion())).status_code == 503
        assert setup.router.stats().decode[0].state != "not_ready"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_p5_a_hand_off_that_d_refuses_is_left_out(stream: bool) -> None:
    p, d = engines()
    d.fail_next["generate"] = RequestError("block size 16, not 32", param="kv_transfer_params")
    async with routed({"p": server_app(p), "d": server_app(d)}) as setup:
        assert text_of(await setup.post("/v1/completions", completion(stream=stream))) == "decode"
        assert await setup.paths() == {"split": 1, "hand_off_refused": 1}
    assert [r.kv_transfer_params for r in d.requests] == [None]


# ---- when D breaks off --------------------------------------------------------------------------------------------------------


def breaking_off(pieces: list[bytes], hang: bool) -> httpx.AsyncBaseTransport:
    class Body(httpx.AsyncByteStream):
        closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            if hang:
                await asyncio.sleep(3600)
            raise httpx.ReadError("connection reset")

        async def aclose(self) -> None:
            Body.closed = True

    class Transport(httpx.AsyncBaseTransport):
        body = Body

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body())

    return Transport()


@pytest.mark.parametrize("hang", [False, True], ids=["reset", "silence"])
async def test_a_stream_that_breaks_off_ends_well_formed_and_says_why(hang: bool) -> None:
    transport = breaking_off([b'data: {"choices": [1]}\n\ndata: {"cho', b'ices": [2]}\n\ndata: {"half'], hang)
    app = create_app(RouterConfig(decode=(D,), read_timeout_s=0.05), transport)
    async with client_of(app) as client:
        events = events_of((await client.post("/v1/completions", json=completion(stream=True))).text)
        await app.state.router.client.aclose()
    assert [e["choices"] for e in events[:-1]] == [[1], [2]]
    assert events[-1]["error"]["code"] == "peer_error"
    assert transport.body.closed  # type: ignore[attr-defined]
    stats = app.state.router.stats().decode[0]
    assert (stats.in_flight, stats.failures, stats.state) == (0, 1, "down")


# ---- the router's own routes --------------------------------------------------------------------------------------------------


async def test_probes_see_ready_asleep_and_gone() -> None:
    p, d = engines()
    async with routed({"p": server_app(p), "d": server_app(d)}, decode=(D, D2), health_interval_s=0.01) as setup:
        assert (await setup.client.get("/health")).status_code == 200
        not_yet = await setup.client.get("/ready")
        assert (not_yet.status_code, not_yet.json()["error"]["details"]) == (503, {D: "unknown", D2: "unknown"})
        async with setup.router.serving(setup.app):
            await p.sleep(SleepRequest())
            states: dict[str, str] = {}
            for _ in range(200):
                stats = (await setup.client.get("/stats")).json()
                states = {s["url"]: s["state"] for s in stats["prefill"] + stats["decode"]}
                if states == {P: "not_ready", D: "ready", D2: "down"}:
                    break
                await asyncio.sleep(0.01)
            assert states == {P: "not_ready", D: "ready", D2: "down"}
            assert (await setup.client.get("/ready")).json() == {"status": "ready"}
            metrics = (await setup.client.get("/metrics")).text
            assert f'torpor_router_backend_state{{role="prefill",state="not_ready",url="{P}"}} 1.0' in metrics


async def test_an_engine_without_ready_is_judged_by_its_health() -> None:
    d = FastAPI()

    @d.get("/health")
    async def health() -> dict[str, str]:
        return {}

    async with routed({"d": d}, prefill=(), health_interval_s=0.01) as setup, setup.router.serving(setup.app):
        for _ in range(200):
            if setup.router.decode.any_ready:
                break
            await asyncio.sleep(0.01)
        assert setup.router.decode.any_ready


async def test_models_come_from_a_decode_engine() -> None:
    async with routed({"d2": server_app(FakeEngine(model_name="served"))}, decode=(D, D2)) as setup:
        assert (await setup.client.get("/v1/models")).json()["data"][0]["id"] == "served"
        del setup.network.hosts["d2"]
        assert (await setup.client.get("/v1/models")).status_code == 503


async def test_json_bodies_are_passed_on_whole() -> None:
    got: list[Any] = []
    d = FastAPI()

    @d.post("/v1/completions")
    async def record(request: Request) -> Response:
        got.append(await request.json())
        return JSONResponse({"text": "ü"})

    body = {"prompt": "hé", "unknown_to_the_router": {"deep": [1, None, 2.5]}, "seed": 2**63}
    async with routed({"d": d}, prefill=()) as setup:
        assert (await setup.post("/v1/completions", body)).content == json.dumps(
            {"text": "ü"}, ensure_ascii=False, separators=(",", ":")
        ).encode()
    assert got == [body]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_to_an_engine_that_falls_silent_goes_to_the_next(stream: bool) -> None:
    """It was stopped with the request in it: nothing comes and no connection breaks."""
    stopped, other = FakeEngine("abc"), FakeEngine("abc")
    stopped.hold()
    hosts = {"d": server_app(stopped), "d2": server_app(other)}
    async with routed(hosts, prefill=(), decode=(D, D2), silence_timeout_s=5.0) as setup:
        asked = asyncio.create_task(setup.post("/v1/completions", completion(stream=stream)))
        while not stopped.active:
            await asyncio.sleep(0)
        backend = setup.router.decode.backends[0]
        backend.saw_silence("timed out")
        setup.now += 5.0
        backend.saw_silence("timed out")
        answer = await asyncio.wait_for(asked, 5)
        assert answer.status_code == 200
        assert "c" in answer.text
        assert len(other.requests) == 1


async def test_a_request_to_the_only_engine_that_falls_silent_ends_with_an_error() -> None:
    stopped = FakeEngine("abc")
    stopped.hold()
    async with routed({"d": server_app(stopped)}, prefill=(), silence_timeout_s=5.0) as setup:
        asked = asyncio.create_task(setup.post("/v1/completions", completion()))
        while not stopped.active:
            await asyncio.sleep(0)
        (backend,) = setup.router.decode.backends
        backend.saw_silence("timed out")
        setup.now += 5.0
        backend.saw_silence("timed out")
        answer = await asyncio.wait_for(asked, 5)
        assert answer.status_code == 503
        assert "silence_timeout_s" in answer.json()["error"]["message"]


async def test_a_server_whose_core_hangs_counts_as_silent() -> None:
    engine = FakeEngine("abc")
    engine.silent_for_s = 100.0
    async with routed({"d": server_app(engine)}, prefill=()) as setup:
        (backend,) = setup.router.decode.backends
        await probe(setup.router.client, backend, 1.0)
        assert backend.state.value == "down"
