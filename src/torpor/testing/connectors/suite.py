"""The items, and what runs them."""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torpor.errors import ConfigurationError
from torpor.testing.connectors import items_bytes, items_doors, items_flat, items_moves, items_peers
from torpor.testing.connectors.engine import SuiteEngine, told
from torpor.testing.connectors.outcomes import Failure, NotApplicable, Outcome, Report, Status
from torpor.testing.connectors.process import EngineError
from torpor.testing.connectors.stage import Stage, Workers, workers
from torpor.testing.connectors.subject import Subject

T = TypeVar("T")
START_S = 60.0
INTERRUPTED_S = 5.0


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    proves: str
    run: Callable[[Stage], str]
    limit_s: float = 60.0
    sleeps: bool = True  # says nothing about a connector that does not sleep
    processes: int = 0  # that it runs engines in

    @property
    def says(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


ITEMS: tuple[Item, ...] = (
    Item("refusal", "E4", items_doors.refusal, sleeps=False),
    Item("placement", "P3", items_bytes.placement, sleeps=False),
    Item("own buffers", "E1", items_moves.own_buffers, sleeps=False),
    Item("blocks end", "P5", items_bytes.blocks_end, sleeps=False),
    Item("wrong requests", "P5", items_doors.wrong_requests, sleeps=False),
    Item("other layout", "P5", items_doors.other_layout, sleeps=False),
    Item("follow", "P1 P4a", items_bytes.follow, processes=1),
    Item("in-flight read", "P2 P5", items_bytes.in_flight),
    Item("late read", "P4", items_bytes.late_read, processes=1),
    Item("old epoch", "P1", items_bytes.old_epoch),
    Item("peer crash", "P2 P5", items_peers.peer_crash, limit_s=120, processes=2),
    Item("silent peer", "P2", items_peers.silent_peer, limit_s=120, processes=3),
    Item("double sleep", "M9", items_moves.double_sleep),
    Item("failed release", "M2 M12", items_moves.failed_release),
    Item("failed restore", "M3 M5", items_moves.failed_restore),
    Item("partial wake", "E7", items_moves.partial_wake),
    Item("new weights", "E6 P5", items_moves.new_weights),
    Item("shutdown", "E5", items_moves.shutdown_unsubscribes),
    Item("bytes flat", "P4a M11", items_flat.bytes_flat),
    Item("resources flat", "P2", items_flat.resources_flat),
)


def chosen(names: Collection[str] | None) -> tuple[Item, ...]:
    """ConfigurationError lists the known ones."""
    if names is None:
        return ITEMS
    unknown = set(names) - {item.name for item in ITEMS}
    if unknown:
        known = ", ".join(item.name for item in ITEMS)
        raise ConfigurationError(f"no item is called {', '.join(sorted(unknown))}; known: {known}", setting="items")
    return tuple(item for item in ITEMS if item.name in names)


def run_items(subject: Subject, items: Collection[Item] = ITEMS, *, seed: int = 0) -> Iterator[Outcome]:
    """One outcome after another. ConfigurationError, before the first, when no engine can have the connector here: an option is
    wrong, a package is missing. Nothing else that a connector does is raised."""
    wrong = within(subject.patient(START_S), lambda: _wrong_settings(subject))
    if wrong is not None:
        raise wrong
    with workers(subject.patience) as processes:
        if subject.kind.reach == "processes" and subject.kind.supports_sleep_mode:
            processes.prepare(max((item.processes for item in items), default=0))
        for item in items:
            yield run_item(subject, item, processes, seed=seed)


def run_item(subject: Subject, item: Item, processes: Workers, *, seed: int = 0) -> Outcome:
    begun = time.monotonic()
    if item.sleeps and not subject.kind.supports_sleep_mode:
        status, reason = Status.NOT_APPLICABLE, "it does not declare supports_sleep_mode: no engine that sleeps takes it"
    else:
        limit_s = subject.patient(item.limit_s)
        found = within(limit_s, lambda: _verdict_of_all(lambda: _play(subject, item, processes, seed)), processes.abandon)
        if found is None:
            processes.abandon()
            found = Status.FAILED, f"it has not ended after {limit_s:.0f} s: something hangs"
        status, reason = found
    return Outcome(item=item.name, proves=item.proves, status=status, reason=reason, seconds=time.monotonic() - begun)


def check_connector(subject: Subject, *, items: Collection[str] | None = None, seed: int = 0) -> Report:
    """All outcomes. ``items``: only those, by name."""
    return Report(connector=subject.name, outcomes=tuple(run_items(subject, chosen(items), seed=seed)))


def _wrong_settings(subject: Subject) -> ConfigurationError | None:
    """What keeps an engine from being made; what is not a matter of configuration the items will show."""
    with tempfile.TemporaryDirectory(prefix="torpor-suite-") as folder:
        try:
            SuiteEngine(subject, "both", "check", folder).close()
        except ConfigurationError as error:
            return error
        except Exception:
            return None
    return None


def _play(subject: Subject, item: Item, processes: Workers, seed: int) -> tuple[Status, str]:
    with tempfile.TemporaryDirectory(prefix="torpor-suite-") as folder:
        stage = Stage(subject, processes, folder, seed)
        try:
            return _verdict(lambda: item.run(stage))
        finally:
            stage.close()


def _verdict(run: Callable[[], str]) -> tuple[Status, str]:
    try:
        return Status.PASSED, run()
    except NotApplicable as reason:
        return Status.NOT_APPLICABLE, str(reason)
    except (Failure, EngineError) as error:
        return Status.FAILED, str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Status.FAILED, f"{told(error)} ({where.filename}:{where.lineno})"


def within(limit_s: float, run: Callable[[], T], hasten: Callable[[], None] = lambda: None) -> T | None:
    """What ``run``, which does not raise, gives back; None when it has not ended in time. A connector that hangs must not hang
    the suite: its thread is left behind. After an interrupt ``hasten`` is called and the end of ``run`` waited for a while: an
    interpreter that ends while a thread is in native code may abort."""
    found: list[T] = []
    ended = threading.Event()  # an interrupted join() takes the thread for one that has ended, in Python before 3.13

    def work() -> None:
        found.append(run())
        ended.set()

    try:
        threading.Thread(target=work, name="torpor-suite-item", daemon=True).start()
        ended.wait(limit_s)
    except KeyboardInterrupt:
        hasten()
        ended.wait(INTERRUPTED_S)
        raise
    return found[0] if found else None


def _verdict_of_all(run: Callable[[], tuple[Status, str]]) -> tuple[Status, str]:
    """With what closing the engines raised."""
    try:
        return run()
    except Exception as error:
        return Status.FAILED, f"closing the engines: {told(error)}"
