"""P1-P5 between engines whose KV caches lie in device memory: two processes on one GPU, and on two where there are two."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "integration"), str(TESTS / "unit")]

from connector_pairs import held_read  # noqa: E402
from kv_child import SPARES, Child, ChildError  # noqa: E402
from test_connectors_processes import (  # noqa: E402, F401  the same story, told here by engines on a GPU
    test_an_owner_that_is_stopped_in_the_middle_costs_one_load,
    test_either_side_and_both_sleep_and_every_byte_is_right_afterwards,
    test_p1_params_from_before_a_sleep_are_not_read_after_it,
    test_p2_a_reader_that_is_killed_holds_nothing_up,
    test_p2_a_reader_that_is_stopped_is_met_by_the_deadline_by_name,
    test_p5_an_owner_that_is_killed_costs_its_readers_a_load,
)

from torpor.connectors import ConnectorConfig, wire  # noqa: E402
from torpor.connectors.base import LoadRequest  # noqa: E402
from torpor.connectors.link import Link  # noqa: E402
from torpor.connectors.loads import Load  # noqa: E402
from torpor.connectors.transport import BlockRead  # noqa: E402
from torpor.errors import StaleEpochError, TorporError  # noqa: E402
from torpor.kvcache.types import KVCacheSpec  # noqa: E402
from torpor.memory import MemoryConfig  # noqa: E402
from torpor.testing.kv_engine import KVEngine, expected  # noqa: E402

pytestmark = pytest.mark.gpu

DRIVER = "cuda"
UNFOLLOWED = "torpor.testing.unfollowed:UnfollowedIpc"
A = list(range(100, 150))  # 50 tokens: 4 blocks of 16
B = list(range(200, 250))
THERE, HERE = [9, 2, 31, 4], [7, 30, 1, 12]
SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=4, num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
LARGE = dataclasses.replace(SPEC, num_layers=8, num_blocks=512)  # 256 MiB
SLACK_BYTES = 64 << 20  # kernels that are loaded at first use, and contexts that grow with them
WAIT_S = 20.0


def on(ordinal: int = 0, **settings: Any) -> dict[str, Any]:
    return {"driver": DRIVER, "device": ordinal, "extent_bytes": 32 << 20} | settings


class Meeting:
    """Engines with device memory: processes of their own, or in this one. The bytes of the device are all processes'."""

    def __init__(self, connector: str, folder: Path) -> None:
        self.connector, self._folder = connector, folder
        self._stack = contextlib.ExitStack()

    def child(
        self, engine_id: str, role: str, *, kind: str = "", ordinal: int = 0, spec: KVCacheSpec = SPEC, **settings: Any
    ) -> Child:
        child = Child(
            kind or self.connector,
            engine_id,
            role,
            self._folder,
            memory=on(ordinal),
            spec=dataclasses.asdict(spec),
            **settings,
        )
        return self._stack.enter_context(child)

    def here(self, engine_id: str, role: str, *, kind: str = "", spec: KVCacheSpec = SPEC, **settings: Any) -> KVEngine:
        extra = {"socket_dir": str(self._folder / "kv")} if self.connector == "ipc" else {}
        config = ConnectorConfig(connector=kind or self.connector, engine_id=engine_id, role=role, extra=extra, **settings)  # type: ignore[arg-type]
        return self._stack.enter_context(KVEngine(config, spec, memory=MemoryConfig(**on())))

    def close(self) -> None:
        self._stack.close()


def meet(connector: str, folder: Path) -> Meeting:
    if connector == "nixl":
        pytest.importorskip("nixl_cu13")
    return Meeting(connector, folder)


@pytest.fixture(autouse=True)
def gpu() -> None:
    if DRIVER == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")


@pytest.fixture(autouse=True, scope="module")
def spares() -> Iterator[None]:
    SPARES.keep(4 if torch.cuda.is_available() else 0)
    yield
    SPARES.keep(0)


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")


@pytest.fixture(params=["ipc", "nixl"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(meet(request.param, tmp_path)) as meeting:
        yield meeting


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Meeting]:
    with contextlib.closing(meet("ipc", tmp_path)) as meeting:
        yield meeting


@pytest.fixture(params=["ipc", "nixl"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """What the tests of engines in processes start their engines with."""
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    with contextlib.ExitStack() as children:

        def start(engine_id: str, role: str, **settings: Any) -> Child:
            return children.enter_context(Child(request.param, engine_id, role, tmp_path, memory=on(), **settings))

        yield start


def used_bytes(ordinal: int = 0) -> int:
    free, total = torch.cuda.mem_get_info(ordinal)
    return total - free


def comes_down_to(nbytes: int, within_s: float = 5.0) -> int:
    """The bytes in use, as soon as they are no more than these or the time is over: the driver frees behind a dead process."""
    deadline = time.monotonic() + within_s
    while (used := used_bytes()) > nbytes and time.monotonic() < deadline:
        time.sleep(0.05)
    return used


def nbytes_of(spec: KVCacheSpec) -> int:
    return spec.num_layers * spec.layer_bytes


def link_of(d: KVEngine) -> Link:
    return next(iter(d.worker._reader._pullers.values()))._link  # type: ignore[attr-defined,no-any-return]


def scattered(rng: random.Random, count: int, spec: KVCacheSpec = SPEC) -> list[int]:
    return rng.sample(range(spec.num_blocks), count)


def tokens_of(blocks: int, seed: int) -> list[int]:
    """A prompt of which so many blocks are handed off."""
    return [seed, *range(blocks * SPEC.block_size - 1)]


# ---- what arrives -------------------------------------------------------------------------------------------------------------


def bring(p: Child, d: Child, seed: int, count: int) -> None:
    rng = random.Random(seed)
    prompt, there, here = tokens_of(count, seed), scattered(rng, count), scattered(rng, count)
    before = d.call("block_sums")
    params = p.call("prefill", f"r{seed}", prompt, there)
    assert d.call("load", f"q{seed}", prompt, params, here) == "recving"
    assert d.call("has", prompt, here)
    after = d.call("block_sums")
    untouched = set(range(SPEC.num_blocks)) - set(here)
    assert all(before[block] == after[block] for block in untouched), "blocks that nobody asked for were written"


def test_scattered_blocks_arrive_to_the_bit(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer")
    for seed, count in enumerate((1, 2, 33, 64, 17)):
        bring(p, d, seed, count)


def test_scattered_blocks_arrive_from_another_gpu(meeting: Meeting, two_gpus: None) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer", ordinal=1)
    for seed, count in enumerate((1, 33, 64)):
        bring(p, d, seed, count)
        for engine in (p, d):
            assert engine.call("sleep")["held_bytes"] == 0
            engine.call("wake")


def test_a_hand_off_is_published_when_its_kv_is_written(ipc: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that wrote it may still be on its way on some stream when the scheduler hands it off."""
    p, d = ipc.here("P", "producer"), ipc.child("D", "consumer")
    d.wait_until_up()
    stream, kept = torch.cuda.Stream(), []

    def write_behind(block: int, content: bytes) -> None:
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda().view(torch.bfloat16)
        kept.append(raw)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # some 50 ms
            for index, tensor in enumerate(p.kv_caches.values()):
                for half in (0, 1):
                    part = raw.view(SPEC.num_layers, 2, -1)[index, half]
                    tensor[half, block].copy_(part.view_as(tensor[half, block]))

    monkeypatch.setattr(p, "write_block", write_behind)
    begun = time.monotonic()
    params = p.prefill("r", A, THERE)
    assert time.monotonic() - begun > 0.02, "nothing was on its way"
    assert d.call("load", "q", A, params, HERE) == "recving"
    assert d.call("has", A, HERE)


def test_what_arrived_can_be_used_on_any_stream_at_once(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    stream = torch.cuda.Stream()
    for turn in range(5):
        prompt = [turn, *A[1:]]
        params = p.call("prefill", f"r{turn}", prompt, THERE)
        assert d.load(f"q{turn}", prompt, params, HERE) == "recving"
        with torch.cuda.stream(stream):
            copies = [tensor[:, HERE].clone() for tensor in d.kv_caches.values()]
        stream.synchronize()
        for index, _ in enumerate(HERE):
            seen = b"".join(c[half, index].cpu().view(torch.uint8).numpy().tobytes() for c in copies for half in (0, 1))
            assert seen == expected(SPEC, prompt, index)


# ---- sleeping under a read ----------------------------------------------------------------------------------------------------


def test_p2_nothing_is_unmapped_while_a_peer_reads(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    params = p.call("prefill", "r", A, THERE)
    with held_read(d) as gate:
        d.begin_load("q", A, params, HERE)
        assert gate.reached.wait(WAIT_S)
        p.begin("sleep")
        with pytest.raises(TimeoutError):
            p.finish(0.5)
        gate.open()
        assert p.finish()["held_bytes"] == 0
    assert d.wait("q") == "failed"
    p.call("wake")
    assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)


def test_p2_a_read_that_does_not_end_is_met_by_the_deadline_by_name(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer", withdraw_timeout_s=0.5), ipc.here("D", "consumer")
    params = p.call("prefill", "r", A, THERE)
    with held_read(d) as gate:
        d.begin_load("q", A, params, HERE)
        assert gate.reached.wait(WAIT_S)
        begun = time.monotonic()
        with pytest.raises(ChildError, match=rf"PeerError: D \(pid {os.getpid()}\).*withdraw_timeout_s"):
            p.call("sleep")
        assert time.monotonic() - begun < 3
        gate.open()
    assert d.wait("q") == "failed"
    assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.has(B, HERE)
    assert p.call("sleep")["held_bytes"] == 0


def test_p2_a_lost_connection_does_not_hide_what_the_peer_keeps(ipc: Meeting) -> None:
    """Device memory has no inode: the fence that goes with an import tells that it is still there, and that it is gone."""
    p, d = ipc.child("P", "producer", withdraw_timeout_s=0.5), ipc.here("D", "consumer")
    assert d.load("q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    link = link_of(d)
    close, link._remote.close = link._remote.close, lambda: True  # type: ignore[method-assign]
    link._channel.abort()
    with pytest.raises(ChildError, match=rf"PeerError: D \(pid {os.getpid()}\)"):
        p.call("sleep")
    close()
    assert p.call("sleep")["held_bytes"] == 0


# ---- late reads ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The reader acknowledges a withdrawal, but keeps its import until the event is set."""
    ended = threading.Event()

    def acknowledge(link: Link) -> None:
        link._channel.send(wire.Withdrawn(epoch=str(link.epoch)))
        ended.wait(60)

    monkeypatch.setattr(Link, "_let_go", acknowledge)
    yield ended
    ended.set()


def test_p4_a_late_read_kills_nobody_and_its_old_bytes_are_refused(ipc: Meeting, liar: threading.Event) -> None:
    """Device memory has no guard: the reader's own import stays valid and shows what was there. The epoch refuses it (P3)."""
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    late = p.call("prefill", "r", A, THERE)
    assert d.load("q", A, late, HERE) == "recving"
    link = link_of(d)
    p.call("sleep")
    for block in HERE:
        d.write_block(block, b"\xee" * len(d.block(block)))
    request = BlockRead(
        local=HERE, remote=THERE, writing=contextlib.nullcontext, stop=lambda: False, deadline=time.monotonic() + 5
    )
    link._remote.read(request, lambda: None)
    assert d.has(A, HERE), "the old bytes"
    load = Load(LoadRequest(request_id="x", local_block_ids=HERE, params=late))  # type: ignore[arg-type]
    with pytest.raises(StaleEpochError):
        link._confirm(load, load.expected_word(link._key))
    p.call("wake")
    with pytest.raises(StaleEpochError):
        link._confirm(load, load.expected_word(link._key))
    assert p.process.poll() is None
    liar.set()


def test_p4_a_late_read_over_nixl_kills_nobody(tmp_path: Path, liar: threading.Event) -> None:
    """The owner's range is a hole. UCX would take its addresses for the host's and die of a fault there: the agent is gone."""
    with contextlib.closing(meet("nixl", tmp_path)) as meeting:
        p, d = meeting.child("P", "producer"), meeting.here("D", "consumer")
        late = p.call("prefill", "r", A, THERE)
        assert d.load("q", A, late, HERE) == "recving"
        link = link_of(d)
        assert p.call("sleep")["held_bytes"] == 0
        request = BlockRead(
            local=HERE, remote=THERE, writing=contextlib.nullcontext, stop=lambda: False, deadline=time.monotonic() + 5
        )
        with contextlib.suppress(TorporError):
            link._remote.read(request, lambda: None)
        load = Load(LoadRequest(request_id="x", local_block_ids=HERE, params=late))  # type: ignore[arg-type]
        with pytest.raises(TorporError):
            link._confirm(load, load.expected_word(link._key))
        assert p.process.poll() is None
        p.call("wake")
        liar.set()
        assert d.load("s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
        assert d.has(B, HERE)


def test_an_owner_whose_nixl_registration_does_not_follow_dies(tmp_path: Path) -> None:
    unfollowed = "torpor.testing.unfollowed:UnfollowedNixl"
    with contextlib.closing(meet("nixl", tmp_path)) as meeting:
        p = meeting.child("P", "producer", kind=unfollowed)
        d = meeting.child("D", "consumer", kind=unfollowed, extra={"read_timeout_s": 5.0})
        assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
        late = p.call("prefill", "late", B, THERE)
        p.call("sleep")
        assert d.call("load", "late", B, late, HERE) == "failed"
        assert p.death(10) == -signal.SIGSEGV


def test_p1_an_old_epoch_is_not_read(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer")
    late = p.call("prefill", "late", A, THERE)
    assert p.call("sleep")["held_bytes"] == 0
    before = d.call("block_sums")
    assert d.call("load", "asleep", A, late, HERE) == "failed"
    p.call("wake")
    new = p.call("prefill", "new", B, THERE)
    assert d.call("load", "late", A, late | {"remote_port": new["remote_port"]}, HERE) == "failed"
    assert d.call("block_sums") == before
    assert d.call("load", "new", B, new, HERE) == "recving"
    assert d.call("has", B, HERE)


# ---- deaths, and bytes of the device (they are all processes': nobody else may work on it) -------------------------------------


def test_bytes_are_flat_whoever_sleeps(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer", spec=LARGE), meeting.child("D", "consumer", spec=LARGE)
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    awake, asleep = [], []
    for cycle in range(5):
        for engine in (p, d):
            assert engine.call("sleep")["held_bytes"] == 0
        asleep.append(used_bytes())
        for engine in (p, d):
            engine.call("wake")
        prompt = [cycle, *B[1:]]
        assert d.call("load", f"q{cycle}", prompt, p.call("prefill", f"r{cycle}", prompt, THERE), HERE) == "recving"
        assert d.call("has", prompt, HERE)
        awake.append(used_bytes())
    assert max(awake) - min(awake) < SLACK_BYTES // 8, awake
    assert max(asleep) - min(asleep) < SLACK_BYTES // 8, asleep
    both = 2 * nbytes_of(LARGE)
    assert both <= awake[-1] - asleep[-1] < both + SLACK_BYTES


def test_bytes_come_back_from_a_reader_that_is_killed_with_an_import(ipc: Meeting) -> None:
    p = ipc.child("P", "producer", spec=LARGE)
    p.wait_until_up()
    alone = used_bytes()
    d = ipc.child("D", "consumer", spec=LARGE)
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    everything = list(range(LARGE.num_blocks))
    big = tokens_of(LARGE.num_blocks, 1)
    d.begin("load", "w", big, p.call("prefill", "big", big, everything), everything)
    time.sleep(0.005)
    d.send_signal(signal.SIGKILL)
    assert d.death() == -signal.SIGKILL
    report = p.call("sleep")
    assert (report["held_bytes"], report["tags"][0]["holders"]) == (0, [])
    left = alone - nbytes_of(LARGE) + SLACK_BYTES // 2
    assert comes_down_to(left) <= left
    p.call("wake")
    again = ipc.child("D", "consumer", spec=LARGE)
    assert again.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert again.call("has", B, HERE)


def test_bytes_come_back_from_an_owner_that_is_killed(ipc: Meeting) -> None:
    """The reader drops its import when the connection ends."""
    d = ipc.child("D", "consumer", spec=LARGE)
    d.wait_until_up()
    alone = used_bytes()
    p = ipc.child("P", "producer", spec=LARGE)
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    lost = p.call("prefill", "lost", B, THERE)
    p.send_signal(signal.SIGKILL)
    p.death()
    left = alone + SLACK_BYTES // 2
    assert comes_down_to(left) <= left
    assert d.call("load", "lost", B, lost, HERE) == "failed"
    assert d.call("sleep")["held_bytes"] == 0
    d.call("wake")
    p = ipc.child("P", "producer", spec=LARGE)
    assert d.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert d.call("has", B, HERE)


def test_bytes_are_held_twice_when_registrations_do_not_follow(ipc: Meeting) -> None:
    """The fault of the seeds, with connectors that say they follow the mapping and do not: old bytes, reported as loaded."""
    p = ipc.child("P", "producer", kind=UNFOLLOWED, spec=LARGE)
    d = ipc.child("D", "consumer", kind=UNFOLLOWED, spec=LARGE)
    assert d.call("load", "q", A, p.call("prefill", "r", A, THERE), HERE) == "recving"
    before = used_bytes()
    report = p.call("sleep")
    (tag,) = report["tags"]
    assert report["held_bytes"] == tag["unmapped_bytes"] >= nbytes_of(LARGE)
    assert [f"peer D (pid {d.pid})" in holder["who"] for holder in tag["holders"]] == [True], tag
    assert abs(used_bytes() - before) < SLACK_BYTES // 8, "the device got nothing back"
    p.call("wake")
    assert nbytes_of(LARGE) <= used_bytes() - before < nbytes_of(LARGE) + SLACK_BYTES, "held twice"
    assert d.call("load", "s", B, p.call("prefill", "s", B, THERE), HERE) == "recving"
    assert not d.call("has", B, HERE)
    assert d.call("has", A, HERE), "the bytes from before the sleep"
