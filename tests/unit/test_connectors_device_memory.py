"""What connectors do differently, or must not do differently, when the KV cache lies in device memory. No GPU needed."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from connector_pairs import A, B, Pairs, held_read
from hypothesis import given
from hypothesis import strategies as st

from torpor.connectors import ConnectorConfig, gather, nixl, wire
from torpor.connectors.doors import Credentials, start_time
from torpor.connectors.fence import FencePage, FenceView
from torpor.connectors.geometry import Geometry, Place
from torpor.connectors.ipc import IpcRemote, IpcTransport
from torpor.connectors.link import Link
from torpor.connectors.nixl_probe import Probe
from torpor.connectors.options import Options
from torpor.connectors.pins import NoPins
from torpor.connectors.transport import BlockRead
from torpor.errors import DeviceError, HandshakeError, TransportError
from torpor.kvcache.types import KVCacheSpec
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

# 2 MiB in K of one layer: enough to measure.
LARGE_SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=2, num_blocks=128, block_size=16, num_kv_heads=4, head_dim=64, dtype="float32"
)


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    with contextlib.closing(Pairs("ipc", tmp_path)) as pairs:
        yield pairs


# ---- which copies ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 64), st.integers(1, 2000))
def test_every_block_of_every_array_is_in_one_call(arrays: int, blocks: int, block_bytes: int, piece_bytes: int) -> None:
    copied = np.zeros((arrays, blocks), dtype=int)
    for some_arrays, some_blocks in gather.pieces(arrays, blocks, block_bytes, piece_bytes):
        part = copied[some_arrays, some_blocks]
        assert 0 < part.size * block_bytes <= max(piece_bytes, block_bytes)
        part += 1
    assert (copied == 1).all()


def test_all_layers_of_a_load_go_in_one_call(pairs: Pairs) -> None:
    p, d = pairs.pair()
    with held_read(d) as gate:
        params = p.prefill("r", A, [1, 2, 3])
        gate.open()
        assert d.load("q", A, params, [4, 5, 6]) == "recving"
    assert (gate.calls, d.has(A, [4, 5, 6])) == (1, True)


# ---- the device's own order ------------------------------------------------------------------------------------------------


def test_a_hand_off_is_granted_after_the_device_has_settled(pairs: Pairs) -> None:
    p = pairs.engine("P", "producer")
    worker: Any = p.worker
    leases: list[int] = []
    worker._settle = lambda: leases.append(len(worker._leases))
    p.prefill("r", A, [1, 2, 3])
    assert (leases, len(worker._leases)) == ([0], 1)
    p.step()
    assert leases == [0], "a step that neither hands off nor loads waits for nothing"


def test_a_load_begins_after_the_device_has_settled(pairs: Pairs) -> None:
    p, d = pairs.pair()
    worker: Any = d.worker
    in_flight: list[int] = []
    worker._settle = lambda: in_flight.append(worker._reader.loads_in_flight)
    assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
    assert in_flight == [0]


def test_p4a_pins_of_host_memory_say_nothing_about_a_device() -> None:
    watch = NoPins()
    with watch.registering(4096):
        pass
    with watch.deregistering():
        pass
    assert watch.held_bytes == 0


# ---- who still has it ------------------------------------------------------------------------------------------------------

PEER = """
import mmap, os, sys
fd = int(sys.argv[1])
page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
os.close(fd)
print("maps", flush=True)
sys.stdin.readline()
page.close()
print("dropped", flush=True)
sys.stdin.readline()
"""


def transport_on(driver: str, folder: Path, fence: FencePage) -> IpcTransport:
    """That has published a KV cache without memory files."""
    config = ConnectorConfig(connector="ipc", engine_id="P", extra={"socket_dir": str(folder)})
    transport = IpcTransport(config, Options.of(config, known={"socket_dir"}))
    exported = SimpleNamespace(regions=(), close=lambda: None)
    memory: Any = SimpleNamespace(device=SimpleNamespace(driver=driver), exports=lambda tag: exported)
    transport.open(Geometry(SMALL_SPEC, (), (), ()), memory, fence)
    transport.publish()
    return transport


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_p2_of_device_memory_the_fence_tells_whether_a_peer_still_has_it(tmp_path: Path) -> None:
    fence = FencePage(16)
    transport = transport_on("cuda", tmp_path, fence)
    with subprocess.Popen(
        [sys.executable, "-c", PEER, str(fence.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fence.fd],
        text=True,
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert peer.stdout.readline() == "maps\n"
        credentials = Credentials(peer.pid, os.geteuid(), start_time(peer.pid))
        assert not transport.lets_go(credentials)
        with no_descriptors_left():
            assert not transport.lets_go(credentials), "what cannot be looked at is not gone"
            with pytest.raises(OSError, match="Too many open files"):
                start_time(peer.pid)
        peer.stdin.write("drop\n")
        peer.stdin.flush()
        assert peer.stdout.readline() == "dropped\n"
        assert transport.lets_go(credentials)
        peer.kill()
    assert transport.lets_go(credentials), "a process that is gone holds nothing"
    transport.close()
    fence.close()


def test_the_fence_goes_after_the_last_import(tmp_path: Path) -> None:
    """The owner takes it for the import's sign of life."""
    fence = FencePage(16)
    view = FenceView(fence.fd, 16)
    stubborn: Any = SimpleNamespace(refusals=1, address=0)

    def close() -> None:
        stubborn.refusals -= 1
        if stubborn.refusals >= 0:
            raise DeviceError("not now")

    stubborn.close = close
    geometry = Geometry(SMALL_SPEC, (4096,), (1 << 16,), tuple(Place(0, i * SMALL_SPEC.layer_bytes) for i in range(2)))
    remote = IpcRemote(SimpleNamespace(), geometry, geometry, [stubborn], view, "P")  # type: ignore[arg-type]
    assert not remote.close()
    assert remote.look(1)
    assert remote.close()
    with pytest.raises(ValueError):
        remote.look(1)
    fence.close()


def test_memory_of_another_driver_is_refused_by_name(tmp_path: Path) -> None:
    fence = FencePage(16)
    transport = transport_on("host", tmp_path, fence)
    offer = wire.Offer(
        engine_id="P",
        epoch="0" * 16 + ".1",
        spec=wire.to_wire(SMALL_SPEC),
        driver="cuda",
        regions=[],
        layers=[],
        fence_address=0,
        fence_slots=16,
        lease_key=b"k" * 32,
    )
    with pytest.raises(HandshakeError, match=r"'cuda'.*'host'") as caught:
        transport.attach(offer, Geometry(SMALL_SPEC, (), (), ()), [], "P")
    assert caught.value.fields["setting"] == "memory_driver"
    transport.close()
    fence.close()


# ---- a range without a guard ------------------------------------------------------------------------------------------------


def test_p4_where_there_is_no_guard_a_late_read_finds_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, as with device memory, the owner's agent copies for its readers: it must not be there when the memory is gone."""
    pytest.importorskip("nixl_cu13")
    monkeypatch.setattr(Link, "_let_go", lambda link: link._channel.send(wire.Withdrawn(epoch=str(link.epoch))))
    monkeypatch.setattr(Link, "_drop", lambda link: None)
    with contextlib.closing(Pairs("nixl", tmp_path)) as pairs:
        p, d = pairs.pair(extra={"ucx_tls": "tcp"})
        p.worker._transport._unguarded = True  # type: ignore[attr-defined]
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        link = next(iter(d.worker._reader._pullers.values()))._link  # type: ignore[attr-defined]
        assert p.sleep().held_bytes == 0
        late = BlockRead(
            local=[4, 5, 6], remote=[1, 2, 3], writing=contextlib.nullcontext, stop=lambda: False, deadline=time.monotonic() + 5
        )
        with pytest.raises(TransportError):
            link._remote.read(late, lambda: None)
        p.wake()
        assert d.load("s", B, p.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.has(B, [4, 5, 6])


# ---- which way NIXL's bytes go ---------------------------------------------------------------------------------------------


def nixl_engine(spec: KVCacheSpec = LARGE_SPEC, **settings: Any) -> KVEngine:
    pytest.importorskip("nixl_cu13")
    return KVEngine(ConnectorConfig(connector="nixl", engine_id="P", role="producer", **settings), spec)


def test_nixl_says_once_at_start_up_how_fast_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torpor")
    with nixl_engine() as engine:
        path = engine.worker.stats().path
        assert "2.0 MiB of this KV cache were read at" in path
        assert [path in record.message for record in caplog.records if "GB/s" in record.message] == [True]
        assert engine.sleep().held_bytes == 0
        engine.wake()
        assert sum("GB/s" in record.message for record in caplog.records) == 1


def test_a_cache_too_small_to_measure_is_not_measured() -> None:
    with nixl_engine(SMALL_SPEC) as engine:
        assert "GB/s" not in engine.worker.stats().path


def test_a_slow_way_is_a_warning_that_names_the_faster_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl, "probe", lambda *_: Probe(4 << 20, 0.4e9, 370e9))
    with nixl_engine() as engine:
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "0.4 GB/s" in warning
        assert "--kv-connector ipc" in warning
        assert "0.4 GB/s" in engine.worker.stats().path


def test_a_probe_that_fails_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Probe:
        raise TransportError("it did not end", transport="nixl")

    monkeypatch.setattr(nixl, "probe", fails)
    with nixl_engine() as engine:
        assert "it did not end" in caplog.text
        assert engine.worker.epoch() is not None
