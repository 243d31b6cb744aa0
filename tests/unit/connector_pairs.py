"""Two stand-in engines in this process, and ways to stop a read half way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torpor._native import BlockCopy
from torpor.connectors import ConnectorConfig
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine, missing_package

A = list(range(100, 110))  # 10 tokens: 3 blocks of 4
B = list(range(200, 210))
WAIT_S = 30.0


def needs(connector: str) -> None:
    """Skips where the transport's package is not installed, or cannot be loaded."""
    missing = missing_package(connector)
    if missing is not None:
        pytest.skip(missing)


class Pairs:
    """Makes engines of one connector that find each other; closes them all."""

    def __init__(self, connector: str, folder: Path) -> None:
        self.connector = connector
        self._folder = folder / "kv"
        self._engines = contextlib.ExitStack()

    def engine(
        self, engine_id: str, role: str = "both", *, spec: Any = SMALL_SPEC, kind: Any = None, **settings: Any
    ) -> KVEngine:
        options = {"socket_dir": str(self._folder)} if self.connector == "ipc" else {}
        extra = options | settings.pop("extra", {})
        fields: dict[str, Any] = {"withdraw_timeout_s": 5.0, "lease_heartbeat_s": 0.2} | settings
        config = ConnectorConfig(connector=self.connector, engine_id=engine_id, role=role, extra=extra, **fields)  # type: ignore[arg-type]
        return self._engines.enter_context(KVEngine(config, spec, kind=kind))

    def pair(self, **settings: Any) -> tuple[KVEngine, KVEngine]:
        return self.engine("P", "producer", **settings), self.engine("D", "consumer", **settings)

    def close(self) -> None:
        self._engines.close()


class Gate:
    """Stands in a function: whoever calls it waits inside until ``open``."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.calls = 0
        self._go = threading.Event()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.reached.set()
            assert self._go.wait(WAIT_S), "nobody opened the gate"
            return function(*args, **kwargs)

        return gated

    def open(self) -> None:
        self._go.set()


@contextlib.contextmanager
def held_read(reader: KVEngine) -> Iterator[Gate]:
    """Copies into the reader's KV cache wait at the gate."""
    gate = Gate()
    device = reader.memory.device
    blocks, spans, begin = device.copy_blocks, device.copy, device.begin_copy_blocks
    device.copy_blocks, device.copy = gate.before(blocks), gate.before(spans)  # type: ignore[method-assign]
    if device.copies_beside:  # a read is begun where it is asked for, and waited for by the reader's thread

        def held(*args: Any, **settings: Any) -> Any:
            return HeldCopy(begin(*args, **settings), gate)

        device.begin_copy_blocks = held  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.open()
        device.copy_blocks, device.copy, device.begin_copy_blocks = blocks, spans, begin  # type: ignore[method-assign]


class HeldCopy:
    """A copy that was begun and, for whoever waits for it, does not end before the gate is open."""

    def __init__(self, copy: BlockCopy, gate: Gate) -> None:
        self._copy = copy
        self.close = gate.before(copy.close)

    def __enter__(self) -> HeldCopy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Background:
    """One call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:
            self._error = error

    def ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.ended_within(WAIT_S), "it did not end"
        if self._error is not None:
            raise self._error
        return self._result
