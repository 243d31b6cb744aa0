"""``lmcache`` at an ``lm://`` server: what comes back is what was kept, and a server that fails or says nothing costs hits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from connector_pairs import needs

from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache_chunks import Chunks
from torpor.connectors.lmcache_engine import Engine
from torpor.demo.fleet import free_port
from torpor.errors import ConfigurationError
from torpor.memory import Memory, MemoryConfig
from torpor.request import GenerationRequest, SamplingParams
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

A = list(range(100, 113))  # three blocks of four, and the token that is computed
WAIT_S = 30.0
PATIENCE_S = 2.0  # of an engine with a server that fails: as long as a busy machine may take for what needs no waiting
NAMES = [bytes([i]) * 32 for i in range(3)]


class Server:
    """LMCache's own, in a thread; ``paused`` it takes connections and says nothing."""

    def __init__(self) -> None:
        from lmcache.v1.server.__main__ import LMCacheServer

        self._plain = LMCacheServer("127.0.0.1", 0, "cpu")
        self.port: int = self._plain.server_socket.getsockname()[1]
        self.going = threading.Event()
        self.going.set()
        self.sockets: list[socket.socket] = []
        self.delay_s = 0.0  # of everything that is said
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    @property
    def kept(self) -> dict[Any, Any]:
        kept: dict[Any, Any] = self._plain.data_store.dict
        return kept

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                came, _ = self._plain.server_socket.accept()
                self.sockets.append(came)
                threading.Thread(target=self._serve, args=(came,), daemon=True).start()

    def _serve(self, came: socket.socket) -> None:
        """Between the client and LMCache's handler, so that it can be stopped."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._handle, args=(theirs,), daemon=True).start()
        for source, sink in ((came, ours), (ours, came)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _handle(self, theirs: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._plain.handle_client(theirs)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                self.going.wait()
                time.sleep(self.delay_s)
                sink.sendall(data)

    def close(self) -> None:
        self.going.set()
        for each in (*self.sockets, self._plain.server_socket):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join(WAIT_S)


@pytest.fixture
def server() -> Iterator[Server]:
    needs("lmcache")
    made = Server()
    yield made
    made.close()


def engine(url: str, name: str = "E", **extra: Any) -> KVEngine:
    options = {"host_bytes": 16 << 20, "remote_url": url, "remote_timeout_s": WAIT_S, **extra}
    return KVEngine(ConnectorConfig(connector="lmcache", engine_id=name, extra=options))


def impatient_engine(url: str, name: str = "E") -> KVEngine:
    return engine(url, name, remote_timeout_s=PATIENCE_S)


def found_by(of: KVEngine, prompt: list[int]) -> int:
    request = GenerationRequest(request_id="asks", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
    return of.scheduler.get_num_new_matched_tokens(request, 0)[0]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kept(by: KVEngine, server: Server, prompt: list[int], name: str = "r") -> None:
    before = len(server.kept)
    by.prefill(name, prompt, [1, 2, 3])
    by.wait(name, WAIT_S)
    until(lambda: len(server.kept) >= before + 3)


def client_of(engine: KVEngine) -> Any:
    backend = engine.worker._store._engine._engine.storage_manager.storage_backends["RemoteBackend-torpor"]  # type: ignore[attr-defined]
    return backend.connection.getWrappedConnector()


def some_time_later(of: KVEngine) -> None:
    """When what failed is tried again. Nothing is slow any more but the machine."""
    client = client_of(of)
    client._failed_at = client._slow_at = float("-inf")
    client._timeout_s = WAIT_S


class TestKeeping:
    def test_another_engine_finds_it(self, server: Server) -> None:
        with engine(server.url, "P") as p, engine(server.url, "D") as d:
            kept(p, server, A)
            assert d.load("q", A, {}, [4, 5, 6]) == "recving"
            assert d.has(A, [4, 5, 6])

    def test_reads_and_writes_that_meet_are_told_apart(self, server: Server) -> None:
        """Loads of one engine while another's blocks go out over the same connection."""
        with engine(server.url, "P") as p, engine(server.url, "D") as d:
            for n in range(12):
                kept(p, server, [n, *A[1:]], f"r{n}")
            for n in range(12):
                d.prefill(f"own{n}", [100 + n, *A[1:]], [1, 2, 3])
                assert d.load(f"q{n}", [n, *A[1:]], {}, [4, 5, 6]) == "recving"
                assert d.has([n, *A[1:]], [4, 5, 6])

    @pytest.mark.parametrize("where", [0, 127, -1])
    def test_p5_what_the_server_has_damaged_is_computed_and_kept_anew(self, server: Server, where: int) -> None:
        with engine(server.url, "P") as p, engine(server.url, "D") as d:
            kept(p, server, A)
            key = list(server.kept)[1]
            held = server.kept[key]
            damaged = bytearray(held.data)
            # The last byte of the content; behind it there is only the seal's layer.
            at = where if where >= 0 else len(damaged) - SMALL_SPEC.block_bytes - 1
            damaged[at] ^= 1
            server.kept[key] = dataclasses.replace(held, data=damaged)
            assert d.load("q", A, {}, [4, 5, 6]) == "failed"
            assert found_by(d, A) == 4, "it is not asked for again"
            d.prefill("own", A, [1, 2, 3])
            d.wait("own", WAIT_S)
            assert found_by(d, A) == 12
            until(lambda: bytes(server.kept[key].data) == bytes(held.data))

    def test_p5_a_block_under_another_s_name_is_computed(self, server: Server) -> None:
        with engine(server.url, "P") as p, engine(server.url, "D") as d:
            kept(p, server, A)
            first, second, _ = list(server.kept)
            server.kept[first], server.kept[second] = server.kept[second], server.kept[first]
            assert d.load("q", A, {}, [4, 5, 6]) == "failed"

    def test_e6_after_an_update_no_old_kv_is_served(self, server: Server) -> None:
        """The server keeps it, under names that nobody asks for."""
        with engine(server.url, "P") as p, engine(server.url, "D") as d:
            kept(p, server, A)
            assert found_by(d, A) == 12
            d.scheduler.set_weights_version("stand-in@2")
            assert found_by(d, A) == 0
            p.scheduler.set_weights_version("stand-in@2")
            kept(p, server, A, "again")
            assert found_by(d, A) == 12
            assert len(server.kept) == 6

    def test_a_model_with_a_long_name_has_keys_all_the_same(self, server: Server) -> None:
        spec = dataclasses.replace(SMALL_SPEC, model_id="/data/models/" + "m" * 200 + "@1")
        extra = {"host_bytes": 16 << 20, "remote_url": server.url}
        with KVEngine(ConnectorConfig(connector="lmcache", engine_id="L", extra=extra), spec) as p:
            kept(p, server, A)


class TestServersThatFail:
    def test_p2_one_that_says_nothing_costs_one_wait_and_no_sleep(self, server: Server, caplog: pytest.LogCaptureFixture) -> None:
        with engine(server.url, "P") as p, impatient_engine(server.url, "D") as d:
            kept(p, server, A)
            server.going.clear()
            begun = time.monotonic()
            assert found_by(d, A) == 0
            assert PATIENCE_S - 0.1 < time.monotonic() - begun < 2 * PATIENCE_S
            begun = time.monotonic()
            assert found_by(d, [1, *A]) == 0
            assert time.monotonic() - begun < PATIENCE_S / 2, "it is not asked again at once"
            begun = time.monotonic()
            d.prefill("own", [7, *A], [1, 2, 3])
            d.sleep()
            d.wake()
            assert time.monotonic() - begun < 2 * PATIENCE_S
            assert sum("is passed over" in record.message for record in caplog.records) == 1
            server.going.set()
            some_time_later(d)
            assert d.load("q", A, {}, [4, 5, 6]) == "recving", "and when it has come to it is used again"
            assert d.has(A, [4, 5, 6])

    def test_one_that_is_slow_costs_one_wait_however_long_the_prompt_is(self, server: Server) -> None:
        """The step loop asks, and every other request waits with it."""
        long = list(range(29))
        with engine(server.url, "P") as p, impatient_engine(server.url, "D") as d:
            p.prefill("r", long, [1, 2, 3, 4, 5, 6, 7])
            p.wait("r", WAIT_S)
            until(lambda: len(server.kept) >= 7)
            assert found_by(d, long) == 28
            server.delay_s = 0.4  # 0.8 s for an answer: 5.6 for all
            begun = time.monotonic()
            assert found_by(d, long) == 0
            assert time.monotonic() - begun < 2 * PATIENCE_S
            begun = time.monotonic()
            assert found_by(d, [1, *long]) == 0
            assert time.monotonic() - begun < PATIENCE_S / 2, "nor is it asked again at once"
            server.delay_s = 0.0
            some_time_later(d)
            assert found_by(d, long) == 28

    def test_a_prompt_s_question_does_not_wait_for_all_that_is_to_be_written(self, server: Server) -> None:
        with impatient_engine(server.url, "P") as p:
            begun_to_write, go = threading.Event(), threading.Event()
            client = client_of(p)
            plain = client.put

            async def slow(*args: Any) -> None:
                begun_to_write.set()
                go.wait(4 * PATIENCE_S)
                await plain(*args)

            client.put = slow
            p.prefill("r", A, [1, 2, 3])
            assert begun_to_write.wait(WAIT_S)
            begun = time.monotonic()
            assert found_by(p, [9, *A]) == 0
            assert time.monotonic() - begun < 2 * PATIENCE_S
            go.set()
            until(lambda: len(server.kept) >= 3)
            some_time_later(p)
            assert found_by(p, [9, *A]) == 0

    def test_a_load_that_it_leaves_in_the_middle_fails_and_the_next_is_right(self, server: Server) -> None:
        with engine(server.url, "P") as p, impatient_engine(server.url, "D") as d:
            kept(p, server, A)
            plain = server._plain.data_store.get

            def get_and_stop(key: Any) -> Any:
                server.going.clear()
                return plain(key)

            server._plain.data_store.get = get_and_stop
            begun = time.monotonic()
            assert d.load("q", A, {}, [4, 5, 6]) == "failed"
            assert PATIENCE_S - 0.1 < time.monotonic() - begun < 2 * PATIENCE_S
            server._plain.data_store.get = plain
            server.going.set()
            some_time_later(d)
            assert d.load("again", A, {}, [4, 5, 6]) == "recving"
            assert d.has(A, [4, 5, 6])

    def test_one_that_comes_later_is_used_when_it_is_there(self, caplog: pytest.LogCaptureFixture) -> None:
        needs("lmcache")
        port = free_port()
        with impatient_engine(f"lm://127.0.0.1:{port}", "P") as p:
            assert found_by(p, A) == 0
            assert "is passed over" in caplog.text
            made = _server_at(port)
            some_time_later(p)
            kept(p, made, A)
            made.close()

    @pytest.mark.parametrize("says", [b"", b"\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 64, b"\xff" * 36])
    def test_one_that_is_something_else_costs_hits(self, says: bytes) -> None:
        needs("lmcache")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_say, args=(listener, says), daemon=True)
            thread.start()
            with impatient_engine(f"lm://127.0.0.1:{listener.getsockname()[1]}") as p:
                assert found_by(p, A) == 0
                p.prefill("r", A, [1, 2, 3])
                assert p.wait("r", WAIT_S) == "sending"
                p.sleep()
                p.wake()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)
            assert not thread.is_alive()


class TestSettings:
    @pytest.mark.parametrize("url", ["lm://", "lm://host", "lm://:7", "lm://host:port", "lm://host:99999", "http://host:7"])
    def test_an_address_that_cannot_be_is_refused_by_name(self, url: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            engine(url)
        assert caught.value.fields["setting"] == "remote_url"

    def test_chunks_of_this_process_alone_have_no_seal(self) -> None:
        needs("lmcache")
        with KVEngine(ConnectorConfig(connector="lmcache", engine_id="E", extra={"host_bytes": 16 << 20})) as made:
            assert isinstance(made.worker._store._engine, Engine)  # type: ignore[attr-defined]
        memory = Memory(MemoryConfig(driver="host"))
        assert (
            Chunks(SMALL_SPEC, memory.device, sealed=False).nbytes * 3
            == 2 * Chunks(SMALL_SPEC, memory.device, sealed=True).nbytes
        )
        memory.close()


def test_lmcache_s_own_client_returns_shifted_bytes_with_success(server: Server) -> None:
    """Why it is not used: of reads that wait for its connection one takes the beginning of another's answer."""
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

    class Chunk:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        @property
        def byte_array(self) -> memoryview:
            return memoryview(self.tensor.view(torch.uint8).reshape(-1).numpy())

        def get_shape(self) -> torch.Size:
            return self.tensor.shape

        def get_dtype(self) -> torch.dtype:
            return self.tensor.dtype

        def get_memory_format(self) -> MemoryFormat:
            return MemoryFormat.KV_2LTD

    class Local:
        def allocate(self, shape: torch.Size, dtype: torch.dtype, fmt: Any) -> Chunk:
            return Chunk(torch.zeros(shape, dtype=dtype))

    async def meet() -> list[Any]:
        client = object.__new__(LMCServerConnector)
        client.client_socket = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        client.loop, client.local_cpu_backend = asyncio.get_running_loop(), Local()
        client.async_socket_lock = asyncio.Lock()
        keys = [CacheEngineKey("m", 1, 0, n, torch.float32) for n in (1, 2, 3)]
        for key in keys:
            await client.put(key, Chunk(torch.full((2, 2, 4, 16), float(key.chunk_hash))))
        async with client.async_socket_lock:  # as a put has it that waits for its socket
            gets = [asyncio.ensure_future(client.get(key)) for key in keys]
            await asyncio.sleep(0.05)
        found = await asyncio.gather(*gets, return_exceptions=True)
        client.client_socket.close()
        return found

    first, second, _ = asyncio.run(meet())
    assert isinstance(first, Chunk), first
    assert not torch.equal(first.tensor, torch.full((2, 2, 4, 16), 1.0)), "with success"
    assert isinstance(second, Exception)


def _server_at(port: int) -> Server:
    made = Server()
    plain = made._plain.server_socket
    made._plain.server_socket = socket.create_server(("127.0.0.1", port))
    plain.close()
    made.port = port
    made._thread = threading.Thread(target=made._run, daemon=True)
    made._thread.start()
    return made


def _say(listener: socket.socket, says: bytes) -> None:
    with contextlib.suppress(OSError):
        listener.settimeout(WAIT_S)
        while True:
            came, _ = listener.accept()
            with came:
                came.sendall(says)
                time.sleep(0.01)
