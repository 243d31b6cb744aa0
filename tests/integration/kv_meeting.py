"""Engines that meet: processes of their own or in this one, and a reader that keeps what it should have let go."""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kv_child import Child

from torpor.connectors import ConnectorConfig, wire
from torpor.connectors.base import LoadRequest
from torpor.connectors.link import Link
from torpor.connectors.loads import Load
from torpor.connectors.transport import BlockRead
from torpor.kvcache.types import BlockId, KVCacheSpec
from torpor.memory import MemoryConfig
from torpor.testing.kv_engine import SMALL_SPEC, KVEngine, missing_package

UNFOLLOWED_IPC = "torpor.testing.unfollowed:UnfollowedIpc"
UNFOLLOWED_NIXL = "torpor.testing.unfollowed:UnfollowedNixl"
UNFOLLOWED_MOONCAKE = "torpor.testing.unfollowed:UnfollowedMooncake"


class Meeting:
    """Engines of one connector that find each other; all of them are closed with it. ``memory`` and ``spec``: what engines have
    that do not say otherwise, as for ``Child``."""

    def __init__(
        self, connector: str, folder: Path, *, memory: dict[str, Any] | None = None, spec: dict[str, Any] | None = None
    ) -> None:
        """connector: "ipc", "nixl", "nixl over tcp" or "mooncake". Skips the test where that is not installed."""
        self.connector, _, tls = connector.partition(" over ")
        if missing := missing_package(self.connector):
            pytest.skip(missing)
        self._folder, self._memory, self._spec = folder, memory, spec
        self._extra: dict[str, Any] = {"ucx_tls": tls} if tls else {}
        self._stack = contextlib.ExitStack()

    def child(
        self,
        engine_id: str,
        role: str,
        *,
        kind: str = "",
        memory: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Child:
        """``kind``: a class to use in place of the connector's, as "module:name"."""
        settings["extra"] = self._extra | settings.get("extra", {})
        memory, spec = memory or self._memory, spec or self._spec
        child = Child(kind or self.connector, engine_id, role, self._folder, memory=memory, spec=spec, **settings)
        return self._stack.enter_context(child)

    def here(self, engine_id: str, role: str, *, kind: str = "", **settings: Any) -> KVEngine:
        socket_dir = {"socket_dir": str(self._folder / "kv")} if self.connector == "ipc" else {}
        fields: dict[str, Any] = {"engine_id": engine_id, "role": role, "extra": self._extra | socket_dir} | settings
        spec = KVCacheSpec(**self._spec) if self._spec else SMALL_SPEC
        memory = MemoryConfig(**self._memory) if self._memory else None
        config = ConnectorConfig(connector=kind or self.connector, **fields)
        return self._stack.enter_context(KVEngine(config, spec, memory=memory))

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def lying_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Readers of this process acknowledge a withdrawal, but keep their imports until the event is set."""
    ended = threading.Event()

    def acknowledge(link: Link) -> None:
        link._channel.send(wire.Withdrawn(epoch=str(link.epoch)))
        ended.wait(60)

    monkeypatch.setattr(Link, "_let_go", acknowledge)
    yield ended
    ended.set()


def link_of(d: KVEngine) -> Link:
    return next(iter(d.worker._reader._pullers.values()))._link  # type: ignore[attr-defined,no-any-return]


def read_unasked(d: KVEngine, link: Link, there: Sequence[int], here: Sequence[int]) -> bytes:
    """Reads blocks of the peer into ours without asking anybody; what is in ours then."""
    for block in here:
        d.write_block(block, b"\xee" * len(d.block(block)))
    request = BlockRead(
        local=array("q", here),
        remote=array("q", there),
        writing=contextlib.nullcontext,
        stop=lambda: False,
        deadline=time.monotonic() + 5,
    )
    link._remote.read(request, lambda: None)
    return b"".join(d.block(block) for block in here)


def confirm(link: Link, params: dict[str, Any], here: Sequence[int]) -> None:
    """The look at the owner's fence after a read of that hand-off (P3)."""
    load = Load(LoadRequest(request_id="x", local_block_ids=[BlockId(b) for b in here], params=params))
    link._confirm(load)
