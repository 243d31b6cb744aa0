"""E8, E10 and the rest through the in-process client and the front end, over a real core with a fake model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.client import InprocEngineClient
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.core import EngineCore
from torpor.engine.frontend import Frontend
from torpor.engine.output_processor import OutputProcessor, TextDelta
from torpor.engine.protocol import Call, Outputs, Sleep, ToCore, decode_to_client, decode_to_core, encode
from torpor.engine.tokenizer import Tokenizer
from torpor.errors import (
    AsleepError,
    ConfigurationError,
    ContextLengthError,
    DeviceError,
    EngineDeadError,
    RequestError,
    SleepAborted,
)
from torpor.models.config import ModelConfig
from torpor.request import EngineOutput, FinishReason, GenerationRequest, SamplingParams
from torpor.scheduler.output import RunnerOutput, SchedulerOutput
from torpor.testing.engine import FakeWorker, fake_core
from torpor.testing.tokenizers import byte_tokenizer

PROMPT = [72, 105]


def factory(worker: FakeWorker, **sleep: Any) -> Callable[..., EngineCore]:
    config = EngineConfig(model=ModelConfig(source="fake"), sleep=SleepConfig(enable_sleep_mode=True, **sleep))
    return lambda **callbacks: fake_core(config, worker, **callbacks)


async def start(worker: FakeWorker | None = None, **sleep: Any) -> InprocEngineClient:
    config = EngineConfig(model=ModelConfig(source="fake"))
    return await InprocEngineClient.start(config, factory=factory(worker or FakeWorker(), **sleep), timeout_s=20)


@pytest.fixture
async def client() -> AsyncIterator[InprocEngineClient]:
    client = await start()
    yield client
    await client.shutdown()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture
def frontend(client: InprocEngineClient, tokenizer: Tokenizer) -> Frontend:
    return Frontend(client, tokenizer)


def request(request_id: str, max_tokens: int = 8, prompt: list[int] = PROMPT, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


async def tokens(client: InprocEngineClient, item: GenerationRequest) -> list[int]:
    async with aclosing(client.generate(item)) as outputs:
        return [t async for output in outputs for t in output.new_token_ids]


async def tokens_forever(client: InprocEngineClient) -> None:
    for n in range(1000):
        await tokens(client, request(f"more{n}"))


# ---- streams ------------------------------------------------------------------------------------------------------------------


async def test_many_at_once_and_each_gets_its_own(client: InprocEngineClient) -> None:
    alone = [await tokens(client, request(f"a{i}", prompt=[i, i + 1])) for i in range(6)]
    together = await asyncio.gather(*(tokens(client, request(f"b{i}", prompt=[i, i + 1])) for i in range(6)))
    assert together == alone


async def test_a_stream_that_nobody_reads_holds_up_nobody(client: InprocEngineClient) -> None:
    slow = client.generate(request("slow", 50))
    first = await anext(slow)
    assert first.new_token_ids
    assert len(await tokens(client, request("quick", 20))) == 20
    rest = [output async for output in slow]
    assert rest[-1].finish_reason is FinishReason.LENGTH


async def test_leaving_a_stream_frees_its_blocks(client: InprocEngineClient) -> None:
    async with aclosing(client.generate(request("a", 100))) as outputs:
        await anext(outputs)
    for _ in range(500):
        stats = await client.stats()
        if stats["cache"]["allocated_blocks"] == 0 and stats["scheduler"]["running"] == 0:
            break
    assert stats["scheduler"]["aborted"] == 1


async def test_abort_ends_a_stream_with_that_reason(client: InprocEngineClient) -> None:
    outputs: list[EngineOutput] = []
    async with aclosing(client.generate(request("a", 100))) as stream:
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 1:
                await client.abort(["a"])
    assert outputs[-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("asleep", [False, True])
async def test_requests_that_are_ended_fail_and_are_aborted_and_calls_go_on(asleep: bool, client: InprocEngineClient) -> None:
    running = client.generate(request("a", 100))
    await anext(running)
    if asleep:
        await client.sleep(SleepRequest(level=0, mode="keep"))
    client.end_requests("stopping")
    with pytest.raises(EngineDeadError, match=r"^stopping$"):
        async for _ in running:
            pass
    with pytest.raises(EngineDeadError, match=r"^stopping$"):
        await tokens(client, request("later"))
    assert (await client.stats())["scheduler"]["aborted"] == 1


async def test_a_request_that_can_never_run_is_refused_and_the_rest_goes_on(client: InprocEngineClient) -> None:
    with pytest.raises(RequestError, match="300 tokens"):
        await tokens(client, request("a", prompt=[1] * 300))
    running = client.generate(request("twice", 30))
    await anext(running)
    with pytest.raises(RequestError, match="in use"):
        await tokens(client, request("twice"))
    assert len([o async for o in running]) == 29


async def test_an_id_can_be_used_again_as_soon_as_its_stream_is_left(client: InprocEngineClient) -> None:
    whole = await tokens(client, request("reference", 20))
    for _ in range(5):
        stream = client.generate(request("a", 100))
        await anext(stream)
        await stream.aclose()
        assert await tokens(client, request("a", 20)) == whole


async def test_an_id_can_be_used_again_also_when_its_last_output_was_never_read(client: InprocEngineClient) -> None:
    whole = await tokens(client, request("reference", 20))
    stream = client.generate(request("a", 20))
    await anext(stream)
    while (await client.stats())["scheduler"]["finished"] < 2:
        await asyncio.sleep(0.001)
    await stream.aclose()
    assert await asyncio.wait_for(tokens(client, request("a", 20)), 10) == whole


# ---- calls --------------------------------------------------------------------------------------------------------------------


async def test_sleep_and_wake_through_the_client(client: InprocEngineClient) -> None:
    before = await tokens(client, request("a"))
    report = await client.sleep(SleepRequest(level=1))
    assert (report["state"], client.state) == ("asleep", EngineState.ASLEEP)
    with pytest.raises(AsleepError) as caught:
        await tokens(client, request("b"))
    assert caught.value.fields["retry_after_s"] == 5.0
    assert (await client.stats())["missing_tags"] == ["kv_cache", "runtime", "weights"]
    assert (await client.wake_up(["weights"]))["state"] == "asleep"
    assert (await client.wake_up())["state"] == "awake"
    assert await tokens(client, request("c")) == before


async def test_keep_goes_on_after_the_wake_with_the_same_text(client: InprocEngineClient) -> None:
    whole = await tokens(client, request("reference", 60))
    stream = client.generate(request("a", 60))
    seen = (await anext(stream)).new_token_ids
    await client.sleep(SleepRequest(level=2, mode="keep"))
    await client.wake_up()
    assert seen + [t async for output in stream for t in output.new_token_ids] == whole


class SlowWorker(FakeWorker):
    """A request of it is still running when a busy machine comes round to the next call."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        time.sleep(0.01)
        return super().execute(output)


async def test_errors_of_calls_keep_their_types() -> None:
    client = await start(SlowWorker())
    with pytest.raises(ConfigurationError, match="level is 9"):
        await client.sleep(SleepRequest(level=9))
    stream = client.generate(request("a", 100))
    await anext(stream)
    with pytest.raises(SleepAborted) as caught:
        await client.sleep(SleepRequest(level=1, deadline_s=0))
    assert caught.value.fields["waiting_for"] == "a"
    await stream.aclose()
    await client.shutdown()


async def test_the_core_answers_while_memory_moves() -> None:
    """The transaction is on another thread: stats come, and the caller's wake queues."""
    import threading

    worker, entered, leave = FakeWorker(), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        leave.wait(10)

    worker.memory.register_tag_hooks("weights", before_unmap=hold, name="slow")
    client = await start(worker)
    sleeping = asyncio.create_task(client.sleep(SleepRequest(level=1)))
    await asyncio.to_thread(entered.wait, 10)
    stats = await asyncio.wait_for(client.stats(), 5)
    assert stats["state"] == "sleeping"
    waking = asyncio.create_task(client.wake_up())
    leave.set()
    assert ((await sleeping)["state"], (await waking)["state"]) == ("asleep", "awake")
    await client.shutdown()


async def test_what_kept_the_engine_from_starting_is_raised_and_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    def broken(**callbacks: Any) -> EngineCore:
        callbacks["progress"]("loading", 0.5)
        raise ConfigurationError("num_blocks is 0", setting="num_blocks")

    told: list[tuple[str, float]] = []
    with pytest.raises(ConfigurationError, match="num_blocks is 0"):
        await InprocEngineClient.start(
            EngineConfig(model=ModelConfig(source="x")), factory=broken, progress=lambda *p: told.append(p)
        )
    assert told == [("loading", 0.5)]
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG]


async def test_the_death_of_the_core_fails_everything_that_is_open() -> None:
    worker = FakeWorker()
    client = await start(worker)
    stream = client.generate(request("a", 100))
    await anext(stream)

    def die(output: object) -> None:
        raise DeviceError("gone", operation="step", code=5)

    worker.execute = die  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDeadError, match="gone"):
        await asyncio.gather(*[tokens(client, request(f"r{n}")) for n in range(5)], tokens_forever(client))
    assert client.state is EngineState.DEAD
    for call in (client.stats(), client.check_health(), client.wake_up()):
        with pytest.raises(EngineDeadError):
            await call
    await stream.aclose()
    await client.shutdown()


async def test_shutdown_is_idempotent_and_ends_streams(client: InprocEngineClient) -> None:
    stream = client.generate(request("a", 100))
    await anext(stream)
    await client.shutdown()
    await client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        [output async for output in stream]


def test_messages_survive_the_wire() -> None:
    message = Call(id=3, operation=Sleep(request=SleepRequest(policies={"weights": "host"})))
    assert decode_to_core(encode(message)) == message
    outputs = Outputs(outputs=[EngineOutput(request_id="a", new_token_ids=[1], finish_reason=FinishReason.STOP)])
    assert decode_to_client(encode(outputs)) == outputs


class WiredClient(InprocEngineClient):
    """Every message is sent as to a process of its own."""

    def _send(self, message: ToCore) -> None:
        super()._send(decode_to_core(encode(message)))


@pytest.fixture
async def wired() -> AsyncIterator[WiredClient]:
    client = await WiredClient.start(EngineConfig(model=ModelConfig(source="fake")), factory=factory(FakeWorker()), timeout_s=20)
    assert isinstance(client, WiredClient)
    yield client
    await client.shutdown()


async def test_numpy_s_numbers_reach_a_core_in_a_process_of_its_own(wired: WiredClient, tokenizer: Tokenizer) -> None:
    frontend = Frontend(wired, tokenizer)
    plain = await collect(frontend, PROMPT, max_tokens=5, temperature=0.5, seed=3)
    given = {"max_tokens": np.int64(5), "temperature": np.float64(0.5), "seed": np.int64(3)}
    found = await collect(frontend, np.array(PROMPT).tolist(), n=np.int64(1), **given)  # type: ignore[arg-type]
    assert [d.token_ids for d in found] == [d.token_ids for d in plain]
    assert [d.token_ids for d in await collect(frontend, list(np.array(PROMPT)), **given)] == [d.token_ids for d in plain]


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda c: c.sleep(SleepRequest(policies={"\ud800": "discard"})), "policies"),
        (lambda c: c.sleep(SleepRequest(policies=["weights"])), "policies"),
        (lambda c: c.sleep(SleepRequest(mode="now")), "mode"),
        (lambda c: c.sleep(SleepRequest(level="1")), "level"),
        (lambda c: c.sleep(SleepRequest(level=1 << 70)), "level"),
        (lambda c: c.sleep(SleepRequest(deadline_s="soon")), "deadline_s"),
        (lambda c: c.wake_up(["\ud800"]), "tags"),
        (lambda c: c.wake_up([1]), "tags"),
        (lambda c: c.pause("now"), "mode"),
        (lambda c: c.update_weights("\ud800"), "model"),
        (lambda c: c.update_weights(Path("/w")), "model"),
    ],
)
async def test_what_the_core_could_not_read_is_refused_by_name_and_nothing_waits_for_it(
    wired: WiredClient, call: Callable[[InprocEngineClient], Coroutine[Any, Any, Any]], param: str
) -> None:
    with pytest.raises(RequestError, match=f"^{param} cannot be sent") as caught:
        await call(wired)
    assert caught.value.param == param
    assert wired._calls == {}
    assert len(await tokens(wired, request("a"))) == 8


# ---- the front end ------------------------------------------------------------------------------------------------------------


async def collect(frontend: Frontend, prompt: list[int] = PROMPT, n: int = 1, **sampling: Any) -> list[TextDelta]:
    stream = frontend.generate("r", prompt, SamplingParams(**sampling), n=n)
    async with aclosing(stream) as deltas:
        return [delta async for delta in deltas]


async def test_text_is_what_the_tokens_spell(frontend: Frontend) -> None:
    deltas = await collect(frontend, max_tokens=20)
    ids = [t for delta in deltas for t in delta.token_ids]
    assert len(ids) == 20
    assert "".join(d.text for d in deltas) == bytes(ids).decode(errors="replace")
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_cuts_the_text_and_aborts_the_rest(frontend: Frontend) -> None:
    whole = "".join(d.text for d in await collect(frontend, max_tokens=40))
    stop = next(c for c in whole[5:] if c.isascii() and c not in whole[:5])
    deltas = await collect(frontend, max_tokens=40, stop=(stop,))
    text = "".join(d.text for d in deltas)
    assert whole.startswith(text + stop)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    shown = await collect(frontend, max_tokens=40, stop=(stop,), include_stop_str_in_output=True)
    assert "".join(d.text for d in shown) == text + stop


async def test_n_choices_come_with_their_index(frontend: Frontend) -> None:
    deltas = await collect(frontend, n=3, max_tokens=6, seed=5)
    assert {d.index for d in deltas} == {0, 1, 2}
    assert sum(d.finish_reason is not None for d in deltas) == 3


@pytest.mark.parametrize(
    ("prompt", "n", "sampling", "param"),
    [
        ([], 1, {}, "prompt"),
        ([1] * 128, 1, {}, "prompt"),
        ([70000], 1, {}, "prompt"),
        (PROMPT, 0, {}, "n"),
        (PROMPT, 2.0, {}, "n"),
        (PROMPT, 1, {"temperature": -1.0}, "temperature"),
        (PROMPT, 1, {"top_p": 2.0}, "top_p"),
        (PROMPT, 1, {"max_tokens": 0}, "max_tokens"),
        (PROMPT, 1, {"stop_token_ids": (99999,)}, "stop_token_ids"),
    ],
)
async def test_errors_at_the_door_name_the_field(
    frontend: Frontend, prompt: list[int], n: int, sampling: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(frontend, prompt, n, **sampling)
    assert caught.value.fields["param"] == param


async def test_a_prompt_that_is_too_long_is_told_the_limit_and_the_setting(frontend: Frontend) -> None:
    with pytest.raises(RequestError, match="max_model_len") as caught:
        await collect(frontend, [1] * 200)
    fields = caught.value.fields
    assert (fields["tokens"], fields["limit"], fields["setting"]) == (200, 128, "max_model_len")


async def test_a_failed_step_is_raised_in_the_middle_of_a_text(tokenizer: Tokenizer) -> None:
    worker = FakeWorker()
    client = await start(worker)
    stream = Frontend(client, tokenizer).generate("r", PROMPT, SamplingParams(max_tokens=100))
    await anext(stream)
    worker.fail_next = DeviceError("hot", operation="step", code=7)
    with pytest.raises(DeviceError, match="hot"):
        async for _ in stream:
            pass
    await client.shutdown()


def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hé"}])
    assert bytes(ids).decode() == "user: hé\nassistant:"
    with pytest.raises(RequestError, match="no robots"):
        tokenizer.encode_chat([{"role": "robot", "content": "x"}])
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(byte_tokenizer(chat_template=None)).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "content", "kind"),
    [
        ("{{ messages[0].content }}", "x" * 128, ContextLengthError),
        ("{{ messages[0].content }}", "x" * 100_000, ContextLengthError),
        ("{{ messages[0].content }}", "\ud800", RequestError),
        ("{% if false %}{% endif %}", "x", RequestError),
    ],
    ids=["too long", "too long to be tokenized", "no Unicode", "no tokens"],
)
async def test_what_is_wrong_with_a_conversation_is_said_of_the_messages(
    client: InprocEngineClient, template: str, content: str, kind: type[RequestError]
) -> None:
    frontend = Frontend(client, Tokenizer(byte_tokenizer(chat_template=template)))
    with pytest.raises(RequestError) as caught:
        frontend.check(frontend.encode_chat([{"role": "user", "content": content}]), SamplingParams(), param="messages")
    assert (type(caught.value), caught.value.param) == (kind, "messages")


async def test_a_prompt_that_is_longer_than_the_kv_cache_is_refused_at_the_door(tokenizer: Tokenizer) -> None:
    config = EngineConfig(model=ModelConfig(source="fake"))
    small = await InprocEngineClient.start(config, factory=lambda **calls: fake_core(config, FakeWorker(num_blocks=4), **calls))
    room = small.info.num_blocks * small.info.block_size
    assert room < small.info.max_model_len
    frontend = Frontend(small, tokenizer)
    with pytest.raises(ContextLengthError, match="num_blocks") as caught:
        frontend.check([1] * room, SamplingParams())
    assert (caught.value.tokens, caught.value.limit) == (room, room)
    frontend.check([1] * (room - 1), SamplingParams())
    await small.shutdown()


def test_tokens_by_themselves(tokenizer: Tokenizer) -> None:
    assert (tokenizer.token_text(65), tokenizer.token_bytes(65)) == ("A", b"A")
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_bytes(0x20) == b" "


def test_a_word_by_itself_keeps_the_space_that_a_sentencepiece_vocabulary_gives_it() -> None:
    """Logprobs name tokens one by one; together they are the text."""
    words = {"<unk>": 0, "\u2581the": 1, "ing": 2, "\u2581": 3, "<0x41>": 4, "<0xC3>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(spaces)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert [tokenizer.token_text(i) for i in range(1, 6)] == [" the", "ing", " ", "A", "\ufffd"]
    assert [tokenizer.token_bytes(i) for i in range(1, 6)] == [b" the", b"ing", b" ", b"A", b"\xc3"]


def test_the_token_that_ended_a_text_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, PROMPT, SamplingParams(stop_token_ids=(66,)))
    processor.process(EngineOutput(request_id="r", new_token_ids=[65]))
    last = processor.process(EngineOutput(request_id="r", new_token_ids=[66], finish_reason=FinishReason.STOP, stop_reason=66))
    assert (last.text, last.token_ids, last.stop_reason) == ("", [66], 66)


def test_half_a_character_at_the_end_of_a_text_is_shown(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, PROMPT, SamplingParams())
    assert processor.process(EngineOutput(request_id="r", new_token_ids=[0xC3])).text == ""
    last = processor.process(EngineOutput(request_id="r", new_token_ids=[0xA9, 0xC3], finish_reason=FinishReason.LENGTH))
    assert last.text == "é�"


async def test_a_caller_who_stops_waiting_for_new_weights_still_learns_their_name(client: InprocEngineClient) -> None:
    """An update takes as long as its files do to hash: somebody presses Ctrl-C, and the core has them all the same."""
    await client.sleep(SleepRequest(level=2))
    update = asyncio.create_task(client.update_weights("fake@2"))
    await asyncio.sleep(0)  # it is on its way
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    while (await client.stats())["model_id"] != "fake@2":
        pass
    assert client.info.model_id == "fake@2"
