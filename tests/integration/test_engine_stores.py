"""A real (tiny) model with connectors that keep KV: E1, E2, E6 from the engine's side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_runs
import pytest
from engine_models import save_model, tiny_engine

from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import SleepRequest
from torpor.engine.client import AsyncEngineClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[salt, *b"a prompt that fills a few blocks of the KV cache"] for salt in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model: Path) -> dict[int, list[int]]:
    """What an engine says that has no connector and never sleeps."""
    import asyncio

    async def answers() -> dict[int, list[int]]:
        async with engine_runs.running(tiny_engine(model)) as client:
            return {
                n: await engine_runs.tokens_of(client, engine_runs.request(f"r{n}", prompt)) for n, prompt in enumerate(PROMPTS)
            }

    return asyncio.run(answers())


def config(model: Path, folder: Path, **extra: Any) -> Any:
    options = {"disk_dir": str(folder)} | extra
    return tiny_engine(model, connector=ConnectorConfig(connector="offload", extra=options))


async def round_of(client: AsyncEngineClient, name: str) -> tuple[dict[int, list[int]], int]:
    """Every prompt's answer, and how many prompt tokens were not computed."""
    texts, cached = {}, 0
    for number, prompt in enumerate(PROMPTS):
        outputs = await engine_runs.outputs_of(client, engine_runs.request(f"{name}{number}", prompt))
        texts[number] = [t for output in outputs for t in output.new_token_ids]
        cached += outputs[-1].num_cached_tokens
    return texts, cached


@pytest.mark.parametrize("level", [1, 2])
async def test_kept_kv_gives_the_same_answers_after_every_wake(
    model: Path, right: dict[int, list[int]], tmp_path: Path, level: int
) -> None:
    async with engine_runs.running(config(model, tmp_path / "kv")) as client:
        assert (await round_of(client, "first"))[0] == right
        for cycle in range(2):
            report = await client.sleep(SleepRequest(level=level))
            assert report["unmapped_bytes"] == report["returned_bytes"] > 0
            assert (await client.wake_up())["state"] == "awake"
            texts, cached = await round_of(client, f"c{cycle}-")
            assert texts == right
            assert cached == len(PROMPTS) * 48
        stats = (await client.stats())["connector"]
        assert (stats["connector"], stats["loads_failed"], stats["loads_done"]) == ("offload", 0, 2 * len(PROMPTS))
        assert stats["store"]["disk_errors"] == 0
    async with engine_runs.running(config(model, tmp_path / "kv")) as client:
        texts, cached = await round_of(client, "restarted")
        assert (texts, cached) == (right, len(PROMPTS) * 48)


async def test_other_weights_find_nothing(model: Path, right: dict[int, list[int]], tmp_path: Path) -> None:
    from tiny_models import save_tiny

    from torpor.testing.tokenizers import EOS_ID

    async with engine_runs.running(config(model, tmp_path / "kv")) as client:
        await round_of(client, "first")
    special = {"eos_token_id": EOS_ID, "bos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    other = tmp_path / "other"
    save_model(other)
    save_tiny(other, seed=6, vocab_size=EOS_ID + 1, tie_word_embeddings=False, **special)
    async with engine_runs.running(config(other, tmp_path / "kv")) as client:
        texts, cached = await round_of(client, "other")
        assert cached == 0
        assert texts != right
        assert (await client.stats())["connector"]["store"]["leftover_files"] > 0
