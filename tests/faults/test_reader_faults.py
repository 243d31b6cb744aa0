"""P2, P5, M12: the reader's driver fails while it imports a peer's KV cache, reads from it, or lets go of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_engine import failure_of
from fault_points import FOR_EVER, FULL, Point, armed, calls_of, share, singles, tried
from kernel_view import Footprint

from torpor._native import Device
from torpor.connectors import ConnectorConfig
from torpor.testing.kv_engine import KVEngine

PROMPT = list(range(100, 110))
BLOCKS = [1, 2, 3]
CONNECTORS = ["ipc", "nixl"]


class Pair:
    """An owner on a sound device and a reader on one that fails."""

    def __init__(self, connector: str, folder: Path, device: Device) -> None:
        self.extra = {"socket_dir": str(folder / "kv")} if connector == "ipc" else {"staging_bytes": 4096}
        self.device = device
        self.owner = KVEngine(self._config(connector, "P", "producer"))
        self.reader = KVEngine(self._config(connector, "D", "consumer"), device=device)
        self.count = 0

    def _config(self, connector: str, name: str, role: str) -> ConnectorConfig:
        return ConnectorConfig(connector=connector, engine_id=name, role=role, extra=self.extra, withdraw_timeout_s=4.0)  # type: ignore[arg-type]

    def load(self) -> str:
        """A prefill and its read: "recving" or "failed"; never wrong bytes."""
        self.count += 1
        name = f"r{self.count}"
        params = self.owner.prefill(name, PROMPT, BLOCKS)
        outcome = self.reader.load(name, PROMPT, params, BLOCKS)
        if outcome == "recving":
            assert self.reader.has(PROMPT, BLOCKS[:2])  # the last block is not full: the reader computes the rest of it
            self.owner.wait(name)
        return outcome  # of one that failed the owner may not hear: its lease expires

    def owner_sleeps(self) -> None:
        """While the reader's driver refuses, a peer of this very process cannot be told from ourselves: the report names it."""
        report = self.owner.sleep()
        assert report.held_bytes == 0 or report.tags[0].holders

    def both_serve(self) -> None:
        """Whatever failed: awake, and the next read is right."""
        for engine in (self.owner, self.reader):
            engine.wake()
            engine.memory.check_integrity()
            assert engine.worker.epoch() is not None
        assert self.load() == "recving"
        assert self.owner.sleep().held_bytes == 0, "a peer still holds what was unmapped"
        self.reader.sleep()
        assert self.device.stats().imported_bytes == self.device.stats().mapped_bytes == 0

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@contextmanager
def pair(connector: str, folder: Path) -> Iterator[Pair]:
    device = Device.open("host", faults=True)
    made = Pair(connector, folder, device)
    yield made
    made.close()
    gc.collect()
    device.close()


def nothing(pair: Pair) -> None: ...


def linked(pair: Pair) -> None:
    assert pair.load() == "recving"


def load(pair: Pair) -> None:
    pair.load()


def reader_sleeps(pair: Pair) -> None:
    pair.reader.sleep()


def owner_sleeps(pair: Pair) -> None:
    pair.owner_sleeps()


Step = Callable[[Pair], None]
TABLES: dict[str, tuple[Step, Step]] = {
    "the first read": (nothing, load),
    "a read over a link": (linked, load),
    "the reader sleeps": (linked, reader_sleeps),
    "the owner sleeps": (linked, owner_sleeps),
}
BUDGET = {"ipc": 3, "nixl": 1}


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    return str(request.param)


@pytest.mark.timeout(3600 if FULL else 120)
@pytest.mark.parametrize("table", TABLES)
def test_p5_the_reader_s_driver_fails(connector: str, table: str, tmp_path: Path) -> None:
    before, call = TABLES[table]
    name = f"reader: {table} [{connector}]"
    with pair(connector, tmp_path) as sound:
        before(sound)
        calls = calls_of(sound.device, lambda: call(sound))
        sound.both_serve()
    footprint = Footprint.now()
    points = [p for count in (1, 2, FOR_EVER) for p in singles(calls, count)]
    for point in share(points, BUDGET[connector], name):
        tried[name] += one(connector, tmp_path, before, call, point)
    if connector == "ipc":  # NIXL's own libraries keep what they opened
        footprint.check_back()


def one(connector: str, folder: Path, before: Step, call: Step, point: Point) -> bool:
    with pair(connector, folder) as world:
        before(world)
        with armed(world.device, point) as arms:
            error = failure_of(lambda: call(world))
        world.reader.memory.check_integrity()
        world.owner.memory.check_integrity()
        if error is not None:
            call(world)
        world.both_serve()
    return arms.all_reached
