"""P1, P2, P3 and P5 between two engines of one process, over every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_pairs import WAIT_S, A, B, Background, Pairs, held_read, needs

from torpor.connectors import ipc
from torpor.connectors.base import Finished
from torpor.connectors.link import Link
from torpor.errors import HookError, PeerError
from torpor.memory.types import Residency


@pytest.fixture(params=["ipc", "nixl", "mooncake"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pairs]:
    needs(request.param)
    pairs = Pairs(request.param, tmp_path)
    yield pairs
    pairs.close()


class TestReading:
    def test_blocks_arrive_and_the_owner_hears_of_it(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [5, 1, 3])
        assert d.load("q", A, params, [0, 7, 2]) == "recving"
        assert d.has(A, [0, 7, 2])
        assert p.wait("r") == "sending"
        deadline = time.monotonic() + WAIT_S
        while (guest := p.worker.stats().peers[0]).bytes == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert (guest.direction, guest.bytes) == ("reads from us", 3 * 2 * 2 * 256)
        stats = d.worker.stats()
        assert (stats.loads_done, stats.loads_failed, stats.bytes_received) == (1, 0, 3 * 2 * 2 * 256)

    def test_the_engine_is_told_when_a_load_has_ended(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [5, 1, 3])
        begun, unasked_s = time.monotonic(), 15.0
        d.begin_load("q", A, params, [0, 7, 2])
        assert d.wait("q", poll_s=unasked_s) == "recving"
        assert time.monotonic() - begun < unasked_s
        d.begin_load("forged", B, params, [0, 7, 2])
        assert d.wait("forged", poll_s=unasked_s) == "failed"
        assert time.monotonic() - begun < unasked_s

    def test_the_digest_is_computed_while_the_blocks_are_on_their_way(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [5, 1, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [0, 7, 2])
            assert gate.reached.wait(WAIT_S)
            d.step()
            ((turn,),) = (p._turns.pending() for p in d.worker._reader._pullers.values())  # type: ignore[attr-defined]
            assert turn.load._told is not None
        assert d.wait("q") == "recving"

    def test_only_what_the_prefix_cache_lacks_is_read(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [5, 1, 3])
        request = type("R", (), {"request_id": "q", "prompt_token_ids": A, "kv_transfer_params": params})
        d.scheduler.update_state_after_alloc(request, [6, 4], 5)  # type: ignore[arg-type]
        assert d.wait("q") == "recving"
        assert d.block(6) + d.block(4) == p.block(1) + p.block(3)

    @pytest.mark.parametrize("pairs", ["nixl", "mooncake"], indirect=True)
    def test_more_blocks_than_the_staging_buffer_holds(self, pairs: Pairs) -> None:
        p, d = pairs.pair(extra={"staging_bytes": 2100})  # two blocks of 1 KiB
        prompt = list(range(27))
        assert d.load("q", prompt, p.prefill("r", prompt, [6, 0, 5, 1, 4, 2, 3]), [1, 2, 3, 4, 5, 6, 7]) == "recving"
        assert d.has(prompt, [1, 2, 3, 4, 5, 6, 7])

    def test_a_peer_that_need_not_be_read_is_told(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [5, 1, 3])
        request = type("R", (), {"request_id": "q", "prompt_token_ids": A, "kv_transfer_params": params})
        d.scheduler.update_state_after_alloc(request, [], 0)  # type: ignore[arg-type]
        assert not any((d.step().recving, d.step().failed))
        assert p.wait("r") == "sending"

    def test_engines_read_from_each_other(self, pairs: Pairs) -> None:
        one, two = pairs.engine("one"), pairs.engine("two")
        to_two, to_one = one.prefill("r", A, [1, 2, 3]), two.prefill("s", B, [1, 2, 3])
        assert two.load("q", A, to_two, [4, 5, 6]) == one.load("q", B, to_one, [4, 5, 6]) == "recving"
        assert two.has(A, [4, 5, 6])
        assert one.has(B, [4, 5, 6])

    def test_several_readers_and_several_owners(self, pairs: Pairs) -> None:
        owners = [pairs.engine(f"P{i}", "producer") for i in range(2)]
        readers = [pairs.engine(f"D{i}", "consumer") for i in range(2)]
        for p in owners:
            for d in readers:
                name = f"{p.config.engine_id} to {d.config.engine_id}"
                prompt = [*A[:8], ord(name[1]), ord(name[-1])]
                params = p.prefill(name, prompt, [0, 1, 2])
                assert d.load(name, prompt, params, [4, 5, 6]) == "recving"
                assert d.has(prompt, [4, 5, 6])

    def test_an_early_reader_waits_for_the_owner_s_worker(self, pairs: Pairs) -> None:
        """The client may be faster than the owner's next step."""
        p, d = pairs.pair()
        d.load("warm", A, p.prefill("w", A, [1, 2, 3]), [0, 1, 2])
        step, p.step = p.step, lambda: None  # type: ignore[method-assign,assignment]
        params = p.prefill("r", B, [4, 5, 6])
        with held_read(d) as gate:
            d.begin_load("q", B, params, [4, 5, 6])
            time.sleep(0.05)
            assert not any((d.step().recving, d.step().failed))
            assert gate.calls == 0, "a block may be handed off before it is written: what was read by now is nothing"
        step()
        assert d.wait("q") == "recving"
        assert d.has(B, [4, 5, 6])


class TestEpochs:
    def test_p1_a_hand_off_of_an_older_epoch_is_not_read(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        old = p.prefill("r", A, [1, 2, 3])
        p.sleep()
        assert p.wait("r") == "sending"
        p.wake()
        before = [d.block(b) for b in (4, 5, 6)]
        assert d.load("q", A, old, [4, 5, 6]) == "failed"
        assert [d.block(b) for b in (4, 5, 6)] == before

    def test_p1_a_newer_epoch_makes_a_new_handshake(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        first = d.worker.stats().peers[0].epoch
        for round_ in range(2):
            p.sleep()
            p.wake()
            prompt = [*B, round_]
            assert d.load(f"q{round_}", prompt, p.prefill(f"r{round_}", prompt, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.has(prompt, [4, 5, 6])
        assert d.worker.stats().peers[0].epoch != first

    def test_p1_an_epoch_that_was_never_is_not_read(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        boot, _, counter = params["torpor"]["epoch"].partition(".")
        for n, other in enumerate((f"{boot}.{int(counter) + 1}", f"{'0' * 16}.{counter}")):
            forged = params | {"torpor": {"epoch": other, "lease": 1}}
            assert d.load(f"q{n}", A, forged, [4, 5, 6]) == "failed"
        assert d.load("q", A, params, [4, 5, 6]) == "recving"

    def test_p1_every_mapping_has_an_epoch_of_its_own(self, pairs: Pairs) -> None:
        p = pairs.engine("P")
        seen = {p.worker.epoch()}
        for _ in range(3):
            p.sleep()
            assert p.worker.epoch() is None
            assert p.worker.get_handshake_metadata() is None
            p.wake()
            seen.add(p.worker.epoch())
        assert len(seen) == 4

    def test_p1_a_restarted_engine_with_the_same_id_is_another(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        old = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", A, old, [4, 5, 6]) == "recving"
        p.close()
        p = pairs.engine("P", "producer")
        new = p.prefill("r", B, [1, 2, 3])
        if pairs.connector != "ipc":
            old["remote_port"] = new["remote_port"]
        assert d.load("old", A, old, [4, 5, 6]) == "failed"
        assert d.load("new", B, new, [4, 5, 6]) == "recving"
        assert d.has(B, [4, 5, 6])


class TestWithdrawal:
    def test_p2_nothing_is_unmapped_while_a_peer_reads(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            asleep = Background(p.sleep)
            assert not asleep.ended_within(0.3)
            assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
            gate.open()
            report = asleep.result()
        assert report.unmapped_bytes == p.memory.stats().tag("kv_cache").reserved_bytes
        assert report.held_bytes == 0
        assert d.wait("q") == "failed"
        assert not p.memory.export_ledger.grants()

    def test_p2_nobody_is_let_in_while_others_are_seen_off(self, pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
        p, d = pairs.pair()
        late = pairs.engine("late", "consumer")
        first, second = p.prefill("r", A, [1, 2, 3]), p.prefill("s", B, [4, 5, 6])
        with held_read(d) as gate:
            d.begin_load("q", A, first, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            asleep = Background(p.sleep)
            assert not asleep.ended_within(0.1)
            assert late.load("w", B, second, [4, 5, 6]) == "failed"
            assert "AsleepError" in caplog.text
            gate.open()
            assert asleep.result().held_bytes == 0

    def test_p2_an_idle_peer_lets_go_at_once(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert p.memory.export_ledger.grants()
        report = p.sleep()
        assert (report.held_bytes, p.memory.export_ledger.grants()) == (0, ())
        assert d.memory.device.stats().live_imports == 0

    def test_p2_a_silent_peer_is_met_by_the_deadline_by_name(self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
        p, d = pairs.pair(withdraw_timeout_s=0.4, lease_heartbeat_s=5.0)
        other = pairs.engine("D2", "consumer")
        params = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", A, params, [4, 5, 6]) == "recving"
        assert other.load("q", B, p.prefill("s", B, [4, 5, 6]), [4, 5, 6]) == "recving"
        plain, silent = Link._let_go, next(iter(d.worker._reader._pullers.values())).link  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            comes_to = threading.Event()
            patch.setattr(Link, "_let_go", lambda link: comes_to.wait(WAIT_S) if link is silent else plain(link))
            before = p.worker.epoch()
            begun = time.monotonic()
            with pytest.raises(HookError) as caught:
                p.sleep()
            assert time.monotonic() - begun < WAIT_S / 2
        cause = caught.value.__cause__
        assert isinstance(cause, PeerError)
        assert str(cause).startswith("D (")
        assert "D2" not in str(cause)
        assert "withdraw_timeout_s" in str(cause)
        # Nothing was unmapped; everybody is served again, under a new epoch.
        assert p.memory.stats().tag("kv_cache").residency is Residency.RESIDENT
        assert p.worker.epoch() not in (before, None)
        assert other.load("q2", A, p.prefill("t", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert other.has(A, [4, 5, 6])
        comes_to.set()
        deadline = time.monotonic() + WAIT_S
        while silent is not None and silent.alive:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert d.load("q2", B, p.prefill("u", B, [1, 2, 3]), [4, 5, 6]) == "recving"
        assert d.has(B, [4, 5, 6])
        assert p.sleep().held_bytes == 0

    def test_p2_hand_offs_nobody_read_end_at_once(self, pairs: Pairs) -> None:
        p = pairs.engine("P", "producer")
        p.prefill("r", A, [1, 2, 3])
        begun = time.monotonic()
        p.sleep()
        assert time.monotonic() - begun < 4
        assert p.wait("r") == "sending"

    def test_a_handshake_with_a_sleeper_is_answered(self, pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        p.sleep()
        begun = time.monotonic()
        assert d.load("q", A, params, [4, 5, 6]) == "failed"
        assert time.monotonic() - begun < 4
        assert "AsleepError" in caplog.text
        p.wake()
        assert d.load("q2", B, p.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_a_reader_that_sleeps_holds_nothing_of_others(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        d.sleep()
        assert d.memory.device.stats().live_imports == 0
        begun = time.monotonic()
        assert p.sleep().held_bytes == 0
        assert time.monotonic() - begun < 4
        p.wake()
        params = p.prefill("s", B, [1, 2, 3])
        assert d.load("while asleep", B, params, [4, 5, 6]) == "failed"
        d.wake()
        assert d.load("q2", B, params, [4, 5, 6]) == "recving"
        assert d.has(B, [4, 5, 6])

    def test_a_reader_that_sleeps_in_the_middle_of_a_read(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            asleep = Background(d.sleep)
            assert not asleep.ended_within(0.3), "a copy into the KV cache is under way"
            gate.open()
            asleep.result()
        assert d.wait("q") == "failed"
        d.wake()
        assert d.load("q2", B, p.prefill("s", B, [1, 2, 3]), [4, 5, 6]) == "recving"

    def test_what_arrived_but_was_not_taken_note_of_goes_with_a_sleep(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        taken, d.worker.get_finished = d.worker.get_finished, Finished  # type: ignore[method-assign]
        d.begin_load("q", A, params, [4, 5, 6])
        deadline = time.monotonic() + WAIT_S
        while d.worker.stats().loads_done == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        d.sleep()
        d.wake()
        d.worker.get_finished = taken  # type: ignore[method-assign]
        assert d.wait("q") == "failed"

    def test_release_and_restore_are_idempotent(self, pairs: Pairs) -> None:
        p = pairs.engine("P")
        p.worker.release_kv_caches()
        p.worker.release_kv_caches()
        p.worker.restore_kv_caches()
        epoch = p.worker.epoch()
        p.worker.restore_kv_caches()
        assert p.worker.epoch() == epoch is not None
        p.close()
        p.worker.shutdown()

    def test_another_hook_that_fails_leaves_everything_served(self, pairs: Pairs) -> None:
        p, d = pairs.pair()

        def refuse() -> None:
            raise RuntimeError("not now")

        # Hooks run newest first; this one runs after the connector has released.
        p._unsubscribe()
        unregister = p.memory.register_tag_hooks("kv_cache", before_unmap=refuse, name="grumpy")
        p._unsubscribe = p.memory.register_tag_hooks(
            "kv_cache", p.worker.release_kv_caches, p.worker.restore_kv_caches, "connector"
        )
        with pytest.raises(HookError, match="grumpy"):
            p.sleep()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        unregister()


class TestTheCheckAfterTheRead:
    def test_p3_a_lease_that_expires_during_the_read_yields_nothing(self, pairs: Pairs) -> None:
        p, d = pairs.pair(handoff_lease_s=0.2)
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            assert p.wait("r") == "sending"  # expired: the blocks are free, and used again
            p.prefill("s", B, [1, 2, 3])
            gate.open()
            assert d.wait("q") == "failed"

    def test_p3_a_block_that_changed_before_the_read_yields_nothing(self, pairs: Pairs) -> None:
        p, d = pairs.pair(handoff_lease_s=0.05)
        params = p.prefill("r", A, [1, 2, 3])
        assert p.wait("r") == "sending"
        before = [d.block(b) for b in (4, 5, 6)]
        assert d.load("q", A, params, [4, 5, 6]) == "failed"
        if pairs.connector != "ipc":
            assert [d.block(b) for b in (4, 5, 6)] == before, "what was not proved does not get into the cache"

    def test_p2_an_owner_that_goes_during_the_read_ends_its_leases(self, pairs: Pairs) -> None:
        """One that was killed cleared no words."""
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            (guest,) = p.worker._owner.guests()  # type: ignore[attr-defined]
            guest.dismiss()
            gate.open()
            assert d.wait("q") == "failed"

    def test_p3_what_was_read_twice_is_not_believed_twice(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        assert d.load("q", A, params, [4, 5, 6]) == "recving"
        assert p.wait("r") == "sending"
        assert d.load("again", A, params, [4, 5, 6]) == "failed"


class TestCancelling:
    def test_p5_a_cancelled_load_is_reported_when_nothing_writes_any_more(
        self, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(ipc.PIECE_BYTES, "host", 1)  # a block at a time: something is left to copy when it is cancelled
        p, d = pairs.pair()
        params = p.prefill("r", A, [1, 2, 3])
        with held_read(d) as gate:
            d.begin_load("q", A, params, [4, 5, 6])
            assert gate.reached.wait(WAIT_S)
            cancelled = Background(lambda: d.cancel("q"))
            assert not cancelled.ended_within(0.2), "a copy is under way"
            assert not d.worker.get_finished().failed
            gate.open()
            cancelled.result()
        assert d.wait("q") == "failed"
        assert gate.calls == 1, "only the copy that was under way"
        assert p.wait("r") == "sending", "a client that leaves frees the blocks of both engines"

    def test_p5_one_that_waits_behind_another_fails_at_once(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        first, second = p.prefill("r", A, [1, 2, 3]), p.prefill("s", B, [4, 5, 6])
        with held_read(d) as gate:
            d.begin_load("q", A, first, [1, 2, 3])
            assert gate.reached.wait(WAIT_S)
            d.begin_load("w", B, second, [4, 5, 6])
            d.cancel("w")
            assert d.wait("w", 1.0) == "failed"
            gate.open()
        assert d.wait("q") == "recving"
        assert p.wait("s") == "sending"

    def test_cancelling_what_has_ended_changes_nothing(self, pairs: Pairs) -> None:
        p, d = pairs.pair()
        assert d.load("q", A, p.prefill("r", A, [1, 2, 3]), [4, 5, 6]) == "recving"
        d.cancel("q")
        d.cancel("nobody")
        assert not d.step().failed
