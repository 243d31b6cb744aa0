"""``multi``: who reads, who keeps, and what becomes of the others when one child fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_pairs import WAIT_S, A, B, Background, Pairs, held_read

from torpor.cli.kv_transfer import parse_kv_transfer_config
from torpor.connectors import ConnectorConfig, get_connector
from torpor.connectors.base import KVConnectorWorker, works_by_layer
from torpor.connectors.multi import MultiConnector
from torpor.connectors.multi_config import children_of
from torpor.connectors.multi_scheduler import PARTS, MultiScheduler
from torpor.connectors.multi_worker import LayeredMultiWorker, MultiWorker
from torpor.engine.config import SleepConfig
from torpor.engine.kv_connector import choose_connector
from torpor.errors import ConfigurationError, ConnectorError, HookError, RequestError, TransportError
from torpor.memory.types import Residency
from torpor.request import GenerationRequest, SamplingParams
from torpor.testing.connectors import MemoryConnector, MemoryConnectorWorker
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine, expected

MEMORY = "torpor.testing.connectors:MemoryConnector"
DEAF = "torpor.testing.connectors:UnsupportedConnector"


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    pairs = Pairs("multi", tmp_path)
    yield pairs
    pairs.close()


def ipc(folder: Path) -> dict[str, Any]:
    return {"kv_connector": "ipc", "kv_connector_extra_config": {"socket_dir": str(folder / "kv")}}


def both(folder: Path) -> dict[str, Any]:
    return {"connectors": [ipc(folder), MEMORY]}


def child(engine: KVEngine, index: int) -> Any:
    assert isinstance(engine.worker, MultiWorker)
    return engine.worker._children[index]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _not_kept_any_more(*args: Any) -> Any:
    raise TransportError("a block of it is not kept any more", transport="offload")


def config(**extra: Any) -> ConnectorConfig:
    return ConnectorConfig(connector="multi", engine_id="E", extra=extra)


class TestOptions:
    def test_children_are_names_or_vllms_objects(self) -> None:
        entry = {"kv_connector": "Mine", "kv_connector_module_path": "my.module"}
        made = children_of(
            config(connectors=["ipc", {"kv_connector": "nixl", "kv_role": "kv_producer", "kv_port": 7}, "ipc", "multi"][:3])
        )
        assert [c.label for c in made] == ["ipc", "nixl", "ipc#2"]
        assert [c.config.engine_id for c in made] == ["E.ipc", "E.nixl", "E.ipc#2"]
        assert (made[1].config.role, made[1].config.port, made[0].config.role) == ("producer", 7, "both")
        assert sum(c.config.withdraw_timeout_s for c in made) == pytest.approx(config().withdraw_timeout_s)
        with pytest.raises(ConnectorError, match=r"my\.module:Mine"):
            children_of(config(connectors=[entry]))

    def test_the_port_that_was_asked_for_is_that_of_children_without_their_own(self) -> None:
        """A random one would be behind a firewall."""
        asked = dataclasses.replace(config(connectors=["ipc", "nixl", {"kv_connector": "mooncake", "kv_port": 8}]), port=7)
        assert [c.config.port for c in children_of(asked)] == [7, 7, 8]

    @pytest.mark.parametrize("text", ["ipc,nixl", "ipc, nixl", '["ipc", "nixl"]', '[{"kv_connector": "ipc"}, "nixl"]'])
    def test_a_command_line_has_only_text(self, text: str) -> None:
        assert [c.label for c in children_of(config(connectors=text))] == ["ipc", "nixl"]

    @pytest.mark.parametrize(
        ("extra", "named"),
        [
            ({}, "a list of connectors is needed"),
            ({"connectors": []}, "a list of connectors is needed"),
            ({"connectors": 3}, "a list of connectors is needed"),
            ({"connectors": "[1"}, "not valid JSON"),
            ({"connectors": [1]}, "entry 0 must be a name"),
            ({"connectors": ["ipc", {}]}, "entry 1 needs a kv_connector"),
            ({"connectors": [{"kv_connector": "ipc", "port": 1}]}, "entry 0 has the unknown key 'port'"),
            ({"connectors": [{"kv_connector": "ipc", "kv_role": "reader"}]}, "kv_role of entry 0"),
            ({"connectors": [{"kv_connector": "ipc", "kv_port": "1"}]}, "kv_port a number"),
            ({"connectors": ["pigeon"]}, "'pigeon' is not known"),
            ({"connectors": ["ipc"], "socket_dir": "/tmp"}, "no option 'socket_dir'; known: connectors"),
        ],
    )
    def test_what_is_wrong_is_named(self, extra: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigurationError, match=named):
            MultiConnector.configured(config(**extra))

    def test_vllms_own_json_works(self) -> None:
        found = parse_kv_transfer_config(
            '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": '
            '[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_connector": "X", "kv_connector_module_path": "m"}]}}'
        )
        assert (found["connector"], found["role"]) == ("multi", "both")
        assert [entry["kv_connector"] for entry in found["extra"]["connectors"]] == ["nixl", "m:X"]

    def test_vllms_json_with_an_unknown_child_lists_the_known(self) -> None:
        with pytest.raises(ConfigurationError, match="torpor has NixlConnector"):
            parse_kv_transfer_config(
                '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
                '{"connectors": [{"kv_connector": "PigeonConnector"}]}}'
            )


class TestSupport:
    def test_e4_it_sleeps_only_if_every_child_does(self) -> None:
        on = SleepConfig(enable_sleep_mode=True)
        kind, _ = choose_connector(config(connectors=["ipc", MEMORY]), on)
        assert kind.supports_sleep_mode
        with pytest.raises(ConnectorError, match=r"connector 'multi' does not support sleep mode"):
            choose_connector(config(connectors=["ipc", DEAF]), on)
        assert not get_connector("multi").supports_sleep_mode

    def test_it_says_what_its_children_are(self) -> None:
        kind = MultiConnector.configured(config(connectors=[MEMORY, "ipc"]))
        assert kind.children == (MemoryConnector, get_connector("ipc"))
        assert (kind.reach, kind.finds_by) == ("process", "params")

    def test_p4_one_guarded_child_is_enough(self) -> None:
        unfollowed = "torpor.testing.unfollowed:UnfollowedIpc"
        assert MultiConnector.configured(config(connectors=[unfollowed, "ipc"])).guarded
        assert not MultiConnector.configured(config(connectors=[unfollowed])).guarded


class TestTransfers:
    def test_the_first_that_has_it_reads_and_all_let_go(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        assert set(params[PARTS]) == {"ipc", "MemoryConnector"}
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert d.has(A, [0, 7, 2])
        assert p.wait("r") == "sending"
        first, second = d.worker.stats().children
        assert (first.loads_done, second.loads_done) == (1, 0)

    def test_one_that_the_first_does_not_know_is_read_by_the_second(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        del params[PARTS]["ipc"]
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert d.has(A, [0, 7, 2])
        assert [part.loads_done for part in d.worker.stats().children] == [0, 1]

    def test_the_others_hear_that_they_may_let_go(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra={"connectors": [MEMORY, ipc(tmp_path)]})
        params = p.prefill("r", A, [5, 1, 3])
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert d.worker.stats().children[0].loads_done == 1
        assert p.wait("r", 5) == "sending", "ipc heard of it too"

    def test_blocks_are_free_when_the_last_child_has_ended_the_hand_off(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])  # the second child copied at once, and is done with the blocks
        with pytest.raises(TimeoutError):
            p.wait("r", 0.1)  # the first child still offers them
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert p.wait("r") == "sending"

    def test_a_name_that_is_used_again_is_counted_anew(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        for prompt in (A, B):
            params = p.prefill("again", prompt, [5, 1, 3])
            assert d.load(f"q{prompt[0]}", prompt, params, [0, 7, 2]) == "recving"
            assert p.wait("again") == "sending"

    def test_a_peer_with_the_first_child_alone_reads_too(self, pairs: Pairs, tmp_path: Path) -> None:
        p = pairs.engine("P", "producer", extra=both(tmp_path))
        single = Pairs("ipc", tmp_path)
        try:
            d = single.engine("D", "consumer")
            assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.has(A, [4, 5, 6])
            alone = single.engine("P2", "producer")
            many = pairs.engine("D2", "consumer", extra=both(tmp_path))
            assert many.load("q", B, alone.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"
        finally:
            single.close()

    def test_a_cancelled_load_ends_once(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        p.step = lambda: None  # type: ignore[method-assign,assignment]
        params = p.prefill("r", A, [5, 1, 3])  # which P's worker has not heard of
        d.begin_load("q", A, params, [0, 7, 2])
        d.cancel("q")
        assert d.wait("q") == "failed"

    def test_a_load_that_failed_is_asked_of_the_next_that_has_it(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        for n in range(2):
            params = p.prefill(f"r{n}", A, [5, 1, 3])
            params[PARTS]["ipc"]["torpor"]["lease"] += 100
            assert d.load(f"q{n}", A, params, [0, 7, 2]) == "recving"
            assert d.has(A, [0, 7, 2])
        assert [(part.loads_done, part.loads_failed) for part in d.worker.stats().children] == [(0, 2), (2, 0)]
        assert not d.worker._spares  # type: ignore[attr-defined]

    def test_behind_a_prefix_too(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        params[PARTS]["ipc"]["torpor"]["lease"] += 100
        before = d.block(0)
        d.begin_load("q", A, params, [7, 2], num_computed=4)
        assert d.wait("q") == "recving"
        assert [d.block(7), d.block(2)] == [expected(SMALL_SPEC, A, 1), expected(SMALL_SPEC, A, 2)]
        assert d.block(0) == before

    def test_when_all_have_failed_it_has_failed_once(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        for part in params[PARTS].values():
            part["torpor"]["lease"] += 100
        assert d.load("q", A, params, [0, 7, 2]) == "failed"
        with pytest.raises(TimeoutError):
            d.wait("q", 0.2)
        assert [part.loads_failed for part in d.worker.stats().children] == [1, 1]

    @pytest.mark.parametrize("kept_first", [True, False])
    def test_a_store_and_a_peer_stand_in_for_each_other(
        self, pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_first: bool
    ) -> None:
        """13 tokens: the peer has 12 of them for us, and so has the store."""
        prompt = [*A, 1, 2, 3]
        children = ["offload", ipc(tmp_path)] if kept_first else [ipc(tmp_path), "offload"]
        p, d = pairs.engine("P", extra={"connectors": children}), pairs.engine("D", extra={"connectors": children})
        d.prefill("own", prompt, [1, 2, 3])
        store = child(d, 0 if kept_first else 1)
        until(lambda: store.stats().store.saved_blocks == 3)
        params = p.prefill("r", prompt, [5, 1, 3, 4])
        if kept_first:
            monkeypatch.setattr(store._store, "_at_hand", _not_kept_any_more)
        else:
            params[PARTS]["ipc"]["torpor"]["lease"] += 100
        assert d.load("q", prompt, params, [0, 7, 2]) == "recving"
        assert d.has(prompt, [0, 7, 2])
        assert [(part.loads_done, part.loads_failed) for part in d.worker.stats().children] == [(0, 1), (1, 0)]

    def test_p5_one_that_has_less_is_not_asked(self, pairs: Pairs, tmp_path: Path) -> None:
        """In as many blocks: its load would leave the last token of them without KV."""
        p, d = pairs.pair(extra={"connectors": [MEMORY, ipc(tmp_path)]})
        prompt = [*A, 1]
        params = p.prefill("r", prompt, [5, 1, 3])
        params[PARTS]["ipc"] = p.prefill("less", prompt[:9], [0, 2, 4])[PARTS]["ipc"]
        params[PARTS]["MemoryConnector"]["torpor"]["lease"] += 100
        assert d.load("q", prompt, params, [0, 7, 2]) == "failed"
        assert [part.loads_done for part in d.worker.stats().children] == [0, 0]

    def test_one_with_less_hears_at_once_that_it_may_let_go(self, pairs: Pairs, tmp_path: Path) -> None:
        """A hand-off of two blocks, beside one of three."""
        p, d = pairs.pair(extra={"connectors": [MEMORY, ipc(tmp_path)]})
        params = p.prefill("r", A, [5, 1, 3])
        less = p.prefill("less", A[:8], [0, 2])
        params[PARTS]["ipc"] = less[PARTS]["ipc"]
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert p.wait("less", 5) == "sending"

    def test_what_was_cancelled_is_asked_of_nobody_else(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [0, 7, 2])
            assert gate.reached.wait(WAIT_S)
            cancelling = Background(lambda: d.cancel("q"))
            assert not cancelling.ended_within(0.1), "its blocks may be written to"
            gate.open()
            cancelling.result()
        assert d.wait("q") == "failed"
        assert [part.loads_done for part in d.worker.stats().children] == [0, 0]

    def test_p2_what_a_sleep_has_ended_is_asked_of_nobody_else(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [0, 7, 2])
            assert gate.reached.wait(WAIT_S)
            sleeping = Background(d.sleep)
            assert not sleeping.ended_within(0.1)
            gate.open()
            sleeping.result()
        assert d.wait("q") == "failed"
        assert not d.worker._spares  # type: ignore[attr-defined]
        d.wake()
        assert d.load("again", A, p.prefill("s", A, [5, 1, 3]), [0, 7, 2]) == "recving"

    @pytest.mark.parametrize(
        ("parts", "named"), [("ipc", "one object per child"), ({"ipc": 1}, "one object per child"), ({"pigeon": {}}, "pigeon")]
    )
    def test_forged_parts_are_refused_at_the_door(self, tmp_path: Path, parts: Any, named: str) -> None:
        scheduler = MultiScheduler(children_of(config(**both(tmp_path))), SMALL_SPEC)
        with pytest.raises(RequestError, match=named) as caught:
            scheduler.check_params({"do_remote_prefill": True, PARTS: parts}, 10)
        assert caught.value.fields["param"] == f"kv_transfer_params.{PARTS}"

    def test_a_choice_that_was_forgotten_is_made_again(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        params = p.prefill("r", A, [5, 1, 3])
        assert isinstance(d.scheduler, MultiScheduler)
        request = GenerationRequest(
            request_id="q", prompt_token_ids=A, sampling=SamplingParams(max_tokens=1), kv_transfer_params=params
        )
        d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler._choices.clear()
        d.scheduler.update_state_after_alloc(request, [0, 7, 2], 9)  # type: ignore[list-item]
        assert d.wait("q") == "recving"
        assert d.has(A, [0, 7, 2])


class TestSleep:
    @pytest.mark.parametrize("failing", [0, 1])
    def test_if_one_fails_to_release_the_others_are_restored(self, pairs: Pairs, tmp_path: Path, failing: int) -> None:
        order = [MEMORY, ipc(tmp_path)] if failing == 0 else [ipc(tmp_path), MEMORY]
        p, d = pairs.pair(extra={"connectors": order})
        child(p, failing).fail_release = 1
        before = [part.epoch for part in p.worker.stats().children]
        with pytest.raises(HookError) as caught:
            p.sleep()
        cause = caught.value.__cause__
        assert isinstance(cause, TransportError)
        assert cause.fields["child"] == "MemoryConnector"
        assert str(cause).startswith("MemoryConnector: ")
        assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        assert p.worker.epoch() is not None
        released_first = [part.epoch for part in p.worker.stats().children] != before
        assert released_first == (failing == 0), "the last child is asked first"
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert p.sleep().held_bytes == 0

    def test_a_child_that_fails_to_come_back_is_named_and_tried_again(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        p.sleep()
        child(p, 1).fail_restore = 1
        with pytest.raises(HookError, match="MemoryConnector: ") as caught:
            p.wake()
        assert p.worker.epoch() is None, "not all are back"
        assert p.worker.get_handshake_metadata() is None
        assert "MemoryConnector" in str(caught.value)
        p.wake()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_what_keeps_a_sibling_from_coming_back_is_told(self, pairs: Pairs, tmp_path: Path) -> None:
        p, _ = pairs.pair(extra={"connectors": [MEMORY, "torpor.testing.connectors:UnsupportedConnector"]})
        child(p, 0).fail_release, child(p, 1).fail_restore = 1, 1
        with pytest.raises(TransportError) as caught:
            p.worker.release_kv_caches()
        (failure,) = caught.value.fields["undo_failures"]
        assert failure.startswith("UnsupportedConnector: ")
        p.worker.restore_kv_caches()
        assert p.worker.epoch() is not None

    def test_release_and_restore_are_idempotent(self, pairs: Pairs, tmp_path: Path) -> None:
        p = pairs.engine("P", extra=both(tmp_path))
        p.worker.release_kv_caches()
        p.worker.release_kv_caches()
        p.worker.restore_kv_caches()
        epoch = p.worker.epoch()
        p.worker.restore_kv_caches()
        assert p.worker.epoch() == epoch is not None


class TestTheWhole:
    def test_a_child_that_cannot_register_is_named_and_the_others_are_shut_down(self, tmp_path: Path) -> None:
        made: list[KVConnectorWorker] = []

        class Failing(MemoryConnectorWorker):
            def register_kv_caches(self, *args: Any) -> None:
                raise TransportError("no device", transport="memory")

        pairs = Pairs("multi", tmp_path)
        plain = MemoryConnector.create_worker

        def create(config: ConnectorConfig, spec: Any) -> KVConnectorWorker:
            made.append(Failing(config, spec) if made else plain(config, spec))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryConnector, "create_worker", create)
            with pytest.raises(TransportError, match="MemoryConnector#2: no device"):
                pairs.engine("P", extra={"connectors": [MEMORY, MEMORY]})
        assert made[0].epoch() is None
        pairs.close()

    def test_its_numbers_are_the_sum_of_its_children(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6])
        stats = d.worker.stats()
        assert [part.connector for part in stats.children] == ["ipc", "memory"]
        assert stats.bytes_received == sum(part.bytes_received for part in stats.children) > 0
        assert stats.path.startswith("ipc: ")
        assert "MemoryConnector: " in stats.path
        assert p.sleep().held_bytes == 0
        stats = p.worker.stats()
        assert stats.release_s == sum(part.release_s for part in stats.children) > 0

    def test_whoever_waits_for_a_load_is_told_of_it(self, pairs: Pairs, tmp_path: Path) -> None:
        p, d = pairs.pair(extra=both(tmp_path))
        d.begin_load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6])
        d._told.get(timeout=WAIT_S)
        assert d.step().recving == {"q"}

    def test_it_works_by_layer_only_when_a_child_does(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = config(**both(tmp_path))
        assert not works_by_layer(MultiConnector.create_worker(asked, SMALL_SPEC))
        saved: list[str] = []

        class Layered(MemoryConnectorWorker):
            def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
                saved.append(layer_name)

        monkeypatch.setattr(MemoryConnector, "create_worker", Layered)
        worker = MultiConnector.create_worker(asked, SMALL_SPEC)
        assert isinstance(worker, LayeredMultiWorker)
        assert works_by_layer(worker)
        worker.save_kv_layer("layers.0", None)  # type: ignore[arg-type]
        worker.wait_for_layer_load("layers.0")
        worker.wait_for_save()
        assert saved == ["layers.0"]

    def test_shutdown_twice_is_once(self, pairs: Pairs, tmp_path: Path) -> None:
        p = pairs.engine("P", extra=both(tmp_path))
        p.worker.shutdown()
        p.worker.shutdown()
        assert p.worker.get_handshake_metadata() is None
