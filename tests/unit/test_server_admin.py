"""The admin routes and their door; probes and metrics, awake, asleep and dead (E2, E7, E10)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from web_fakes import chat, client_of, completion, server_app

from torpor.engine.base import SleepRequest
from torpor.errors import HookError, ModelError, SleepAborted
from torpor.testing.fake_engine import TAG_BYTES, FakeEngine

TOKEN = "a-long-admin-token"
ADMIN = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_kv_cache_memory"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/memory"),
]


# ---- the door -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_with_a_token_only_the_token_opens(method: str, path: str) -> None:
    app = server_app(FakeEngine(), admin_token=TOKEN)
    for peer in (("127.0.0.1", 1), ("10.0.0.9", 1)):
        async with client_of(app, peer) as client:
            missing = await client.request(method, path)
            assert (missing.status_code, missing.json()["error"]["code"]) == (401, "missing_authorization")
            assert missing.headers["www-authenticate"] == "Bearer"
            for wrong in ("Bearer nope", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer", "Bearer ü"):
                response = await client.request(method, path, headers={"Authorization": wrong.encode("latin-1")})
                assert response.status_code == 401, wrong
            assert (await client.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_without_a_token_only_this_machine_opens(method: str, path: str) -> None:
    engine = FakeEngine()
    app = server_app(engine)
    for host in ("10.0.0.9", "::2", "testclient", ""):
        async with client_of(app, (host, 1)) as client:
            response = await client.request(method, path)
            assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error"), host
    assert engine.sleep_requests == []
    for host in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        async with client_of(app, (host, 1)) as client:
            assert (await client.request(method, path)).status_code == 200, host


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin"])
async def test_without_a_token_neither_a_proxy_nor_a_page_opens(header: str) -> None:
    async with client_of(server_app(FakeEngine())) as client:
        assert (await client.post("/sleep", headers={header: "127.0.0.1"})).status_code == 403


async def test_an_api_key_guards_v1_and_nothing_else() -> None:
    async with client_of(server_app(FakeEngine(), api_key="sk-12345678")) as client:
        assert (await client.post("/v1/completions", json=completion())).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        key = {"Authorization": "Bearer sk-12345678"}
        assert (await client.post("/v1/chat/completions", json=chat(), headers=key)).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version", "/is_sleeping"):
            assert (await client.get(path)).status_code == 200


# ---- sleep and wake -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        ("", None, SleepRequest()),
        ("?level=2&mode=abort&deadline_s=3", None, SleepRequest(level=2, mode="abort", deadline_s=3)),
        ("", {"level": 0, "mode": "keep"}, SleepRequest(level=0, mode="keep")),
        ("?mode=keep", {"policies": {"weights": "keep"}}, SleepRequest(mode="keep", policies={"weights": "keep"})),
    ],
)
async def test_e2_a_sleep_is_asked_for_in_the_query_or_as_json(query: str, body: Any, expected: SleepRequest) -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        response = await client.post(f"/sleep{query}", json=body)
    assert response.status_code == 200, response.text
    assert engine.sleep_requests == [expected]


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("?level=3", None, "level"),
        ("?level=deep", None, "level"),
        ("?mode=later", None, "mode"),
        ("?deadline_s=0", None, "deadline_s"),
        ("?deadline_s=nan", None, "deadline_s"),
        ("?lvl=2", None, "lvl"),
        ("?level=1", {"level": 2}, "level"),
        ("?level=1", {"policies": {"weights": "keep"}}, "policies"),
        ("", {"policies": {"weights": "eat"}}, "policies.weights"),
        ("", {"policies": {}}, "policies"),
        ("", {"level": "1"}, "level"),
        ("", {"tags": ["weights"]}, "tags"),
    ],
)
async def test_e2_a_sleep_that_makes_no_sense_is_refused_and_names_the_setting(query: str, body: Any, param: str) -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        response = await client.post(f"/sleep{query}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.sleep_requests == []


async def test_e10_asleep_it_is_alive_not_ready_and_says_when_to_come_back() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        report = (await client.post("/sleep?level=1")).json()
        assert report["returned_bytes"] == sum(TAG_BYTES.values())
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True, "state": "asleep"}
        assert (await client.get("/health")).json() == {"status": "ok", "state": "asleep"}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "asleep")
        for stream in (False, True):
            refused = await client.post("/v1/chat/completions", json=chat(stream=stream))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "asleep" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models")).status_code == 200
        await client.post("/wake_up")
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False, "state": "awake"}
        assert (await client.get("/ready")).json() == {"status": "ready", "state": "awake"}
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize("query", ["?tags=weights&tags=runtime", "?tags=weights,runtime", "?tags=weights,%20runtime"])
async def test_e7_a_partial_wake_does_not_serve(query: str) -> None:
    async with client_of(server_app(FakeEngine())) as client:
        await client.post("/sleep")
        assert (await client.post(f"/wake_up{query}")).json()["state"] == "asleep"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/wake_up?tags=kv_cache")).json()["state"] == "awake"
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [("?tags=cache", "unknown_tag", "tags"), ("?tags=", "invalid_value", "tags.0"), ("?tags=weights,", "invalid_value", "tags")],
)
async def test_tags_that_name_nothing(query: str, code: str, param: str) -> None:
    async with client_of(server_app(FakeEngine())) as client:
        await client.post("/sleep")
        response = await client.post(f"/wake_up{query}")
        assert (response.status_code, response.json()["error"]["code"], response.json()["error"]["param"]) == (400, code, param)
        assert (await client.get("/is_sleeping")).json()["is_sleeping"]


class TestUpdateWeights:
    async def test_it_is_an_admin_route(self) -> None:
        async with client_of(server_app(FakeEngine(), admin_token=TOKEN)) as client:
            assert (await client.post("/update_weights", json={"model": "m"})).status_code == 401
        async with client_of(server_app(FakeEngine()), ("10.0.0.9", 1)) as client:
            assert (await client.post("/update_weights", json={"model": "m"})).status_code == 403

    async def test_asleep_it_names_the_next_weights(self) -> None:
        async with client_of(server_app(FakeEngine())) as client:
            await client.post("/sleep?level=2")
            report = (await client.post("/update_weights", json={"model": "/models/step-2"})).json()
            assert (report["operation"], report["state"], report["model_id"]) == ("update_weights", "asleep", "/models/step-2")
            assert (await client.get("/v1/models")).json()["data"][0]["root"] == "/models/step-2"
            assert (await client.get("/memory")).json()["model_id"] == "/models/step-2"

    async def test_awake_it_is_the_wrong_moment(self) -> None:
        async with client_of(server_app(FakeEngine())) as client:
            response = await client.post("/update_weights", json={"model": "m"})
            assert (response.status_code, response.json()["error"]["code"]) == (409, "wrong_state")

    @pytest.mark.parametrize("body", [None, {}, {"model": ""}, {"model": 7}, {"model": "m", "tags": []}, {"model": "m" * 5000}])
    async def test_a_body_that_names_no_model_is_refused(self, body: Any) -> None:
        async with client_of(server_app(FakeEngine())) as client:
            await client.post("/sleep?level=2")
            response = await client.post("/update_weights", json=body)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")

    async def test_files_that_do_not_do_are_the_callers(self) -> None:
        engine = FakeEngine()
        async with client_of(server_app(engine)) as client:
            await client.post("/sleep?level=2")
            engine.fail_next["update_weights"] = ModelError("no such file or folder", path="m")
            response = await client.post("/update_weights", json={"model": "m"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_pause_resume_and_release() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        assert (await client.post("/pause?mode=abort")).json()["state"] == "paused"
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False, "state": "paused"}
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/resume")).json()["state"] == "awake"
        assert (await client.post("/release_kv_cache_memory")).json()["unmapped_bytes"] == TAG_BYTES["kv_cache"]
        assert (await client.post("/pause?mode=gently")).status_code == 400


async def test_a_stopped_sleep_names_who_did_not_let_go() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        engine.fail_next["sleep"] = SleepAborted("deadline of 1 s passed", reason="deadline", waiting_for="peer d1")
        response = await client.post("/sleep?deadline_s=1")
        assert (response.status_code, response.json()["error"]["details"]["waiting_for"]) == (409, "peer d1")
        assert (await client.get("/ready")).status_code == 200


# ---- stats, health, metrics ---------------------------------------------------------------------------------------------------


async def test_memory_is_the_engines_stats() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        assert (await client.get("/memory")).json() == await engine.stats()


async def test_a_busy_engine_answers_memory_and_metrics_with_the_last_known() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine, stats_timeout_s=0.2)) as client:
        fresh = (await client.get("/memory")).json()
        engine.stall("stats")
        assert (await client.get("/memory")).json() == {**fresh, "stale": True}
        assert "torpor_pool_resident_bytes" in (await client.get("/metrics")).text


async def test_health_of_an_engine_that_is_dead_or_does_not_answer() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine, health_timeout_s=0.2)) as client:
        engine.silent_for_s = 0.1
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        engine.silent_for_s = 0.3
        for silent in (
            await client.get("/health"),
            await client.get("/ready"),
            await client.post("/v1/completions", json=completion()),
            await client.post("/sleep"),
        ):
            assert (silent.status_code, silent.json()["error"]["code"]) == (503, "engine_unresponsive")
        engine.die()
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 503
        assert (await client.get("/ready")).json()["error"]["code"] == "dead"
        assert (await client.post("/v1/completions", json=completion())).json()["error"]["code"] == "engine_dead"
        assert (await client.get("/v1/models")).status_code == 200
        assert figures((await client.get("/metrics")).text)["torpor_up", ()] == 0


def figures(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def labels(**given: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(given.items()))


async def test_metrics_tell_the_state_of_the_moment_that_their_figures_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls asleep while its figures are on their way: no scrape shows an engine that sleeps with all its memory."""
    engine = FakeEngine()
    plain = engine.stats

    async def stats() -> dict[str, Any]:
        found = await plain()
        await engine.sleep(SleepRequest())
        return found

    monkeypatch.setattr(engine, "stats", stats)
    async with client_of(server_app(engine)) as client:
        seen = figures((await client.get("/metrics")).text)
    assert seen["torpor_engine_state", (("state", "awake"),)] == 1
    assert seen["torpor_engine_state", (("state", "asleep"),)] == 0


async def test_metrics_count_what_happened() -> None:
    engine = FakeEngine("abc")
    async with client_of(server_app(engine)) as client:
        await client.post("/v1/chat/completions", json=chat())
        await client.post("/v1/completions", json=completion(["a", "b"], max_tokens=2))
        await client.post("/v1/completions", json=completion("x" * 300))
        await client.post("/v1/completions", json=completion([300]))
        await client.post("/v1/chat/completions", json=chat("x" * 300))
        await client.post("/sleep")
        await client.post("/v1/completions", json=completion())
        engine.fail_next["wake_up"] = HookError("after_map hook failed", hook="connector", tag="kv_cache", phase="after_map")
        await client.post("/wake_up")
        seen = figures((await client.get("/metrics")).text)
    assert seen["torpor_requests_total", labels(route="chat", outcome="stop")] == 1
    assert seen["torpor_requests_total", labels(route="completions", outcome="length")] == 1
    assert seen["torpor_requests_total", labels(route="completions", outcome="engine_asleep")] == 1
    assert seen["torpor_requests_total", labels(route="completions", outcome="invalid_value")] == 1
    for route in ("completions", "chat"):
        assert seen["torpor_requests_total", labels(route=route, outcome="context_length_exceeded")] == 1
    assert seen["torpor_requests_open", labels(route="chat")] == 0
    assert seen["torpor_prompt_tokens_total", ()] == len("user: hi\n") + 2
    assert seen["torpor_generation_tokens_total", ()] == 4 + 4
    assert seen["torpor_time_to_first_token_seconds_count", labels(route="completions")] == 1
    assert seen["torpor_operations_total", labels(operation="sleep", outcome="done")] == 1
    assert seen["torpor_operations_total", labels(operation="wake_up", outcome="hook_failed")] == 1
    assert seen["torpor_pool_resident_bytes", labels(tag="weights")] == 0
    assert seen["torpor_pool_residency", labels(tag="weights", residency="asleep")] == 1
    assert seen["torpor_engine_state", labels(state="asleep")] == 1
    assert seen["torpor_sleeps_total", ()] == 1


async def test_two_servers_in_one_process_count_apart() -> None:
    first, second = server_app(FakeEngine()), server_app(FakeEngine())
    async with client_of(first) as one, client_of(second) as two:
        await one.post("/v1/completions", json=completion())
        assert "torpor_requests_total" in (await one.get("/metrics")).text
        assert ("torpor_generation_tokens_total", ()) in figures((await two.get("/metrics")).text)
        assert figures((await two.get("/metrics")).text)["torpor_generation_tokens_total", ()] == 0


# ---- the OpenAPI document -----------------------------------------------------------------------------------------------------


async def test_the_document_declares_every_answer() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        document = (await client.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            if path.startswith("/v1") and "post" in operations:
                assert {"200", "400", "401", "404", "409", "413", "500", "503"} <= set(operation["responses"])
    sleep = document["paths"]["/sleep"]["post"]["responses"]
    assert {"200", "400", "401", "403", "409", "413", "500", "503", "507"} <= set(sleep)
    chat_content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(chat_content) == {"application/json", "text/event-stream"}
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] is False


async def test_probes_do_not_wait_for_a_sleep_that_takes_long() -> None:
    engine = FakeEngine()
    engine.stall("sleep")
    async with client_of(server_app(engine)) as client:
        sleeping = asyncio.create_task(client.post("/sleep"))
        for path in ("/health", "/ready", "/is_sleeping", "/metrics", "/v1/models"):
            assert (await asyncio.wait_for(client.get(path), 2)).status_code == 200, path
        engine.unstall()
        assert (await sleeping).status_code == 200
