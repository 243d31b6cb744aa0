"""Requests of both engines: hand-offs, and reads of them as they are, late, twice and forged."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

from pair_base import HandedOff, PairBase
from pair_connectors import CONNECTORS, links, parts_of, same, whole
from pair_sides import HAND_OFF, LEASE_S, Asked
from step_counter import count

from torpor.errors import AsleepError, RequestError
from torpor.request import SamplingParams

SLOW_COPY_S = 0.02
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SOME = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
FORGERIES = ["epoch", "next epoch", "now", "lease", "blocks", "order", "request", "tokens", "engine", "prompt"]
UNSEEN_BY_SPARES = [None, "blocks", "order", "request", "engine"]


class PairRequests(PairBase):
    names: itertools.count[int]

    def prefill(self, prompt: list[int], again: bool, waits: bool) -> None:
        """``again``: under a name that was used before, as a client that retries does."""
        name = "again" if again and "again" not in self.p.open() else f"p{next(self.names)}"
        try:
            asked = self.p.add(name, prompt, ONE, dict(HAND_OFF))
        except (AsleepError, RequestError) as error:
            self._check_refusal(self.p, error, name)
            return
        if waits and self.p.awake:
            self.p.until(lambda: asked.end is not None or not self.p.awake or self.p.waits_for_readers(), "a prefill")

    def _handed_off(self, asked: Asked) -> None:
        assert asked.end is not None
        assert asked.end.kv_transfer_params is not None
        params = asked.end.kv_transfer_params
        self.hand_offs.append(HandedOff(list(asked.prompt), params, params["torpor"]["epoch"]))

    def read(self, which: int, forgery: str | None, sampling: SamplingParams) -> None:
        """Asks, and does not wait."""
        if not self.hand_offs:
            return
        hand_off = self._hand_off(which)
        prompt, params = self._forged(hand_off, forgery)
        name = f"d{next(self.names)}"
        try:
            self.d.add(name, prompt, sampling, params)
        except (AsleepError, RequestError) as error:
            self._check_refusal(self.d, error, name)
            return
        hand_off.alive = None if hand_off.alive else hand_off.alive
        self.d.step()

    def read_now(self, which: int, forgery: str | None) -> None:
        """Reads and waits, with nobody else there: then it is known what must come of it."""
        if not self.hand_offs:
            return
        self.wake_whole("D")
        self.d.until(self.d.at_rest, "the end of everything else")
        self.p.step(2)
        self.p.until(lambda: not self.p.in_transaction, "the end of a transaction")
        self._look_at_epochs()
        hand_off = self._hand_off(which)
        prompt, params = self._forged(hand_off, forgery)
        remote = int(params["remote_num_tokens"])
        sequence_hit = self._local_hit(prompt)
        wanted = min(remote, len(prompt) - 1) > sequence_hit
        must = self._must_arrive(hand_off, prompt, params, forgery)
        before = self._loads()
        try:
            asked = self.d.add(f"d{next(self.names)}", prompt, SOME, params)
        except RequestError:
            assert forgery is not None
            return
        self.d.until(lambda: asked.end is not None, "an answer", others=self.p.step)
        done, failed, received = (now - then for now, then in zip(self._loads(), before, strict=True))
        how = "as it is" if forgery is None else "forged"
        how = how if self.p.worker.version == self.d.worker.version else "of other weights"
        count(f"read {how} > {'done' if done else 'lost' if failed else 'not wanted'}")
        assert done + failed == int(wanted), f"{forgery}: {done} loads done, {failed} failed, {wanted} wanted"
        assert asked.end is not None
        if wanted and must is not None:
            assert done == int(must), f"{forgery}, {hand_off}: the load was {'done' if done else 'lost'}"
        if failed:
            assert received == 0, "a late read yields bytes (P4)"
            assert asked.end.num_cached_tokens <= sequence_hit
        if done:
            assert asked.end.num_cached_tokens == min(remote, len(prompt) - 1)
        if same(params, hand_off.params) and prompt == hand_off.prompt and hand_off.alive:
            self._wait_until_let_go(hand_off)

    def _must_arrive(self, hand_off: HandedOff, prompt: list[int], params: dict[str, Any], forgery: str | None) -> bool | None:
        """None: nobody can say. The bytes must be right in any case."""
        if self.p.worker.version != self.d.worker.version:
            return False
        if hand_off.alive is None:
            return None
        must = hand_off.alive and same(params, hand_off.params) and prompt == hand_off.prompt
        if not must and CONNECTORS[self.connector].spares and hand_off.epoch == self.p.epoch and forgery in UNSEEN_BY_SPARES:
            return None
        return must

    def _wait_until_let_go(self, hand_off: HandedOff) -> None:
        """P hears that it was read (or that nobody needs it), and its blocks are free."""
        hand_off.alive = False
        leases = self.p.lease_tables()[0]
        number = hand_off.params["torpor"]["lease"]
        if self._told(hand_off):
            self.p.until(lambda: number not in leases._leases, "the end of a lease that was read")

    def _told(self, hand_off: HandedOff) -> bool:
        """Only over a link of that epoch does D tell P."""
        if any(str(epoch) == hand_off.epoch for epoch in links(self.d.worker.connector)):
            return True
        hand_off.alive = None
        return False

    def ask(self, prompt: list[int], sampling: SamplingParams, who: str) -> None:
        """A request of its own, without a transfer."""
        side, name = self.sides[who], f"a{next(self.names)}"
        try:
            side.add(name, prompt, sampling, None)
        except (AsleepError, RequestError) as error:
            self._check_refusal(side, error, name)

    def abort(self, which: list[int], who: str) -> None:
        names = self.sides[who].open()
        self.sides[who].abort(sorted({names[index % len(names)] for index in which if names}))

    def steps(self, who: str, count: int) -> None:
        for _ in range(count):
            self.sides[who].step()

    def reads_are_slow(self, slow: bool) -> None:
        device = self.d.worker.device
        device.__dict__.pop("copy_blocks", None)
        if not slow:
            return
        plain = device.copy_blocks

        def slowly(*args: Any, **settings: Any) -> Any:
            time.sleep(SLOW_COPY_S)
            return plain(*args, **settings)

        device.copy_blocks = slowly  # type: ignore[method-assign]

    def time_passes(self, seconds: float) -> None:
        """Leases end, loads are late."""
        if not self.p.in_transaction:
            self.p.step()
        granted = list(self.hand_offs)  # by the next step at the latest; one that ends in that step has its whole lease before it
        if not self.p.in_transaction:
            self.p.step()
        self.clock.advance(seconds)
        for hand_off in self.hand_offs:
            hand_off.alive = None if hand_off.alive else hand_off.alive
        if not self.p.in_transaction:
            self.p.step()
            if seconds > LEASE_S:
                for hand_off in granted:
                    hand_off.alive = False

    # ---- forging -------------------------------------------------------------------------------------------------------------

    def _forged(self, hand_off: HandedOff, forgery: str | None) -> tuple[list[int], dict[str, Any]]:
        prompt, params = list(hand_off.prompt), copy.deepcopy(hand_off.params)
        if forgery == "prompt":
            prompt[0] += 1
        for part in parts_of(params):
            self._forge(part, forgery)
        return prompt, whole(params)

    def _forge(self, params: dict[str, Any], forgery: str | None) -> None:
        told, blocks = params["torpor"], params["remote_block_ids"]
        boot, counter = told["epoch"].split(".")
        match forgery:
            case "epoch":
                told["epoch"] = f"{'0' * 16}.{counter}"
            case "next epoch":
                told["epoch"] = f"{boot}.{int(counter) + 1}"
            case "now":
                told["epoch"] = self.p.epoch or told["epoch"]
            case "lease":
                told["lease"] += 1
            case "blocks":
                params["remote_block_ids"] = [(block + 1) % self.p.num_blocks for block in blocks]
            case "order":
                params["remote_block_ids"] = blocks[::-1]
            case "request":
                params["remote_request_id"] += "x"
            case "tokens":
                params["remote_num_tokens"] = max(1, params["remote_num_tokens"] - 1)
                params["remote_block_ids"] = blocks[: -(-params["remote_num_tokens"] // 4)]
            case "engine":
                params["remote_engine_id"] = "Q"
