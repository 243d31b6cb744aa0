"""LMCache's P/D mode: what is pushed arrives right or not at all, its buffers never sleep, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import zmq
from connector_pairs import Background, Gate, needs
from engine_driver import Driver
from leftovers import no_threads_left
from lmcache_pairs import free_peer
from store_driver import LONG, OTHER, StoreDriver, told

from torpor.connectors.config import ConnectorConfig
from torpor.connectors.lmcache import LMCacheConnector
from torpor.connectors.lmcache_pd import PairLMCacheConnector
from torpor.connectors.lmcache_pd_store import PairStore
from torpor.errors import ConfigurationError, ConnectorError, RequestError, TransportError
from torpor.memory.types import Residency
from torpor.testing.engine import FakeWorker
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
WAIT_S = 30.0
PROMPT = list(range(100, 113))  # three blocks of four, and the token that is computed


@pytest.fixture
def extra() -> dict[str, Any]:
    needs("lmcache")
    needs("nixl")
    return {"pd_peer": free_peer(), "pd_buffer_bytes": 256 << 10, "pd_wait_s": 10.0}


class Pair:
    """Two engines by hand; every answer is known."""

    def __init__(self, extra: dict[str, Any]) -> None:
        self.d = StoreDriver("lmcache", engine_id="D", role="consumer", extra=extra)
        self.p = StoreDriver("lmcache", engine_id="P", role="producer", extra=extra)

    def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """What goes to D with the request."""
        self.p.add(name, 1, prompt, **HAND_OVER)
        self.p.settle()
        params = self.p.ends[name].kv_transfer_params
        assert params is not None
        return dict(params)

    def answer(self, name: str, prompt: list[int], params: dict[str, Any] | None = None) -> list[int]:
        """D's, of KV that P computed."""
        self.d.add(name, 8, prompt, **(params or self.prefill(name, prompt)))
        self.d.settle()
        return list(self.d.tokens[name])

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair(extra: dict[str, Any]) -> Iterator[Pair]:
    made = Pair(extra)
    yield made
    made.close()


def engine(role: Any, extra: dict[str, Any], **settings: Any) -> KVEngine:
    spec = settings.pop("spec", SMALL_SPEC)
    return KVEngine(ConnectorConfig(connector="lmcache", engine_id=role, role=role, extra=extra, **settings), spec)


@pytest.fixture
def engines(extra: dict[str, Any]) -> Iterator[tuple[KVEngine, KVEngine]]:
    with engine("consumer", extra) as d, engine("producer", extra) as p:
        yield p, d


def store_of(of: KVEngine) -> PairStore:
    store = of.worker._store  # type: ignore[attr-defined]
    assert isinstance(store, PairStore)
    return store


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestHandingOver:
    @pytest.mark.parametrize("level", [1, 2])
    def test_eight_new_requests_are_right_after_each_of_two_wakes_of_the_prefill_engine(self, pair: Pair, level: int) -> None:
        prompts = [[*LONG[:16], n, *OTHER[: 12 + n]] for n in range(16)]
        right = [told(prompt) for prompt in prompts]
        assert pair.answer("first", LONG) == told(LONG)
        for cycle in range(2):
            pair.p.slept(level=level)
            pair.p.woken()
            new = range(8 * cycle, 8 * cycle + 8)
            answers = [pair.answer(f"q{n}", prompts[n]) for n in new]
            assert answers == [right[n] for n in new], "8/8 identical"
            assert all(pair.d.cached(f"q{n}") >= 28 for n in new), "and none of them computed by D"
        assert pair.d.side.stats().loads_failed == 0
        assert pair.d.side.stats().loads_done == 17

    def test_after_sleeps_of_the_decode_engine_too(self, pair: Pair) -> None:
        for cycle, who in enumerate(("d", "p", "both")):
            asleep = [one for one, name in ((pair.d, "d"), (pair.p, "p")) if who in (name, "both")]
            for one in asleep:
                one.slept(level=1)
            for one in asleep:
                one.woken()
            prompt = [cycle, *OTHER]
            assert pair.answer(f"q{cycle}", prompt) == told(prompt)
            assert pair.d.cached(f"q{cycle}") == 40

    def test_what_was_pushed_before_a_sleep_of_the_prefill_engine_is_read_during_it(self, pair: Pair) -> None:
        params = pair.prefill("q", LONG)
        pair.p.slept(level=1)
        assert pair.answer("q", LONG, params) == told(LONG)
        assert pair.d.cached("q") == 40
        pair.p.woken()

    def test_only_what_the_prefix_cache_lacks_is_loaded_and_the_rest_given_back(self, pair: Pair) -> None:
        assert pair.answer("a", LONG[:10]) == told(LONG[:10])
        assert pair.answer("b", LONG) == told(LONG)
        assert pair.d.figures.loaded_blocks == 2 + 8
        assert not pair.d.store._receiver.data  # type: ignore[attr-defined]

    def test_only_what_is_asked_for_is_pushed(self, pair: Pair) -> None:
        assert pair.p.answer("a", prompt=LONG) == told(LONG)
        assert pair.p.figures.saved_blocks == 0
        assert pair.p.ends["a"].kv_transfer_params is None

    def test_a_prompt_without_a_full_block_is_computed(self, pair: Pair) -> None:
        pair.p.add("a", 1, [1, 2, 3], **HAND_OVER)
        pair.p.settle()
        assert pair.p.ends["a"].kv_transfer_params is None

    @pytest.mark.parametrize("told_tokens", [0, -4, "40", None, 1 << 40, True])
    def test_params_that_cannot_be_are_refused_at_the_door(self, pair: Pair, told_tokens: Any) -> None:
        params = {"do_remote_prefill": True, "remote_num_tokens": told_tokens}
        with pytest.raises(RequestError, match="remote_num_tokens"):
            pair.d.add("q", 1, LONG, **params)

    def test_a_request_for_the_other_engine_is_refused_by_name(self, pair: Pair) -> None:
        """As ``ipc`` does: a router that has them the wrong way round would have every prompt computed twice, and say nothing."""
        with pytest.raises(RequestError, match="kv_role is producer"):
            pair.d.add("q", 1, LONG, **HAND_OVER)
        with pytest.raises(RequestError, match="kv_role is consumer"):
            pair.p.add("q", 1, LONG, do_remote_prefill=True, remote_num_tokens=40)

    def test_p5_what_was_announced_and_never_comes_is_computed(self, extra: dict[str, Any]) -> None:
        needs("lmcache")
        d = StoreDriver("lmcache", engine_id="D", role="consumer", extra={**extra, "pd_wait_s": 0.2})
        d.add("q", 8, LONG, do_remote_prefill=True, remote_num_tokens=4000)
        d.settle()
        assert (d.tokens["q"], d.cached("q")) == (told(LONG), 0)
        assert d.side.stats().loads_failed == 1
        d.close()

    def test_p5_what_never_comes_does_not_make_others_wait_once_for_each(self, extra: dict[str, Any]) -> None:
        """A prefill engine died after it had answered, or somebody invents hand-offs: all of them are late at the same time."""
        with engine("consumer", {**extra, "pd_wait_s": 1.0}) as d, engine("producer", extra) as p:
            invented = {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 12}
            params = p.prefill("r", PROMPT, [1, 2, 3])
            begun = time.monotonic()
            for n in range(8):
                d.begin_load(f"lost{n}", [n, *PROMPT], invented, [1, 2, 3])
            assert d.load("q", PROMPT, params, [4, 5, 6]) == "recving"
            assert time.monotonic() - begun < 5.0, "one after the other they would take 8 s"
            assert d.has(PROMPT, [4, 5, 6])
            assert [d.wait(f"lost{n}") for n in range(8)] == ["failed"] * 8


class TestSleeping:
    def test_e1_the_buffers_lie_in_no_pool(self, pair: Pair) -> None:
        plain = Driver(worker=FakeWorker())
        held = {tag.tag: tag.allocated_bytes for tag in plain.worker.memory.stats().tags}
        plain.close()
        for one in (pair.p, pair.d):
            assert {tag.tag: tag.allocated_bytes for tag in one.worker.memory.stats().tags} == held

    def test_nothing_is_unmapped_while_blocks_go_into_the_buffer(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, _ = engines
        store, gate = store_of(p), Gate()
        store._chunks.fill = gate.before(store._chunks.fill)  # type: ignore[method-assign]
        p.prefill("r", PROMPT, [1, 2, 3])
        assert gate.reached.wait(WAIT_S)
        sleeping = Background(lambda: p.memory.sleep({"kv_cache": "discard"}))
        assert not sleeping.ended_within(0.2)
        assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        gate.open()
        sleeping.result()

    def test_p2_a_receiver_that_says_nothing_does_not_hold_up_a_sleep(
        self, engines: tuple[KVEngine, KVEngine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        p, d = engines
        gate, receiver = Gate(), store_of(d)._receiver
        assert receiver is not None
        monkeypatch.setattr(receiver, "_room_for", gate.before(receiver._room_for))
        p.prefill("r", PROMPT, [1, 2, 3])
        assert gate.reached.wait(WAIT_S)
        begun = time.monotonic()
        p.sleep()
        p.wake()
        assert time.monotonic() - begun < p.config.withdraw_timeout_s - 1
        gate.open()

    def test_e5_the_kv_cache_is_nobody_s_after_the_shutdown(self, engines: tuple[KVEngine, KVEngine]) -> None:
        for one in engines:
            one.worker.shutdown()
            layers = [weakref.ref(tensor) for tensor in one.kv_caches.values()]
            one.kv_caches.clear()
            gc.collect()
            assert [layer() for layer in layers] == [None] * len(layers)

    def test_nothing_of_it_is_left_at_the_end(self, extra: dict[str, Any]) -> None:
        for _ in range(2):  # the same ports
            with no_threads_left(), engine("consumer", extra) as d, engine("producer", extra) as p:
                params = p.prefill("r", PROMPT, [1, 2, 3])
                assert d.load("q", PROMPT, params, [4, 5, 6]) == "recving"


class TestWeights:
    def test_e6_after_an_update_no_old_kv_is_served(self, extra: dict[str, Any]) -> None:
        with contextlib.closing(Pair({**extra, "pd_wait_s": 2.0})) as pair:
            self.is_not_served(pair)

    def is_not_served(self, pair: Pair) -> None:
        params = pair.prefill("q", LONG)
        pair.d.worker.weights += 1
        pair.d.core.set_weights_version("fake@2")
        begun = time.monotonic()
        assert pair.answer("q", LONG, params) not in (told(LONG), [])
        assert pair.d.cached("q") == 0
        assert time.monotonic() - begun < WAIT_S
        pair.p.worker.weights += 1
        pair.p.core.set_weights_version("fake@2")
        new = pair.answer("again", [1, *LONG])
        assert new != told([1, *LONG])
        assert pair.d.cached("again") == 40

    def test_p5_another_layout_is_never_read(self, extra: dict[str, Any]) -> None:
        other = dataclasses.replace(SMALL_SPEC, num_kv_heads=1, head_dim=16)  # as many bytes
        with engine("consumer", {**extra, "pd_wait_s": 0.2}) as d, engine("producer", extra, spec=other) as p:
            params = p.prefill("r", PROMPT, [1, 2, 3])
            assert d.load("q", PROMPT, params, [4, 5, 6]) == "failed"


class TestChunks:
    """LMCache shows a chunk when there is room for it."""

    def test_p5_a_chunk_is_not_believed_before_all_of_it_is_there(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, d = engines
        sender, gate = store_of(p)._sender, Gate()
        assert sender is not None
        channel = sender.transfer_channel
        channel.batched_write = gate.before(channel.batched_write)
        params = p.prefill("r", PROMPT, [1, 2, 3])
        assert gate.reached.wait(WAIT_S)
        assert store_of(d).held_tokens(PROMPT[:12]) == 12, "there is room for them"
        d.begin_load("q", PROMPT, params, [4, 5, 6])
        time.sleep(0.1)
        assert not d.step().recving
        gate.open()
        assert d.wait("q", WAIT_S) == "recving"
        assert d.has(PROMPT, [4, 5, 6])

    @pytest.mark.parametrize("damage", ["first byte", "last byte", "seal"])
    def test_p5_a_damaged_chunk_is_computed_and_may_come_again(self, engines: tuple[KVEngine, KVEngine], damage: str) -> None:
        p, d = engines
        params = p.prefill("r", PROMPT, [1, 2, 3])
        receiver = store_of(d)._receiver
        assert receiver is not None
        names = store_of(d)._names.of(PROMPT)
        until(lambda: all(receiver.copy_of(name) is not None for name in names))
        chunk = receiver.data[receiver.key(names[1])].tensor.view(-1)
        at = {"first byte": 0, "last byte": chunk.numel() * 2 // 3 - 1, "seal": chunk.numel() * 5 // 6}[damage]
        chunk[at] += 1.0
        store_of(d)._options = dataclasses.replace(store_of(d)._options, pd_wait_s=0.1)
        assert d.load("q", PROMPT, params, [4, 5, 6]) == "failed"
        store_of(d)._options = dataclasses.replace(store_of(d)._options, pd_wait_s=WAIT_S)
        params = p.prefill("s", PROMPT, [1, 2, 3])
        assert d.load("again", PROMPT, params, [4, 5, 6]) == "recving", "what does not prove itself is asked for again"
        assert d.has(PROMPT, [4, 5, 6])

    def test_p5_a_chunk_of_another_name_is_not_believed(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, d = engines
        p.prefill("r", PROMPT, [1, 2, 3])
        receiver, names = store_of(d)._receiver, store_of(d)._names.of(PROMPT)
        assert receiver is not None
        until(lambda: all(receiver.copy_of(name) is not None for name in names))
        with receiver.data_lock:
            first, second = receiver.key(names[0]), receiver.key(names[1])
            receiver.data[first], receiver.data[second] = receiver.data[second], receiver.data[first]
        assert receiver.copy_of(names[0]) is None
        assert receiver.copy_of(names[2]) is not None

    def test_a_full_receiver_gives_up_its_oldest(self, extra: dict[str, Any]) -> None:
        room = 8 * (3 * 2 * SMALL_SPEC.block_bytes)
        with engine("consumer", {**extra, "pd_buffer_bytes": room}) as d, engine("producer", extra) as p:
            receiver = store_of(d)._receiver
            assert receiver is not None
            for n in range(5):
                prompt = [n, *PROMPT[1:]]
                params = p.prefill(f"r{n}", prompt, [1, 2, 3])
                until(lambda prompt=prompt: all(receiver.copy_of(name) is not None for name in store_of(d)._names.of(prompt)))
                assert len(receiver.data) <= 8
            assert store_of(d).held_tokens([0, *PROMPT[1:12]]) == 0
            assert d.load("q", prompt, params, [4, 5, 6]) == "recving"

    def test_a_receiver_too_small_for_a_prompt_is_sent_nothing(self, extra: dict[str, Any]) -> None:
        small = {**extra, "pd_buffer_bytes": 2 * (3 * 2 * SMALL_SPEC.block_bytes), "pd_wait_s": 0.2}
        with engine("consumer", small) as d, engine("producer", extra) as p:
            params = p.prefill("r", PROMPT, [1, 2, 3])
            assert d.load("q", PROMPT, params, [4, 5, 6]) == "failed"
            short = PROMPT[:9]
            assert d.load("s", short, p.prefill("s", short, [1, 2]), [4, 5]) == "recving"

    def test_a_sender_without_room_keeps_nothing_back(self, extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        small = {**extra, "pd_buffer_bytes": 2 * (3 * 2 * SMALL_SPEC.block_bytes)}
        with engine("consumer", extra), engine("producer", small) as p:
            p.prefill("r", PROMPT, [1, 2, 3])
            assert p.wait("r", WAIT_S) == "sending"
            assert "pd_buffer_bytes" in caplog.text
            assert p.worker.stats().store.skipped_blocks == 3  # type: ignore[union-attr]


class TestReceiversThatFail:
    def test_a_decode_engine_that_began_anew_is_found_by_the_next_push(self, extra: dict[str, Any]) -> None:
        with engine("producer", extra) as p:
            for n in range(3):
                with engine("consumer", extra) as d:
                    prompt = [n, *PROMPT[1:]]
                    assert d.load("q", prompt, p.prefill(f"r{n}", prompt, [1, 2, 3]), [4, 5, 6]) == "recving"
                    assert d.has(prompt, [4, 5, 6])

    def test_nobody_there_costs_nothing_but_the_push(self, extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
        """And no memory of the staging buffer, however often."""
        with engine("producer", {**extra, "pd_wait_s": 0.1}) as p:
            sender = store_of(p)._sender
            assert sender is not None
            free = len(sender._allocator.free_blocks)
            for n in range(4):
                p.prefill(f"r{n}", [n, *PROMPT[1:]], [1, 2, 3])
                assert p.wait(f"r{n}", WAIT_S) == "sending"
            until(lambda: p.worker.stats().store.skipped_blocks == 12)  # type: ignore[union-attr]
            until(lambda: len(sender._allocator.free_blocks) == free)
            assert "is not handed over" in caplog.text
            with engine("consumer", extra) as d:
                assert d.load("q", PROMPT, p.prefill("late", PROMPT, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_while_a_write_hangs_nothing_else_is_pushed(self, engines: tuple[KVEngine, KVEngine]) -> None:
        p, _ = engines
        sender = store_of(p)._sender
        assert sender is not None
        sender._written = Future()
        with pytest.raises(TransportError, match="has not taken"):
            sender.push([b"n" * 32], [])
        sender._written.set_result(0)

    @pytest.mark.parametrize("which", ["requests for room", "handshakes"])
    @pytest.mark.parametrize("says", [b"", b"\xc1", msgspec.msgpack.encode({"type": "of another version"})])
    def test_what_it_cannot_read_does_not_make_it_deaf(
        self, extra: dict[str, Any], engines: tuple[KVEngine, KVEngine], which: str, says: bytes
    ) -> None:
        """LMCache's socket takes no other question before one is answered, and its loop answers none that it cannot read."""
        p, d = engines
        host, init_port, alloc_port = extra["pd_peer"].split(":")
        for _ in range(2):
            with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.RCVTIMEO, 500)
                stranger.connect(f"tcp://{host}:{alloc_port if which == 'requests for room' else init_port}")
                stranger.send(says)
                with contextlib.suppress(zmq.ZMQError):
                    stranger.recv()
        assert d.load("q", PROMPT, p.prefill("r", PROMPT, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.has(PROMPT, [4, 5, 6])


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "setting"),
        [
            ({"pd_peer": "somewhere"}, "pd_peer"),
            ({"pd_peer": "127.0.0.1:7000"}, "pd_peer"),
            ({"pd_peer": "127.0.0.1:7000:7000"}, "pd_peer"),
            ({"pd_peer": "127.0.0.1:7000:70000"}, "pd_peer"),
            ({"pd_peer": ":7000:7001"}, "pd_peer"),
            ({"pd_buffer_device": "tpu"}, "pd_buffer_device"),
            ({"pd_buffer_device": "cuda"}, "pd_buffer_device"),
            ({"pd_buffer_bytes": 100}, "pd_buffer_bytes"),
            ({"host_bytes": 1 << 20}, "host_bytes"),
            ({"remote_url": "lm://127.0.0.1:1"}, "remote_url"),
            ({"pd_wait_s": 0}, "pd_wait_s"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, extra: dict[str, Any], given: dict[str, Any], setting: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            engine("consumer", {**extra, **given})
        assert caught.value.fields["setting"] == setting

    def test_its_options_need_the_mode(self) -> None:
        with pytest.raises(ConfigurationError, match=r"pd_buffer_bytes.* needs a pd_peer"):
            engine("both", {"pd_buffer_bytes": 1 << 20})

    def test_an_engine_is_one_end(self, extra: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="kv_role 'both'"):
            engine("both", extra)

    def test_ports_that_are_taken_are_named(self, extra: dict[str, Any]) -> None:
        _, port, _ = extra["pd_peer"].split(":")
        with socket.create_server(("127.0.0.1", int(port))), pytest.raises(ConfigurationError, match=port) as caught:
            engine("consumer", extra)
        assert caught.value.fields["setting"] == "pd_peer"

    def test_without_nixl_it_says_what_to_install(self, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        for package in ("nixl_cu13", "nixl"):
            monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConnectorError, match=r"P/D mode needs NIXL: pip install 'torpor\[nixl\]'"):
            engine("consumer", extra)

    def test_it_reaches_other_processes(self, extra: dict[str, Any]) -> None:
        assert LMCacheConnector.configured(ConnectorConfig(connector="lmcache", extra=extra)) is PairLMCacheConnector
        assert PairLMCacheConnector.reach == "processes"
