"""P (a process of its own) and D (here) joined by the ``ipc`` connector: E3, E5, P1, P5 from the engine's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import engine_runs
import pytest
import pytest_asyncio
from engine_models import save_model, tiny_engine

from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import EngineClient, EngineState, SleepRequest
from torpor.engine.client import AsyncEngineClient, InprocEngineClient
from torpor.request import EngineOutput, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

HAND_OFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = list(b"a prompt that fills a few blocks of the KV cache")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    folder: Path = save_model(tmp_path_factory.mktemp("model"))

    def config(role: Any) -> Any:
        # Room for every hand-off of a test at once: one that nobody reads keeps its blocks for the length of its lease.
        return tiny_engine(folder, num_blocks=128, connector=ConnectorConfig(connector="ipc", role=role))

    prefill = await AsyncEngineClient.start(config("producer"), timeout_s=engine_runs.START_S)
    decode = await InprocEngineClient.start(config("consumer"), timeout_s=engine_runs.START_S)
    yield prefill, decode
    await decode.shutdown()
    await prefill.shutdown()


async def run(
    client: EngineClient, request_id: str, max_tokens: int, transfer: dict[str, Any] | None = None, salt: int = 0
) -> EngineOutput:
    """The last output, with all the tokens."""
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=[salt, *PROMPT],
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        kv_transfer_params=transfer,
    )
    tokens: list[int] = []
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            tokens += output.new_token_ids
    return EngineOutput(
        request_id=request_id,
        new_token_ids=tokens,
        num_cached_tokens=output.num_cached_tokens,
        kv_transfer_params=output.kv_transfer_params,
        finish_reason=output.finish_reason,
    )


async def hand_off(prefill: EngineClient, request_id: str, salt: int) -> dict[str, Any]:
    params = (await run(prefill, request_id, 1, HAND_OFF, salt)).kv_transfer_params
    assert params is not None
    return params


async def loads_done(client: EngineClient) -> int:
    return int((await client.stats())["scheduler"]["loads_done"])


async def test_d_reads_what_p_computed_and_says_the_same(pair: tuple[EngineClient, EngineClient]) -> None:
    prefill, decode = pair
    alone = await run(prefill, "alone", 10, salt=1)
    before = await loads_done(decode)
    read = await run(decode, "read", 10, await hand_off(prefill, "p1", 1), salt=1)
    assert read.new_token_ids == alone.new_token_ids
    assert await loads_done(decode) == before + 1
    assert read.num_cached_tokens >= 40
    assert len(set(alone.new_token_ids)) > 3, "a text that repeats one token would prove nothing"
    assert (await run(prefill, "other", 10, salt=2)).new_token_ids != alone.new_token_ids


@pytest.mark.parametrize("who", ["P", "D", "both"])
@pytest.mark.parametrize("level", [1, 2])
async def test_e3_whoever_slept_the_pair_goes_on(pair: tuple[EngineClient, EngineClient], who: str, level: int) -> None:
    salt = 10 + 10 * level + len(who)
    prefill, decode = pair
    sleepers = {"P": [prefill], "D": [decode], "both": [prefill, decode]}[who]
    expected = (await run(prefill, f"alone{salt}", 10, salt=salt)).new_token_ids
    for sleeper in sleepers:
        report = await sleeper.sleep(SleepRequest(level=level))
        assert report["unmapped_bytes"] == report["returned_bytes"] > 0, report["tags"]
    for sleeper in reversed(sleepers):
        assert (await sleeper.wake_up())["state"] == "awake"
    before = await loads_done(decode)
    read = await run(decode, f"d{salt}", 10, await hand_off(prefill, f"p{salt}", salt), salt=salt)
    assert read.new_token_ids == expected
    assert await loads_done(decode) == before + 1


@pytest.mark.parametrize("awake", [True, False])
async def test_p1_p5_a_hand_off_from_before_the_sleep_is_recomputed(pair: tuple[EngineClient, EngineClient], awake: bool) -> None:
    prefill, decode = pair
    salt = 60 + awake
    expected = (await run(prefill, f"alone{salt}", 10, salt=salt)).new_token_ids
    stale = await hand_off(prefill, f"p{salt}", salt)
    await prefill.sleep(SleepRequest(level=1))
    if awake:
        await prefill.wake_up()
    late = await run(decode, f"d{salt}", 10, stale, salt=salt)
    assert late.new_token_ids == expected
    assert late.num_cached_tokens == 0
    await prefill.wake_up()
    assert prefill.state is EngineState.AWAKE


async def test_d_sleeps_and_wakes_in_the_middle_of_many(pair: tuple[EngineClient, EngineClient]) -> None:
    prefill, decode = pair
    salts = range(80, 86)
    expected = [(await run(prefill, f"alone{s}", 20, salt=s)).new_token_ids for s in salts]
    params = [await hand_off(prefill, f"p{s}", s) for s in salts]
    running = [asyncio.create_task(run(decode, f"d{s}", 20, p, salt=s)) for s, p in zip(salts, params, strict=True)]
    for _ in range(2):
        await asyncio.sleep(0.02)
        await decode.sleep(SleepRequest(level=1, mode="keep"))
        await decode.wake_up()
    assert [(await task).new_token_ids for task in running] == expected


async def test_p5_two_engines_with_different_weights_never_share_kv(
    pair: tuple[EngineClient, EngineClient], tmp_path: Path
) -> None:
    """One of the two is updated, then the other: every answer is what D's own weights say."""
    prefill, decode = pair
    new = str(save_model(tmp_path / "new", seed=6))
    salt, reads = 100, await loads_done(decode)
    old_text = (await run(decode, "old", 10, salt=salt)).new_token_ids
    stale = await hand_off(prefill, "stale", salt + 1)
    assert await update(decode, new) == await update(prefill, new) == decode.info.model_id
    new_text = (await run(prefill, "new", 10, salt=salt)).new_token_ids
    assert new_text != old_text
    late = await run(decode, "late", 10, stale, salt=salt + 1)
    assert (late.num_cached_tokens, await loads_done(decode)) == (0, reads)
    assert (await run(decode, "both", 10, await hand_off(prefill, "p-both", salt), salt=salt)).new_token_ids == new_text
    assert await loads_done(decode) == reads + 1
    newer = str(save_model(tmp_path / "newer", seed=7))
    await update(decode, newer)
    alone = await run(decode, "alone", 10, salt=salt)
    other = await run(decode, "other", 10, await hand_off(prefill, "p-old", salt + 2), salt=salt + 2)
    assert (other.num_cached_tokens, await loads_done(decode)) == (0, reads + 1)
    assert alone.new_token_ids not in (old_text, new_text)
    await update(prefill, newer)
    assert (await run(prefill, "p-newer", 10, salt=salt + 2)).new_token_ids == other.new_token_ids


async def update(client: EngineClient, model: str) -> str:
    await client.sleep(SleepRequest(level=2))
    report = await client.update_weights(model)
    assert (await client.wake_up())["refilled_tags"] == ["weights"]
    return str(report["model_id"])
