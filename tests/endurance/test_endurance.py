"""Many sleeps: every answer stays right and nothing grows. The long runs are ``scripts/endure``; a few cycles run every day."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import loaded_pair
import one_engine
import pytest
from engine_models import save_model
from footprint import Footprint, check_flat

pytestmark = [pytest.mark.integration, pytest.mark.slow]
EVERYDAY, EVERYDAY_PAIR = 60, 12
LONG = 1000
CONNECTORS = ["ipc", "nixl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--seed", default=None)
    chosen = random.SystemRandom().randrange(1 << 31) if given is None else int(given)
    print(f"seed {chosen}")
    return chosen


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--cycles", default=None) or LONG)


def check(figures: list[Footprint]) -> None:
    start, middle, end = figures
    check_flat(start, middle)
    check_flat(middle, end)
    check_flat(start, end)


def need(connector: str) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl_cu13")


@pytest.mark.timeout(120)
async def test_one_engine_sleeps_and_wakes_and_stays_as_it_was(folder: Path, seed: int) -> None:
    check(await one_engine.endure(folder, EVERYDAY, seed, print))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_loaded_pair_sleeps_and_wakes_and_stays_as_it_was(folder: Path, connector: str, seed: int) -> None:
    need(connector)
    check(await loaded_pair.endure(folder, connector, EVERYDAY_PAIR, seed, print))


@pytest.mark.endurance
@pytest.mark.timeout(3600)
async def test_one_engine_for_long(folder: Path, seed: int, cycles: int) -> None:
    check(await one_engine.endure(folder, cycles, seed, print))


@pytest.mark.endurance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_loaded_pair_for_long(folder: Path, connector: str, seed: int, cycles: int) -> None:
    need(connector)
    check(await loaded_pair.endure(folder, connector, max(10, cycles // 5), seed, print))


@pytest.mark.timeout(120)
async def test_a_pair_over_which_nothing_comes_is_seen(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are right all the same (P5): D computes them."""

    async def ask_without_transfer(client: Any, text: Any, transfer: Any = None, **settings: Any) -> Any:
        return await loaded_pair_ask(client, text, transfer=transfer if settings.get("max_tokens") else None, **settings)

    loaded_pair_ask = loaded_pair.ask
    monkeypatch.setattr(loaded_pair, "ask", ask_without_transfer)
    with pytest.raises(AssertionError, match="no KV came from P"):
        await loaded_pair.endure(folder, "ipc", 4, seed, print)


def test_a_leak_of_one_page_per_cycle_is_seen() -> None:
    """The tolerance of the long run: what it would miss, it says."""
    same: dict[str, Any] = dict.fromkeys(Footprint.__dataclass_fields__, 7 << 20)
    before = Footprint(**same | {"cycle": 500})
    after = Footprint(**same | {"cycle": 1000, "rss_bytes": before.rss_bytes + 501 * 4096})
    with pytest.raises(AssertionError, match="rss_bytes grew"):
        check_flat(before, after)
    with pytest.raises(AssertionError, match="memfd_bytes grew"):
        check_flat(before, Footprint(**same | {"cycle": 501, "memfd_bytes": before.memfd_bytes + 4096}))
