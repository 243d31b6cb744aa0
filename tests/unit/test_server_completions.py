"""``/v1/completions`` and ``/v1/chat/completions``: what goes in, and OpenAI's shapes out, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from web_fakes import chat, client_of, completion, events_of, server_app

from torpor.errors import AsleepError, EngineDeadError
from torpor.request import TokenLogprobs
from torpor.server.logprobs import CompletionLogprobsBuilder
from torpor.server.wire import NEUTRAL, UNSUPPORTED
from torpor.testing.fake_engine import EOS, FakeEngine
from torpor.testing.fake_frontend import fake_frontend

HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}


async def post(engine: FakeEngine, path: str, body: dict[str, Any]) -> Any:
    async with client_of(server_app(engine)) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json() if response.headers["content-type"] == "application/json" else events_of(response.text)


async def test_a_completion_has_openais_shape() -> None:
    answer = await post(FakeEngine("abc"), "/v1/completions", completion())
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "kv_transfer_params" not in answer


async def test_a_chat_completion_has_openais_shape() -> None:
    answer = await post(FakeEngine("abc"), "/v1/chat/completions", chat())
    ChatCompletion.model_validate(answer)
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"]["prompt_tokens"] == len("user: hi\n")


async def test_the_conversation_goes_through_the_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
    ]
    await post(engine, "/v1/chat/completions", {"messages": messages})
    assert bytes(engine.requests[0].prompt_token_ids).decode() == "system: be brief\nuser: ab\nassistant: c\n"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_every_kind_of_prompt(prompt: Any, prompts: list[bytes]) -> None:
    engine = FakeEngine("xy")
    answer = await post(engine, "/v1/completions", completion(prompt, n=2))
    assert sorted({bytes(r.prompt_token_ids) for r in engine.requests}) == sorted(prompts)
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(prompts)))
    assert all(c["text"] == "xy" for c in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 3 * 2 * len(prompts)


async def test_request_ids_are_unique_at_the_engine() -> None:
    engine = FakeEngine()
    await post(engine, "/v1/completions", completion(["a", "b"], n=3))
    assert len({r.request_id for r in engine.requests}) == 6


async def test_sampling_reaches_the_engine() -> None:
    engine = FakeEngine()
    choosing = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7, "logprobs": 3}
    ending = {"stop": ["Q", "Z"], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2, "max_tokens": 5}
    penalties = {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.2}
    showing = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    body = completion(**choosing, **ending, **penalties, **showing)
    await post(engine, "/v1/completions", body)
    s = engine.requests[0].sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed, s.logprobs) == (0.5, 0.9, 0, 0.1, 7, 3)
    assert (s.stop, s.stop_token_ids, s.ignore_eos, s.min_tokens, s.max_tokens) == (("Q", "Z"), (3,), True, 2, 5)
    assert (s.frequency_penalty, s.presence_penalty, s.repetition_penalty) == (0.1, -0.1, 1.2)
    assert (s.skip_special_tokens, s.include_stop_str_in_output) == (False, True)


async def test_nulls_are_defaults_and_limits_are_openais() -> None:
    engine = FakeEngine(max_model_len=100)
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "max_tokens", "stream", "logprobs", "top_k", "user"))
    await post(engine, "/v1/completions", completion(**nulls))
    await post(engine, "/v1/chat/completions", chat(**nulls))
    await post(engine, "/v1/chat/completions", chat(max_tokens=3, max_completion_tokens=2))
    completions, chats, limited = (r.sampling for r in engine.requests)
    assert (completions.max_tokens, completions.temperature, completions.top_p) == (16, 1.0, 1.0)
    assert chats.max_tokens == 100 - len("user: hi\n")
    assert limited.max_tokens == 2


async def test_unsupported_fields_that_ask_for_nothing_are_let_through() -> None:
    empty = {name: NEUTRAL[name][0] if name in NEUTRAL else None for name in UNSUPPORTED}
    await post(FakeEngine(), "/v1/chat/completions", chat(**empty))
    await post(FakeEngine(), "/v1/completions", completion(**{**empty, "tools": [], "logit_bias": {}}))


async def test_harmless_fields_have_no_effect() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    engine = FakeEngine("abc")
    await post(engine, "/v1/completions", completion(seed=1, **fields))
    await post(engine, "/v1/completions", completion(seed=1))
    assert engine.requests[0].sampling == engine.requests[1].sampling


async def test_the_end_by_length_and_by_a_stop_string() -> None:
    engine = FakeEngine("hello world")
    by_length = (await post(engine, "/v1/completions", completion(max_tokens=3)))["choices"][0]
    by_string = (await post(engine, "/v1/completions", completion(stop=[" w"])))["choices"][0]
    assert (by_length["text"], by_length["finish_reason"], by_length["stop_reason"]) == ("hel", "length", None)
    assert (by_string["text"], by_string["finish_reason"], by_string["stop_reason"]) == ("hello", "stop", " w")
    assert engine.active == set()


async def test_echo_puts_the_prompt_before_every_choice() -> None:
    whole = await post(FakeEngine("!"), "/v1/completions", completion(["a", [98]][0], echo=True, n=2))
    assert [c["text"] for c in whole["choices"]] == ["a!", "a!"]
    tokens = await post(FakeEngine("!"), "/v1/completions", completion([98, 99], echo=True))
    assert tokens["choices"][0]["text"] == "bc!"
    events = await post(FakeEngine("!"), "/v1/completions", completion("a", echo=True, n=2, stream=True))
    for index in (0, 1):
        assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) == "a!"


async def test_log_probabilities_of_completions() -> None:
    answer = await post(FakeEngine("ab"), "/v1/completions", completion(max_tokens=2, logprobs=2))
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"b": -0.5, "a": -9999.0}],
    }
    events = await post(FakeEngine("ab"), "/v1/completions", completion(max_tokens=2, logprobs=0, stream=True))
    streamed = [e["choices"][0]["logprobs"] for e in events]
    assert [s["text_offset"] for s in streamed] == [[0], [1]]
    assert [s["top_logprobs"] for s in streamed] == [[{"a": -0.5}], [{"b": -0.5}]]


@pytest.mark.parametrize("text", ["hé日x", "🦙!", "日日"])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_point_into_the_text_also_where_a_character_takes_several_tokens(text: str, stream: bool) -> None:
    answer = await post(FakeEngine(text), "/v1/completions", completion(max_tokens=30, logprobs=0, stream=stream))
    answers = answer if stream else [answer]
    assert "".join(a["choices"][0]["text"] for a in answers) == text
    offsets = [offset for a in answers for offset in a["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [*(i for i, c in enumerate(text) for _ in c.encode()), len(text)]


@pytest.mark.parametrize(
    ("prompt", "hides", "tokens", "offsets"),
    [
        ([97], True, [104, EOS, 105], [0, 1, 1]),
        ([97], False, [104, EOS, 105], [0, 1, 6]),
        ([97, 0xE6], True, [0x97, 0xA5, 120], [0, 0, 1]),
        ([97, 0xE6], True, [0x97, EOS, 0xA5, 120], [0, 0, 0, 1]),
        ([97], True, [0xFF, 120, 121], [0, 1, 2]),
    ],
    ids=["hidden", "shown", "begun by the prompt", "hidden inside a character", "no character"],
)
def test_text_offsets(prompt: list[int], hides: bool, tokens: list[int], offsets: list[int]) -> None:
    builder = CompletionLogprobsBuilder(fake_frontend(), prompt, hides_special=hides)
    positions = [TokenLogprobs(token_id=t, logprob=-1.0, rank=1) for t in tokens]
    assert builder.build(positions[:1]).text_offset + builder.build(positions[1:]).text_offset == offsets


def test_parts_of_characters_have_names_of_their_own() -> None:
    """Five different tokens that read as U+FFFD would be one entry, with the last one's log-probability."""
    builder = CompletionLogprobsBuilder(fake_frontend(), [97])
    position = TokenLogprobs(
        token_id=0xE7, logprob=-3.0, rank=3, top_ids=[0xE6, 0xE5, 0xE7, 97], top_logprobs=[-1.0, -2.0, -3.0, -4.0]
    )
    found = builder.build([position])
    assert found.tokens == ["bytes:\\xe7"]
    assert list(found.top_logprobs[0].items()) == [
        ("bytes:\\xe6", -1.0),
        ("bytes:\\xe5", -2.0),
        ("bytes:\\xe7", -3.0),
        ("a", -4.0),
    ]


def test_of_tokens_that_read_the_same_the_chosen_one_has_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies with byte fallback have "a" twice."""
    frontend = fake_frontend()
    monkeypatch.setattr(frontend, "token_bytes", lambda token_id: b"a")
    position = TokenLogprobs(token_id=5, logprob=-2.0, rank=2, top_ids=[4, 5, 6], top_logprobs=[-1.0, -2.0, -3.0])
    found = CompletionLogprobsBuilder(frontend, [97]).build([position])
    assert (found.tokens, found.token_logprobs) == (["a"], [-2.0])
    assert found.top_logprobs == [{"token_id:4": -1.0, "a": -2.0, "token_id:6": -3.0}]


async def test_log_probabilities_of_chats() -> None:
    answer = await post(FakeEngine("ab"), "/v1/chat/completions", chat(max_tokens=1, logprobs=True, top_logprobs=2))
    ChatCompletion.model_validate(answer)
    (position,) = answer["choices"][0]["logprobs"]["content"]
    assert (position["token"], position["logprob"], position["bytes"]) == ("a", -0.5, [97])
    assert [(t["token"], t["logprob"]) for t in position["top_logprobs"]] == [("a", -0.5), ("b", -9999.0)]
    chosen_only = await post(FakeEngine("ab"), "/v1/chat/completions", chat(max_tokens=1, logprobs=True))
    assert chosen_only["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_streamed_chat_has_openais_shape() -> None:
    events = await post(FakeEngine("abc"), "/v1/chat/completions", chat(stream=True))
    for event in events:
        ChatCompletionChunk.model_validate(event)
        assert "usage" not in event
    assert len({e["id"] for e in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "abc"
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1]["choices"][0]["delta"] == {}


async def test_a_streamed_chat_of_two_choices_has_a_role_and_an_end_for_each() -> None:
    events = await post(FakeEngine("abc"), "/v1/chat/completions", chat(stream=True, n=2))
    for index in (0, 1):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == "abc"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


async def test_a_streamed_completion_has_openais_shape() -> None:
    events = await post(FakeEngine("abc"), "/v1/completions", completion(stream=True, max_tokens=3))
    Completion.model_validate(events[-1])  # the client's type knows no null reason, which the service itself sends before the end
    assert {tuple(e) for e in events} == {("id", "object", "created", "model", "choices")}
    assert "".join(e["choices"][0]["text"] for e in events) == "abc"
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, "length"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_of_a_stream_comes_last_and_is_null_before(path: str) -> None:
    body = {**(chat() if "chat" in path else completion()), "stream": True, "stream_options": {"include_usage": True}}
    *events, last = await post(FakeEngine("abc"), path, body)
    assert all(e["usage"] is None for e in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    body["stream_options"]["continuous_usage_stats"] = True
    events = await post(FakeEngine("abc"), path, body)
    assert [e["usage"]["completion_tokens"] for e in events][-1] == 4
    assert all(e["usage"] is not None for e in events)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_hand_off_goes_out_and_comes_in_at_the_top_level(path: str) -> None:
    body = chat() if "chat" in path else completion()
    prefill, decode = FakeEngine(connector=True), FakeEngine()
    answer = await post(prefill, path, {**body, "max_tokens": 1, "kv_transfer_params": HAND_OFF})
    params = answer["kv_transfer_params"]
    assert params["remote_engine_id"] == "fake-engine"
    await post(decode, path, {**body, "kv_transfer_params": params})
    assert decode.requests[0].kv_transfer_params == params
    streamed = await post(prefill, path, {**body, "max_tokens": 1, "stream": True, "kv_transfer_params": HAND_OFF})
    assert [e for e in streamed if "kv_transfer_params" in e] == streamed[-1:]


async def test_token_ids_on_request() -> None:
    whole = await post(FakeEngine("ab"), "/v1/completions", completion("xy", max_tokens=2, return_token_ids=True))
    assert whole["choices"][0]["token_ids"] == [97, 98]
    assert whole["choices"][0]["prompt_token_ids"] == [120, 121]
    chat_whole = await post(FakeEngine("ab"), "/v1/chat/completions", chat(max_tokens=2, return_token_ids=True))
    assert chat_whole["choices"][0]["token_ids"] == [97, 98]
    assert bytes(chat_whole["prompt_token_ids"]) == b"user: hi\n"
    events = await post(FakeEngine("ab"), "/v1/chat/completions", chat(max_tokens=2, return_token_ids=True, stream=True))
    assert [t for e in events for c in e["choices"] for t in c.get("token_ids", [])] == [97, 98]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_that_fails_half_way_says_so_and_ends(path: str) -> None:
    engine = FakeEngine("abcdef")
    body = {**(chat() if "chat" in path else completion()), "stream": True}
    engine.fail_at_step = (3, EngineDeadError("the engine core was killed by SIGSEGV"))
    events = await post(engine, path, body)
    assert events[-1]["error"]["code"] == "engine_dead"
    assert all("error" not in e for e in events[:-1])
    assert len(events) > 2
    assert engine.active == set()


async def test_one_failing_prompt_ends_the_others() -> None:
    engine = FakeEngine("abcdef")
    engine.fail_at_step = (5, AsleepError("asleep", retry_after_s=1.0, state="asleep"))
    async with client_of(server_app(engine)) as client:
        response = await client.post("/v1/completions", json=completion(["a", "b", "c"]))
    assert response.status_code == 503
    assert engine.active == set()


async def test_the_model_list() -> None:
    async with client_of(server_app(FakeEngine(model_name="org/name"))) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [("org/name", "model", 256)]
        assert (await client.get("/v1/models/org/name")).json() == listed["data"][0]


async def test_request_ids_of_clients_come_back() -> None:
    async with client_of(server_app(FakeEngine())) as client:
        given = await client.post("/v1/completions", json=completion(), headers={"X-Request-Id": "trace-1"})
        assert given.headers["x-request-id"] == "trace-1"
        odd = await client.get("/v1/nope", headers={"X-Request-Id": "a b\tc"})
        assert len(odd.headers["x-request-id"]) == 32
