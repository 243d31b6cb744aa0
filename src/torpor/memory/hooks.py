"""Hooks on tags: whoever registered a tag's pages lets go before the unmap and comes back after the map."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torpor.errors import HookError, TorporError

HookFunction = Callable[[], None]


@dataclass(eq=False)
class Hook:
    tag: str
    name: str
    order: int
    before_unmap: HookFunction | None
    after_map: HookFunction | None


@dataclass(frozen=True)
class HookFailure:
    hook: Hook
    error: Exception

    def __str__(self) -> str:
        return f"{self.hook.name}: {self.error!r}"


class Hooks:
    """Both functions of a hook must be idempotent: a retried sleep or wake calls them again (M3)."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []  # oldest first; replaced, never changed, so readers need no lock
        self._away: frozenset[Hook] = frozenset()  # let go, or failed to come back; likewise
        self._changing = threading.Lock()  # while one of the two is replaced; no hook runs with it
        self._orders = itertools.count()
        self.seconds_of: dict[str, float] = {}  # by name, of the last ``release`` or ``restore``

    def register(self, tag: str, before: HookFunction | None, after: HookFunction | None, name: str) -> Callable[[], None]:
        """The returned function unregisters; calling it again does nothing."""
        hook = Hook(tag, name or _name_of(before or after), next(self._orders), before, after)
        with self._changing:
            self._hooks = [*self._hooks, hook]

        def unregister() -> None:
            with self._changing:
                self._hooks = [h for h in self._hooks if h is not hook]
                self._away -= {hook}

        return unregister

    def clear(self) -> None:
        with self._changing:
            self._hooks = []
            self._away = frozenset()

    def _note(self, hook: Hook, *, away: bool) -> None:
        with self._changing:
            self._away = self._away | {hook} if away else self._away - {hook}

    def count(self, tag: str) -> int:
        return sum(h.tag == tag for h in self._hooks)

    def away(self, tag: str) -> int:
        """How many hooks of ``tag`` let go and have not come back: a wake that covers the tag calls them."""
        return sum(h.tag == tag for h in self._hooks if h in self._away)

    def release(self, tags: Iterable[str]) -> list[Hook]:
        """before_unmap of every hook of ``tags``, newest first across tags; gives back those that ran, in that order (M2).

        When one raises, those that ran are undone, and it must be as before itself; it says that it is not by an error with the
        field ``undo_failures``. HookError then, fields: hook, tag, phase, undo_failures.
        """
        wanted, ran = set(tags), list[Hook]()
        self.seconds_of = {}
        for hook in [h for h in reversed(self._hooks) if h.tag in wanted]:
            try:
                self._timed(hook, hook.before_unmap)
            except BaseException as error:
                failures = self._own_failures(hook, error) + self.undo(ran)
                if not isinstance(error, Exception):
                    raise
                raise _error(HookFailure(hook, error), "before_unmap", "nothing was unmapped", undo_failures=failures) from error
            ran.append(hook)
            self._note(hook, away=True)
        return ran

    def undo(self, released: list[Hook]) -> tuple[str, ...]:
        """after_map of hooks that ``release`` gave back, the last to let go first. Failures are named; the next wake retries."""
        return tuple(str(f) for f in self._run_after(reversed(released)))

    def restore(self, tags: Iterable[str]) -> list[HookFailure]:
        """after_map of every hook of ``tags``, oldest first; one that fails does not stop the others (M3)."""
        wanted = set(tags)
        self.seconds_of = {}
        return self._run_after(h for h in self._hooks if h.tag in wanted)

    def _run_after(self, hooks: Iterable[Hook]) -> list[HookFailure]:
        failures = []
        for hook in list(hooks):
            try:
                self._timed(hook, hook.after_map)
                self._note(hook, away=False)
            except Exception as error:
                self._note(hook, away=True)
                failures.append(HookFailure(hook, error))
        return failures

    def _timed(self, hook: Hook, function: HookFunction | None) -> None:
        if function is None:
            return
        began = time.perf_counter()
        try:
            function()
        finally:
            self.seconds_of[hook.name] = self.seconds_of.get(hook.name, 0.0) + time.perf_counter() - began

    def _own_failures(self, hook: Hook, error: BaseException) -> tuple[str, ...]:
        found = tuple(error.fields.get("undo_failures", ())) if isinstance(error, TorporError) else ()
        if found:
            self._note(hook, away=True)
        return tuple(f"{hook.name}: {text}" for text in found)


def restore_error(failures: list[HookFailure], report: object) -> HookError:
    """For a wake whose memory is mapped and whose hooks failed. Fields besides HookError's: report, failures (text)."""
    text = tuple(str(f) for f in failures)
    error = _error(failures[0], "after_map", "the memory is mapped; wake again to retry", report=report, failures=text)
    error.__cause__ = failures[0].error
    return error


def _error(failure: HookFailure, phase: str, outcome: str, **fields: object) -> HookError:
    hook = failure.hook
    message = f"hook {hook.name!r} of tag {hook.tag!r} failed in {phase}: {failure.error!r}; {outcome}"
    return HookError(message, hook=hook.name, tag=hook.tag, phase=phase, **fields)


def _name_of(function: HookFunction | None) -> str:
    return getattr(function, "__qualname__", repr(function))
