"""Many sleeps: every answer stays right and nothing grows. The long runs are ``scripts/endure``; a few cycles run every day."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import loaded_pair
import one_engine
import pytest
from engine_models import save_model
from footprint import Footprint, check_all, check_flat, observe

pytestmark = [pytest.mark.integration, pytest.mark.slow]
EVERYDAY, EVERYDAY_PAIR = 60, 12
ROUNDS = 6  # more, half as long each, while the process still grows
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


def need(connector: str) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl_cu13")


@pytest.mark.timeout(240)
async def test_one_engine_sleeps_and_wakes_and_stays_as_it_was(folder: Path, seed: int) -> None:
    check_all(await one_engine.endure(folder, EVERYDAY, seed, print, ROUNDS))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_loaded_pair_sleeps_and_wakes_and_stays_as_it_was(folder: Path, connector: str, seed: int) -> None:
    need(connector)
    check_all(await loaded_pair.endure(folder, connector, EVERYDAY_PAIR, seed, print, ROUNDS))


@pytest.mark.endurance
@pytest.mark.timeout(3600)
async def test_one_engine_for_long(folder: Path, seed: int, cycles: int) -> None:
    check_all(await one_engine.endure(folder, cycles, seed, print))


@pytest.mark.endurance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_loaded_pair_for_long(folder: Path, connector: str, seed: int, cycles: int) -> None:
    need(connector)
    check_all(await loaded_pair.endure(folder, connector, max(10, cycles // 5), seed, print))


@pytest.mark.timeout(120)
async def test_a_pair_over_which_nothing_comes_is_seen(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are right all the same (P5): D computes them."""

    async def ask_without_transfer(client: Any, text: Any, transfer: Any = None, **settings: Any) -> Any:
        return await loaded_pair_ask(client, text, transfer=transfer if settings.get("max_tokens") else None, **settings)

    loaded_pair_ask = loaded_pair.ask
    monkeypatch.setattr(loaded_pair, "ask", ask_without_transfer)
    with pytest.raises(AssertionError, match="no KV came from P"):
        await loaded_pair.endure(folder, "ipc", 4, seed, print)


SAME: dict[str, Any] = dict.fromkeys(Footprint.__dataclass_fields__, 7 << 20)


def test_a_leak_of_one_page_per_cycle_is_seen() -> None:
    """The tolerance of the long run: what it would miss, it says."""
    before = Footprint(**SAME | {"cycle": 500})
    after = Footprint(**SAME | {"cycle": 1000, "rss_bytes": before.rss_bytes + 501 * 4096})
    with pytest.raises(AssertionError, match="rss_bytes grew"):
        check_flat(before, after)
    with pytest.raises(AssertionError, match="memfd_bytes grew"):
        check_flat(before, Footprint(**SAME | {"cycle": 501, "memfd_bytes": before.memfd_bytes + 4096}))


@pytest.mark.parametrize(
    ("leak", "warm", "looks"),
    [(0, 0, 3), (0, 3 << 20, 5), (96 << 10, 0, 3 + ROUNDS)],
    ids=["flat", "a start that takes long", "a leak"],
)
async def test_the_short_run_tells_a_start_from_a_leak(leak: int, warm: int, looks: int) -> None:
    """``warm`` bytes come in the first twelve cycles, ``leak`` bytes in each."""

    async def run_to(mark: int) -> Footprint:
        return Footprint(**SAME | {"cycle": mark, "rss_bytes": mark * leak + min(mark, 12) * warm // 12})

    figures = await observe(run_to, EVERYDAY_PAIR, ROUNDS)
    assert len(figures) == looks
    if leak:
        with pytest.raises(AssertionError, match="rss_bytes grew"):
            check_all(figures)
    else:
        check_all(figures)


def test_what_engines_hold_is_the_same_from_the_first_look_on() -> None:
    figures = [Footprint(**SAME | {"cycle": n, "pinned_bytes": 4096 * (n > 1)}) for n in (1, 6, 12, 18, 24)]
    with pytest.raises(AssertionError, match="pinned_bytes grew"):
        check_all(figures)
