"""One death: who, how and when at random; then everybody else must be as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from asking import Asker, body, check_error, make_prompts
from town import Holding, Town, is_gone, wait_for

MOMENTS = ("request", "transfer", "sleep P", "sleep D", "wake P", "wake D")
WAYS = ("kill", "stop and go on", "stop and kill")
# Descriptors and threads that come and go with connections of clients and probes.
SLACK = 6


@dataclass(frozen=True)
class Death:
    victim: str
    way: str
    moment: str
    delay_s: float
    stopped_s: float

    def __str__(self) -> str:
        stopped = f", {self.stopped_s:.1f} s stopped" if self.way != "kill" else ""
        return f"{self.victim}: {self.way} {1000 * self.delay_s:.0f} ms into a {self.moment}{stopped}"


def any_death(rng: random.Random) -> Death:
    return Death(
        victim=rng.choice(Town.victims),
        way=rng.choice(WAYS),
        moment=rng.choice(MOMENTS),
        delay_s=rng.random() * rng.choice([0.01, 0.1, 0.5]),
        stopped_s=rng.choice([0.3, 1.0, 4.0, 8.0]),
    )


class Rounds:
    def __init__(self, town: Town, rng: random.Random, say: Callable[[str], None]) -> None:
        self.ends: Counter[str] = Counter()
        self._town = town
        self._rng = rng
        self._say = say
        self._prompts = make_prompts(rng)
        self._answers: list[str] = []
        self._held: dict[int, Holding] = {}  # per core, by pid
        self._wrong: list[str] = []  # what the thread of a move found: nobody hears what a thread raises

    def prepare(self) -> None:
        """The right answers are D's own, of before any death."""
        self._answers = [self._complete("D", prompt) for prompt in self._prompts]
        assert len(set(self._answers)) == len(self._answers)
        self.check_survivors()

    def run(self, death: Death) -> None:
        town, started = self._town, time.monotonic()
        asker = Asker(town.url("router"), self._prompts, self._answers, death.victim == "router", self._rng.randrange(1 << 30))
        asker.start()
        try:
            moving = self._begin(death.moment)
            time.sleep(death.delay_s)
            pid = town.pid(death.victim)
            core = town.pid(f"{death.victim} core") if death.victim in ("P", "D") else None
            self._strike(death, pid)
            self._bury(death, pid, core)
            if moving is not None:
                moving.join(60)
                assert not moving.is_alive(), f"the {death.moment} never came back"
            assert not self._wrong, f"{death}: {self._wrong}"
            self._start_again()
        finally:
            asker.stop()
        assert not asker.faults, f"{death}: {asker.faults}"
        self.ends.update(asker.ends)
        self.check_survivors()
        self._say(f"{death}: {dict(asker.ends)}, {time.monotonic() - started:.1f} s")

    # ---- the death -----------------------------------------------------------------------------------------------------------

    def _begin(self, moment: str) -> threading.Thread | None:
        time.sleep(0.2)  # requests and transfers are under way all the time
        what, _, name = moment.partition(" ")
        if not name:
            return None
        if what == "wake":
            self._move(name, "sleep")
        moving = threading.Thread(target=self._move_aside, args=(name, "sleep" if what == "sleep" else "wake_up"))
        moving.start()
        return moving

    def _move_aside(self, name: str, path: str) -> None:
        try:
            self._move(name, path)
        except Exception as error:
            self._wrong.append(f"{path} of {name}: {type(error).__name__}: {error}")

    def _move(self, name: str, path: str) -> None:
        """It succeeds, says in OpenAI's shape why not, or dies with its engine."""
        mode = self._rng.choice(["abort", "wait", "keep"])
        query = {"level": self._rng.choice([1, 2]), "mode": mode, "deadline_s": 10} if path == "sleep" else {}
        try:
            response = self._town.admin(name, path, 60, **query)
        except httpx.TransportError:
            self.ends[f"{path} broken"] += 1
            return
        if response.status_code == 200:
            self.ends[f"{path} done"] += 1
        else:
            self.ends[f"{path} {check_error(response.json())}"] += 1

    def _strike(self, death: Death, pid: int) -> None:
        os.kill(pid, signal.SIGKILL if death.way == "kill" else signal.SIGSTOP)
        if death.way == "kill":
            return
        try:
            self._look_at_stopped(death)
        finally:
            os.kill(pid, signal.SIGCONT if death.way == "stop and go on" else signal.SIGKILL)

    def _look_at_stopped(self, death: Death) -> None:
        """Nobody's health hangs meanwhile; a core that is stopped for long shows at its server."""
        until = time.monotonic() + death.stopped_s
        while time.monotonic() < until:
            for name in ("P", "D", "router"):
                if name != death.victim:
                    self._town.probe(name, "health", 3.0)
                    self._town.probe(name, "ready", 3.0)
            time.sleep(0.2)
        if death.victim.endswith("core") and death.stopped_s > 7:
            name = death.victim.split()[0]
            ready = self._town.probe(name, "ready", 3.0)
            assert ready.status_code == 503, ready.text
            assert self._town.probe(name, "health", 3.0).json()["error"]["code"] == "engine_unresponsive"

    def _bury(self, death: Death, pid: int, core: int | None) -> None:
        """A dead server takes its core along, a dead core its server."""
        if death.way == "stop and go on":
            return
        name = death.victim.split()[0]
        self._town.wait_dead(name)
        if core is not None:
            wait_for(lambda: is_gone(core), f"the orphaned core {core} of {name} ends")
        assert is_gone(pid)

    def _start_again(self) -> None:
        town = self._town
        dead = [name for name in ("P", "D", "router") if not town.is_alive(name)]
        for name in dead:
            town.start(name)
        for name in dead:
            town.wait_ready(name)
        for name in town.engines():
            if name not in dead:
                self._wake(name)

    def _wake(self, name: str) -> None:
        """Whatever was going on with it, it can be woken. One that goes on after a stop has its queue to work off first."""

        def awake() -> bool:
            return self._town.admin(name, "wake_up", 30).status_code == 200

        wait_for(awake, f"{name} wakes", 30)
        wait_for(lambda: self._town.probe(name, "ready", 5).status_code == 200, f"{name} is ready", 10)

    # ---- afterwards ----------------------------------------------------------------------------------------------------------

    def check_survivors(self) -> None:
        """The next requests are right, over both engines; sleeping works and gives everything back; nothing is held."""
        town = self._town
        wait_for(lambda: town.probe("router", "ready", 5).status_code == 200, "the router is ready")
        for name in town.engines():
            wait_for(lambda name=name: self._is_idle(name), f"{name} holds nothing: {town.stats(name)}", 15)  # type: ignore[misc]
            report = town.admin(name, "sleep", level=1, mode="wait", deadline_s=10)
            assert report.status_code == 200, f"{name}: {report.text}"
            assert report.json()["returned_bytes"] == report.json()["unmapped_bytes"] > 0, report.text
            assert town.admin(name, "wake_up").status_code == 200
        self._wait_split()
        before = town.stats("D")["connector"]["loads_done"]
        assert [self._complete("router", prompt) for prompt in self._prompts] == self._answers
        assert town.stats("D")["connector"]["loads_done"] > before, "no KV came from P"
        for name in town.engines():
            self._check_holding(name)

    def _is_idle(self, name: str) -> bool:
        stats = self._town.stats(name)
        busy = stats["scheduler"]["running"] or stats["scheduler"]["waiting"] or stats["cache"]["allocated_blocks"]
        return not busy and not stats["connector"]["pending_hand_offs"] and not stats["connector"]["loads_in_flight"]

    def _wait_split(self) -> None:
        """Until the router has seen both engines again."""

        def seen() -> bool:
            stats = self._town.probe("router", "stats", 5).json()
            return all(b["state"] == "ready" for b in (*stats["prefill"], *stats["decode"]))

        wait_for(seen, "the router sees both engines", 10)
        time.sleep(0.6)  # backoffs of failed requests

    def _check_holding(self, name: str) -> None:
        pid, holding = self._town.pid(f"{name} core"), self._town.holding(name)
        first = self._held.setdefault(pid, holding)
        assert holding.memfd_maps == first.memfd_maps, f"{name} maps more or less than before: {first} {holding}"
        assert holding.memfds == first.memfds, f"{name} has memory files of the dead open: {first} {holding}"
        assert holding.descriptors <= first.descriptors + SLACK, f"{name}: {first} {holding}"
        assert holding.threads <= first.threads + SLACK, f"{name}: {first} {holding}"

    def _complete(self, name: str, prompt: list[int]) -> str:
        response = self._town.http.post(f"{self._town.url(name)}/v1/completions", json=body(prompt), timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return str(answer["choices"][0]["text"])
