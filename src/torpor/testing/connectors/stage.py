"""Where an item plays: makes engines of the connector, here and in other processes, and ends them all."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import random
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torpor.kvcache.types import KVCacheSpec
from torpor.testing.connectors.engine import SuiteEngine, told
from torpor.testing.connectors.outcomes import Failure, NotApplicable
from torpor.testing.connectors.process import EngineError, Worker
from torpor.testing.connectors.subject import Subject
from torpor.testing.kv_engine import SMALL_SPEC

CALL_S = 30.0
Params = dict[str, Any]


class Engine(abc.ABC):
    """A ``SuiteEngine`` somewhere. Everything is a ``call``; these are the ones that items make most."""

    name: str

    @abc.abstractmethod
    def call(self, method: str, *args: Any, timeout_s: float = CALL_S) -> Any:
        """EngineError with what it raised; Failure when its process died, or does not answer in time, as long as the subject's
        patience makes it."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def prefill(self, request: str, prompt: Sequence[int], blocks: Sequence[int]) -> Params:
        params: Params = self.call("prefill", request, list(prompt), list(blocks))
        return params

    def read(self, request: str, prompt: Sequence[int], params: Params, blocks: Sequence[int]) -> str:
        return str(self.call("read", request, list(prompt), params, list(blocks)))

    def has(self, prompt: Sequence[int], blocks: Sequence[int]) -> bool:
        return bool(self.call("has", list(prompt), list(blocks)))

    def sleep(self) -> dict[str, Any]:
        """Failure unless all memory came back."""
        report: dict[str, Any] = self.call("doze")
        if report["held"]:
            of = f"{report['held']} of {report['unmapped']} bytes"
            raise Failure(f"{of} are still held after {self.name} slept (P4a): {report['holders']}")
        return report

    def wake(self) -> dict[str, Any]:
        report: dict[str, Any] = self.call("rise")
        return report

    def epoch(self) -> str | None:
        epoch: str | None = self.call("epoch_text")
        return epoch


class EngineHere(Engine):
    def __init__(self, engine: SuiteEngine, name: str) -> None:
        self.engine, self.name = engine, name

    def call(self, method: str, *args: Any, timeout_s: float = CALL_S) -> Any:
        try:
            return getattr(self.engine, method)(*args)
        except (AssertionError, NotApplicable):
            raise
        except Exception as error:
            raise EngineError(told(error)) from error

    def close(self) -> None:
        self.engine.close()


class EngineApart(Engine):
    """In a process of its own, which can be stopped and killed."""

    def __init__(self, worker: Worker, name: str, patience: float = 1.0) -> None:
        self.worker, self.name = worker, name
        self._patience = patience
        self._owes: str | None = None  # the call that it has not answered

    def call(self, method: str, *args: Any, timeout_s: float = CALL_S) -> Any:
        self.begin(method, *args)
        return self.finish(method, timeout_s)

    def begin(self, method: str, *args: Any) -> None:
        self.worker.ask(method, *args)
        self._owes = method

    def finish(self, method: str, timeout_s: float = CALL_S) -> Any:
        try:
            found = self.worker.answer(timeout_s * self._patience, method)
        except EngineError:
            self._owes = None
            raise
        self._owes = None
        return found

    def stop(self) -> None:
        self.worker.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.worker.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if not self.worker.alive:
            return
        if self._owes is not None:  # it hangs
            self.worker.kill()
            return
        with contextlib.suppress(OSError):
            self.go_on()
        try:
            self.call("close")
        except (Failure, EngineError):
            self.worker.kill()


class Stage:
    """One item's. ``close`` ends every engine, whatever became of it."""

    def __init__(self, subject: Subject, workers: Workers, folder: str, seed: int) -> None:
        self.subject = subject
        self.random = random.Random(seed)
        self._workers = workers
        self._folder = folder
        self._engines = contextlib.ExitStack()
        self._names = itertools.count()
        self._token = secrets.token_hex(4)

    # ---- engines -----------------------------------------------------------------------------------------------------------

    def engine(
        self, name: str, role: Any = "both", *, apart: bool = False, spec: KVCacheSpec | None = None, **settings: Any
    ) -> Engine:
        """``name`` is part of its engine id, so peers call it that. ``apart``: in a process of its own."""
        return self.engine_apart(name, role, spec=spec, **settings) if apart else self._engine_here(name, role, spec, settings)

    def _engine_here(self, name: str, role: Any, spec: KVCacheSpec | None, settings: dict[str, Any]) -> Engine:
        try:
            made = SuiteEngine(self.subject, role, self.engine_id(name), self._folder, spec, **settings)
        except AssertionError:
            raise
        except Exception as error:
            raise EngineError(told(error)) from error
        self._engines.callback(made.close)
        return EngineHere(made, name)

    def engine_apart(self, name: str, role: Any = "both", *, spec: KVCacheSpec | None = None, **settings: Any) -> EngineApart:
        if not self.between_processes:
            raise NotApplicable(f"its reach is {self.subject.kind.reach!r}: no engine of another process is a peer of it")
        engine = EngineApart(self._workers.take(), name, self.subject.patience)
        self._engines.callback(self._give_back, engine)
        shape = None if spec is None else dataclasses.asdict(spec)
        engine.call("open", self.subject.to_wire(), role, self.engine_id(name), self._folder, shape, settings, timeout_s=60)
        return engine

    def _give_back(self, engine: EngineApart) -> None:
        engine.close()
        self._workers.give_back(engine.worker)

    @property
    def between_processes(self) -> bool:
        """Engines of other processes are peers: then those that hand over have a process each, as outside. The kernel counts pins
        by process, so only there it is plain whose they are."""
        return self.subject.kind.reach == "processes"

    def owner(self, name: str, role: Any = "both", **settings: Any) -> Engine:
        """An engine that hands over, in a process of its own where it can be."""
        return self.engine(name, role, apart=self.between_processes, **settings)

    def pair(self, *, here: bool = False, spec: KVCacheSpec | None = None, **settings: Any) -> tuple[Engine, Engine]:
        """P, an ``owner``, and D, which reads: one and the same where the connector reaches no other engine. ``here``: both in
        this process."""
        if self.subject.kind.reach == "engine":
            both = self.engine("PD", "both", spec=spec, **settings)
            return both, both
        p = self.engine("P", "producer", apart=self.between_processes and not here, spec=spec, **settings)
        return p, self.engine("D", "consumer", spec=spec, **settings)

    def engine_id(self, name: str) -> str:
        return f"{name}-{self._token}"

    def patient(self, seconds: float) -> float:
        return self.subject.patient(seconds)

    # ---- requests ----------------------------------------------------------------------------------------------------------

    @property
    def by_params(self) -> bool:
        return self.subject.kind.finds_by == "params"

    def request(self) -> str:
        return f"r{next(self._names)}"

    def prompt(self, blocks: int = 3, spec: KVCacheSpec | None = None) -> list[int]:
        """One that nobody had before, whose KV is in so many blocks; its last token is left to compute."""
        size = (spec or SMALL_SPEC).block_size
        # Where KV is found by tokens, whole blocks are, and the block of the last token is not among them.
        length = blocks * size - self.random.randrange(size - 1) if self.by_params else blocks * size + 1
        return [next(self._names), *(self.random.randrange(1 << 30) for _ in range(length - 1))]

    def carry(self, p: Engine, d: Engine, say: str = "") -> None:
        """P hands over three blocks, D reads them. Failure unless D has P's KV, byte for byte."""
        prompt = self.prompt()
        params = p.prefill(self.request(), prompt, [1, 2, 3])
        self.must_arrive(d, prompt, params, [4, 5, 6], say)

    def must_arrive(self, d: Engine, prompt: Sequence[int], params: Params, here: Sequence[int], say: str = "") -> None:
        outcome = self._await(d, prompt, params, here)
        if outcome != "recving":
            raise Failure(f"a read that must succeed ended as {outcome!r} {say}".rstrip())
        loaded = d.call("blocks_asked")
        if self.by_params and loaded != len(here):
            raise Failure(f"{loaded} of {len(here)} blocks were loaded {say}".rstrip())
        if not d.has(prompt, here[:loaded]):
            raise Failure(f"a load was reported as complete with other bytes than were handed over {say}".rstrip())

    def _await(self, d: Engine, prompt: Sequence[int], params: Params, here: Sequence[int]) -> str:
        """One that finds KV by tokens may have to wait until it is stored."""
        deadline = time.monotonic() + self.patient(CALL_S / 3)
        outcome = d.read(self.request(), prompt, params, here)
        while outcome == "nothing" and not self.by_params and time.monotonic() < deadline:
            time.sleep(0.02)
            outcome = d.read(self.request(), prompt, params, here)
        return outcome

    def must_not_arrive(self, d: Engine, prompt: Sequence[int], params: Params, here: Sequence[int], say: str) -> None:
        """Failure when the load counts as complete; where KV is found by tokens, unless its bytes are right."""
        begun = time.monotonic()
        outcome = d.read(self.request(), prompt, params, here)
        right = "right" if d.has(prompt, here[: d.call("blocks_asked")]) else "wrong"
        if outcome == "recving" and (self.by_params or right == "wrong"):
            raise Failure(f"{say} was reported as complete ({right} bytes)")
        if time.monotonic() - begun > self.patient(CALL_S / 2):
            raise Failure(f"{say} took {time.monotonic() - begun:.0f} s to fail")

    def close(self) -> None:
        """Ends all engines that there are; others can be made."""
        self._engines.close()


class Workers:
    """Processes for engines: imports take most of an item's time, so those that are whole are used again."""

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []

    def prepare(self, count: int) -> None:
        self._idle += [Worker(self._patience) for _ in range(count - len(self._idle))]

    def take(self) -> Worker:
        self._busy.append(self._idle.pop() if self._idle else Worker(self._patience))
        return self._busy[-1]

    def give_back(self, worker: Worker) -> None:
        if worker in self._busy:
            self._busy.remove(worker)
            if worker.alive:
                self._idle.append(worker)

    def abandon(self) -> None:
        """Kills those that are in use: the item that has them hangs."""
        while self._busy:
            self._busy.pop().kill()

    def close(self) -> None:
        self.abandon()
        while self._idle:
            self._idle.pop().kill()


@contextlib.contextmanager
def workers(patience: float = 1.0) -> Iterator[Workers]:
    made = Workers(patience)
    try:
        yield made
    finally:
        made.close()
