"""Every error has one status and OpenAI's shape; bad input never gets past the door (issue: "What bad input gets")."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from engine_driver import Driver
from web_fakes import chat, client_of, completion, server_app

from torpor import errors
from torpor.engine.config import SleepConfig
from torpor.engine.kv_connector import refusal
from torpor.testing.fake_engine import FakeEngine
from torpor.web.errors import TABLE, ApiError, to_http
from torpor.web.wording import ROUTES_AND_OPTIONS

STATUSES: dict[type[errors.TorporError], tuple[int, str]] = {
    errors.ConfigurationError: (400, "invalid_value"),
    errors.UnknownTagError: (400, "unknown_tag"),
    errors.ModelError: (500, "model_error"),
    errors.ConnectorError: (409, "connector_refused"),
    errors.RequestError: (400, "invalid_value"),
    errors.ContextLengthError: (400, "context_length_exceeded"),
    errors.StateError: (409, "wrong_state"),
    errors.AsleepError: (503, "engine_asleep"),
    errors.SleepAborted: (409, "sleep_aborted"),
    errors.CapacityError: (503, "over_capacity"),
    errors.DeviceMemoryError: (507, "device_memory_short"),
    errors.HostMemoryError: (507, "host_memory_short"),
    errors.HookError: (503, "hook_failed"),
    errors.DeviceError: (500, "device_error"),
    errors.TransportError: (503, "transport_error"),
    errors.PeerError: (503, "peer_error"),
    errors.HandshakeError: (503, "handshake_refused"),
    errors.StaleEpochError: (503, "stale_epoch"),
    errors.EngineDeadError: (503, "engine_dead"),
    errors.BugError: (500, "internal_error"),
    errors.TorporError: (500, "internal_error"),
}


def assert_openai_shape(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == code
    assert error["param"] == param
    return error


def test_every_error_of_torpor_has_a_row_of_its_own() -> None:
    assert set(TABLE) == set(errors.RemoteError.known().values())
    assert set(STATUSES) == set(TABLE)


@pytest.mark.parametrize("kind", STATUSES, ids=lambda k: k.__name__)
async def test_each_error_of_the_engine_has_its_status_on_every_way_in(kind: type[errors.TorporError]) -> None:
    status, code = STATUSES[kind]
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        for method, path, body in (
            ("generate", "/v1/completions", completion()),
            ("generate", "/v1/chat/completions", chat()),
            ("generate", "/v1/chat/completions", chat(stream=True)),
            ("sleep", "/sleep", None),
            ("wake_up", "/wake_up", None),
        ):
            engine.fail_next[method] = kind("what went wrong, and with what")
            response = await client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), (path, response.text)
            assert response.json()["error"]["message"] == "what went wrong, and with what"


async def test_the_next_request_is_served_after_an_error() -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        engine.fail_next["generate"] = errors.BugError("boom")
        assert (await client.post("/v1/completions", json=completion())).status_code == 500
        assert (await client.post("/v1/completions", json=completion())).status_code == 200


def test_e10_asleep_says_when_to_come_back_in_whole_seconds() -> None:
    answer = to_http(errors.AsleepError("asleep", retry_after_s=2.3, state="asleep"))
    assert answer.headers == {"Retry-After": "3"}
    assert answer.body["error"]["details"] == {"retry_after_s": 2.3, "state": "asleep"}


def in_the_engines_words() -> Iterator[errors.TorporError]:
    """Every error of the engine that names a call or a setting, from the engine itself."""
    engine, plain = Driver(), Driver(sleep=SleepConfig())
    try:
        engine.add("a", 200)
        engine.step(2)
        engine.sleep(level=1)
        yield from failures(lambda: engine.sleep(level=2).result(0))
        engine.core.wake_up()
        engine.settle()
        engine.slept(level=1)
        yield from failures(lambda: engine.add("b"), lambda: engine.core.resume().result(0))
        yield from failures(lambda: plain.sleep(level=1).result(0))
        yield refusal("pinned", "start-up is refused")
    finally:
        engine.close()
        plain.close()


def failures(*calls: Callable[[], object]) -> Iterator[errors.TorporError]:
    for call in calls:
        with pytest.raises(errors.TorporError) as caught:
            call()
        yield caught.value


def test_a_user_of_http_is_told_of_routes_and_options() -> None:
    found = list(in_the_engines_words())
    messages = [to_http(error).body["error"]["message"] for error in found]
    assert not [m for m in messages if re.search(r"\w\(.*?\)|\w=", m.replace("level=0", "").replace("connector(s)", ""))], (
        messages
    )
    for phrase, words in ROUTES_AND_OPTIONS:
        assert any(phrase in error.message for error in found), f"no error says {phrase} any more"
        assert any(words in message for message in messages)
    assert "wake_up()" in errors.AsleepError("call wake_up()").message  # a library's user has calls
    quoted = errors.RequestError("stop: 'wake_up()' is too long", param="stop")
    assert "'wake_up()'" in to_http(quoted).body["error"]["message"]


def test_bytes_needed_and_free_reach_the_client() -> None:
    answer = to_http(errors.HostMemoryError("short", bytes_needed=10, bytes_free=3))
    assert answer.body["error"]["details"] == {"bytes_needed": 10, "bytes_free": 3}


def test_fields_that_are_no_json_become_text() -> None:
    answer = to_http(errors.SleepAborted("late", waiting_for=("peer d1",), reason=ValueError("x"), seconds=float("inf")))
    assert json.loads(json.dumps(answer.body, allow_nan=False))["error"]["details"]["waiting_for"] == ["peer d1"]


def test_a_foreign_exception_gives_nothing_away() -> None:
    answer = to_http(RuntimeError("secret path /home/x"))
    assert answer.status == 500
    assert "secret" not in json.dumps(answer.body)


def test_api_errors_keep_their_headers() -> None:
    assert to_http(ApiError(401, "no", code="c", headers={"WWW-Authenticate": "Bearer"})).headers == {
        "WWW-Authenticate": "Bearer"
    }


BAD_BODIES = [
    ("/v1/completions", completion(temperature=-1), "invalid_value", "temperature"),
    ("/v1/completions", completion(temperature="hot"), "invalid_value", "temperature"),
    ("/v1/completions", completion(max_tokens=0), "invalid_value", "max_tokens"),
    ("/v1/completions", completion(max_tokens=True), "invalid_value", "max_tokens"),
    ("/v1/completions", completion(max_tokens="3"), "invalid_value", "max_tokens"),
    ("/v1/completions", completion(top_p=0), "invalid_value", "top_p"),
    ("/v1/completions", completion(n=0), "invalid_value", "n"),
    ("/v1/completions", completion(n=65), "invalid_value", "n"),
    ("/v1/completions", completion(logprobs=21), "invalid_value", "logprobs"),
    ("/v1/completions", completion(stop=""), "invalid_value", "stop"),
    ("/v1/completions", completion(stop=[1]), "invalid_value", "stop"),
    ("/v1/completions", completion(min_tokens=9, max_tokens=3), "invalid_value", "min_tokens"),
    ("/v1/completions", completion(stop_token_ids=[999]), "invalid_value", "stop_token_ids"),
    ("/v1/completions", completion(prompt=[]), "invalid_value", "prompt"),
    ("/v1/completions", completion(prompt=""), "invalid_value", "prompt"),
    ("/v1/completions", completion(prompt=[1, "a"]), "invalid_value", "prompt"),
    ("/v1/completions", completion(prompt=[-1]), "invalid_value", "prompt"),
    ("/v1/completions", completion(prompt=[257]), "invalid_value", "prompt"),
    ("/v1/completions", completion(prompt="x" * 257), "context_length_exceeded", "prompt"),
    ("/v1/completions", completion(prompt="x" * 70000), "context_length_exceeded", "prompt"),
    ("/v1/completions", {"model": "fake"}, "invalid_value", "prompt"),
    ("/v1/completions", completion(echo=True, logprobs=1), "invalid_value", "echo"),
    ("/v1/completions", completion(suffix="end"), "unsupported_parameter", "suffix"),
    ("/v1/completions", completion(best_of=2), "unsupported_parameter", "best_of"),
    ("/v1/completions", completion(logit_bias={"1": 5}), "unsupported_parameter", "logit_bias"),
    ("/v1/completions", completion(stream_options={"include_usage": True}), "invalid_value", "stream_options"),
    ("/v1/completions", completion(kv_transfer_params=[1]), "invalid_value", "kv_transfer_params"),
    ("/v1/completions", completion(tempreature=1), "unknown_parameter", "tempreature"),
    ("/v1/chat/completions", chat(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
    ("/v1/chat/completions", chat(functions=[{}]), "unsupported_parameter", "functions"),
    ("/v1/chat/completions", chat(audio={"voice": "x"}), "unsupported_parameter", "audio"),
    ("/v1/chat/completions", chat(response_format={"type": "json_object"}), "unsupported_parameter", "response_format"),
    ("/v1/chat/completions", chat("x" * 257), "context_length_exceeded", "messages"),
    ("/v1/chat/completions", chat("x" * 70000), "context_length_exceeded", "messages"),
    ("/v1/chat/completions", chat(top_logprobs=2), "invalid_value", "top_logprobs"),
    ("/v1/chat/completions", chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "invalid_value", "chat_template_kwargs"),
    ("/v1/chat/completions", chat(chat_template_kwargs={"refuse": True}), "invalid_value", "messages"),
    ("/v1/chat/completions", {"model": "fake", "messages": []}, "invalid_value", "messages"),
    (
        "/v1/chat/completions",
        {"model": "fake", "messages": [{"role": "tool", "content": "x"}]},
        "invalid_value",
        "messages.0.role",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", None),
]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"), BAD_BODIES, ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else ""
)
async def test_bad_bodies_are_400_and_name_the_field(path: str, body: dict[str, Any], code: str, param: str | None) -> None:
    engine = FakeEngine()
    async with client_of(server_app(engine)) as client:
        response = await client.post(path, json=body)
    error = assert_openai_shape(response, 400, code, param or response.json()["error"]["param"])
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


async def test_the_message_shows_the_value_and_what_would_be_right() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        message = (await client.post("/v1/completions", json=completion(top_p=7))).json()["error"]["message"]
        assert "top_p" in message
        assert "7" in message
        assert "less than or equal to 1" in message
        mode = (await client.post("/sleep?mode=later")).json()["error"]["message"]
        assert "later" in mode
        assert "abort" in mode


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "a text must not be empty (given: '')"),
        (5, "a text, token ids, or a list of either is needed (given: 5)"),
        (None, "a text, token ids, or a list of either is needed"),
        ({"a": 1}, "a text, token ids, or a list of either is needed"),
        ([None], "a text, token ids, or a list of either is needed"),
        ([1.0], "a text, token ids, or a list of either is needed"),
        ([], "a list of 1 to 1024 prompts is needed, this one has 0"),
        (["a"] * 1025, "a list of 1 to 1024 prompts is needed, this one has 1025"),
        ([1] * ((1 << 21) + 1), "a list of 1 to 2097152 token ids is needed, this one has 2097153"),
        ([[1]] * 1025, "a list of 1 to 1024 prompts is needed, this one has 1025"),
        (["a", ""], "item 1: a text must not be empty"),
        (["a", 5], "item 1: a text is needed, as the first item is one"),
        ([1, "a"], "item 1: token ids are integers from 0 to 2147483647"),
        ([-1], "item 0: token ids are integers from 0 to 2147483647"),
        ([1, 2**31], "item 1: token ids are integers from 0 to 2147483647"),
        ([True], "item 0: token ids are integers from 0 to 2147483647"),
        ([[]], "item 0: a list of 1 to 2097152 token ids is needed, this one has 0"),
        ([[1], "a"], "item 1: a list of token ids is needed, as the first item is one"),
        ([[1], [2, 3.0]], "item 1: item 1: token ids are integers from 0 to 2147483647"),
    ],
    ids=lambda v: str(v)[:30],
)
async def test_a_prompt_is_told_what_is_wrong_with_it(prompt: Any, message: str) -> None:
    async with client_of(server_app(FakeEngine(), max_body_bytes=1 << 24)) as client:
        response = await client.post("/v1/completions", json=completion(prompt))
    assert assert_openai_shape(response, 400, "invalid_value", "prompt")["message"] == f"prompt: {message}"


@pytest.mark.parametrize("prompt", ["a", [97], ["a", "b"], [[97], [98]]])
async def test_each_kind_of_prompt_is_taken(prompt: Any) -> None:
    async with client_of(server_app(FakeEngine())) as client:
        assert (await client.post("/v1/completions", json=completion(prompt))).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{nope", "application/json", "invalid_json"),
        (b"", "application/json", "invalid_value"),
        (b"[1]", "application/json", "invalid_value"),
        (b"null", "application/json", "invalid_value"),
        (b"{}", "text/plain", "invalid_value"),
        (b"\xff\xfe", "application/json", "invalid_json"),
        (b"[" * 100_000, "application/json", "invalid_request"),
    ],
    ids=["broken", "empty", "list", "null", "text", "no utf-8", "deep"],
)
async def test_bodies_that_are_no_object_are_400(content: bytes, kind: str, code: str) -> None:
    async with client_of(server_app(FakeEngine())) as client:
        response = await client.post("/v1/completions", content=content, headers={"content-type": kind})
        assert_openai_shape(response, 400, code)


async def test_half_a_surrogate_pair_is_the_fault_of_the_field_it_was_in() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        headers = {"content-type": "application/json"}
        talk = b'{"messages":[{"role":"user","content":"a\\ud800"}]}'
        for path, content, param in (
            ("/v1/completions", b'{"prompt":"\\ud800"}', "prompt"),
            ("/v1/completions", b'{"prompt":"a","stop":"\\ud800"}', "stop"),
            ("/v1/chat/completions", talk, "messages"),
        ):
            assert_openai_shape(await client.post(path, content=content, headers=headers), 400, "invalid_value", param)


async def test_nan_is_no_number() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=b'{"prompt":"a","temperature":NaN}', headers=headers)
        assert_openai_shape(response, 400, "invalid_value", "temperature")


async def test_an_unknown_model_is_404_and_names_the_served_one() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        for path, body in (("/v1/completions", completion(model="gpt-4")), ("/v1/chat/completions", chat(model="gpt-4"))):
            error = assert_openai_shape(await client.post(path, json=body), 404, "model_not_found", "model")
            assert "'fake'" in error["message"]
        assert_openai_shape(await client.get("/v1/models/gpt-4"), 404, "model_not_found", "model")


async def test_unknown_routes_and_methods() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        assert_openai_shape(await client.get("/v1/embeddings"), 404, "not_found")
        refused = await client.get("/v1/completions")
        assert_openai_shape(refused, 405, "method_not_allowed")
        assert refused.headers["allow"] == "POST"


async def test_a_body_over_the_limit_is_413_with_and_without_a_length() -> None:
    engine = FakeEngine(max_model_len=4096)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with client_of(server_app(engine, max_body_bytes=1000)) as client:
        assert_openai_shape(await client.post("/v1/completions", json=completion("y" * 1000)), 413, "body_too_large")
        headers = {"content-type": "application/json"}
        assert_openai_shape(await client.post("/v1/completions", content=pieces(), headers=headers), 413, "body_too_large")
        assert (await client.post("/v1/completions", json=completion("y" * 500))).status_code == 200
