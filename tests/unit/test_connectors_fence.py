"""P1 and P3 in the small: what the owner's words say of a read, and that they say it before anybody else hears of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.connectors.base import HandOff
from torpor.connectors.fence import HEADER_WORDS, FencePage, FenceView, Verdict, commitment, fence_bytes, judge
from torpor.connectors.leases import LeaseTable
from torpor.errors import TransportError
from torpor.kvcache.types import BlockId, Epoch

KEY = b"k" * 32
EPOCH = Epoch("00000000000000ab", 7)
SLOTS = 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def hand_off(lease: int, request_id: str = "r", lease_s: float = 30.0, epoch: Epoch = EPOCH) -> HandOff:
    return HandOff(
        request_id=request_id,
        block_ids=[BlockId(3), BlockId(1)],
        num_tokens=7,
        lease_s=lease_s,
        epoch=str(epoch),
        lease=lease,
        digest=b"d",
    )


def word_of(given: HandOff, epoch: Epoch = EPOCH) -> int:
    return commitment(KEY, epoch, given.lease, given.request_id, given.num_tokens, given.block_ids, given.digest)


@pytest.fixture
def page() -> Iterator[FencePage]:
    page = FencePage(SLOTS)
    yield page
    page.close()


@pytest.fixture
def view(page: FencePage) -> Iterator[FenceView]:
    view = FenceView(page.fd, SLOTS)
    yield view
    view.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(page: FencePage, clock: Clock) -> LeaseTable:
    table = LeaseTable(page, KEY, clock)
    table.open(EPOCH)
    return table


def verdict(view: FenceView, given: HandOff, epoch: Epoch = EPOCH) -> Verdict:
    return judge(*view.look(given.lease), epoch, given.lease, word_of(given, epoch))


class TestVerdicts:
    def test_p3_a_read_under_an_open_lease_is_valid(self, leases: LeaseTable, view: FenceView) -> None:
        leases.grant(hand_off(1))
        assert verdict(view, hand_off(1)) is Verdict.VALID

    def test_a_hand_off_the_worker_has_not_heard_of_is_waited_for(self, leases: LeaseTable, view: FenceView) -> None:
        leases.grant(hand_off(1))
        assert verdict(view, hand_off(2)) is Verdict.NOT_YET

    @pytest.mark.parametrize("epoch", [Epoch(EPOCH.boot, 6), Epoch(EPOCH.boot, 8), Epoch("00000000000000ac", 7)])
    def test_p1_only_the_same_epoch_counts(self, leases: LeaseTable, view: FenceView, epoch: Epoch) -> None:
        leases.grant(hand_off(1))
        assert verdict(view, hand_off(1), epoch) is Verdict.OTHER_EPOCH

    def test_p3_nothing_is_valid_once_it_is_shut(self, leases: LeaseTable, view: FenceView) -> None:
        leases.grant(hand_off(1))
        assert leases.shut() == 1
        assert verdict(view, hand_off(1)) is Verdict.RELEASED
        assert set(view.look(1)[0][4 + 1 :]) == {0}

    def test_a_lease_of_the_last_epoch_is_not_one_of_this(self, leases: LeaseTable, view: FenceView) -> None:
        leases.grant(hand_off(1))
        leases.shut()
        leases.open(EPOCH.next())
        assert verdict(view, hand_off(1)) is Verdict.OTHER_EPOCH
        assert verdict(view, hand_off(1), EPOCH.next()) is Verdict.LEASE_OVER

    @pytest.mark.parametrize(
        "forged",
        [
            {"block_ids": [BlockId(3), BlockId(2)]},
            {"block_ids": [BlockId(1), BlockId(3)]},
            {"block_ids": [BlockId(3)]},
            {"request_id": "s"},
            {"num_tokens": 8},
            {"digest": b"another prompt"},
        ],
    )
    def test_a_lease_is_for_what_was_handed_off(self, leases: LeaseTable, view: FenceView, forged: dict) -> None:
        leases.grant(hand_off(1))
        fields = {name: getattr(hand_off(1), name) for name in HandOff.__dataclass_fields__} | forged
        assert verdict(view, HandOff(**fields)) is Verdict.LEASE_OVER

    def test_what_is_no_fence_is_none(self) -> None:
        assert judge([0] * HEADER_WORDS, 0, EPOCH, 1, 1) is Verdict.NO_FENCE

    @given(st.integers(1, 1 << 62), st.lists(st.integers(0, 1 << 31), min_size=1), st.binary(max_size=40))
    def test_a_commitment_is_never_the_empty_word(self, lease: int, blocks: list[int], digest: bytes) -> None:
        assert 0 < commitment(KEY, EPOCH, lease, "r", 1, blocks, digest) < 1 << 64


class TestLeases:
    def test_reading_ends_it_once(self, leases: LeaseTable, view: FenceView) -> None:
        leases.grant(hand_off(1))
        ended = leases.read_done(1, word_of(hand_off(1)))
        assert ended is not None
        assert ended.num_blocks == 2
        assert leases.read_done(1, word_of(hand_off(1))) is None
        assert leases.take_ended() == {"r"}
        assert leases.take_ended() == frozenset()
        assert verdict(view, hand_off(1)) is Verdict.LEASE_OVER

    def test_an_invented_message_ends_nothing(self, leases: LeaseTable) -> None:
        leases.grant(hand_off(1))
        assert leases.read_done(1, word_of(hand_off(1, "another"))) is None
        assert leases.read_done(2, word_of(hand_off(1))) is None
        assert (len(leases), leases.take_ended()) == (1, frozenset())

    def test_it_expires_and_the_word_goes_first(self, leases: LeaseTable, view: FenceView, clock: Clock) -> None:
        leases.grant(hand_off(1, "early", lease_s=5))
        leases.grant(hand_off(2, "late", lease_s=9))
        clock.now = 4.9
        assert leases.take_ended() == frozenset()
        clock.now = 5.0
        assert leases.take_ended() == {"early"}
        assert verdict(view, hand_off(1, "early")) is Verdict.LEASE_OVER
        assert verdict(view, hand_off(2, "late")) is Verdict.VALID

    def test_shutting_ends_all(self, leases: LeaseTable) -> None:
        leases.grant(hand_off(1, "a"))
        leases.grant(hand_off(2, "b"))
        leases.shut()
        assert (leases.take_ended(), len(leases)) == ({"a", "b"}, 0)

    def test_a_hand_off_while_shut_ends_at_once(self, leases: LeaseTable, view: FenceView) -> None:
        leases.shut()
        leases.grant(hand_off(1))
        assert leases.take_ended() == {"r"}
        assert verdict(view, hand_off(1)) is Verdict.RELEASED

    def test_slots_are_used_again_and_the_older_lease_gives_way(self, leases: LeaseTable, view: FenceView) -> None:
        old, new = hand_off(3, "old"), hand_off(3 + SLOTS, "new")
        leases.grant(old)
        leases.grant(new)
        assert leases.take_ended() == {"old"}
        assert (verdict(view, old), verdict(view, new)) == (Verdict.LEASE_OVER, Verdict.VALID)
        assert leases.read_done(3, word_of(old)) is None
        assert verdict(view, new) is Verdict.VALID


class TestThePage:
    def test_it_cannot_be_made_shorter_under_a_reader(self, page: FencePage) -> None:
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, 0)

    def test_a_reader_cannot_write_it_through_its_view(self, page: FencePage, view: FenceView) -> None:
        with pytest.raises((TypeError, ValueError)):
            view._map[0] = 1

    def test_one_that_is_too_small_for_its_slots_is_refused(self, page: FencePage) -> None:
        assert page.nbytes == fence_bytes(SLOTS) == mmap.PAGESIZE
        with pytest.raises(TransportError, match="slots"):
            FenceView(page.fd, 100_000)

    def test_closing_is_idempotent_and_leaves_readers_with_a_shut_page(self, leases: LeaseTable, page: FencePage) -> None:
        view = FenceView(page.fd, SLOTS)
        leases.grant(hand_off(1))
        page.close()
        page.close()
        assert verdict(view, hand_off(1)) is Verdict.RELEASED
        view.close()
        view.close()

    def test_its_address_is_where_the_words_are(self, page: FencePage) -> None:
        import ctypes

        page.open(EPOCH)
        assert (ctypes.c_uint64 * 3).from_address(page.address)[1:3] == [0xAB, 7]
