"""The connectors that pairs are tried with, and how their connections break. One more is one more line of ``CONNECTORS``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torpor.connectors import wire
from torpor.connectors.base import KVConnectorWorker
from torpor.connectors.channel import Channel
from torpor.connectors.link import Link
from torpor.connectors.multi_scheduler import PARTS
from torpor.connectors.multi_worker import MultiWorker
from torpor.connectors.worker import PullWorker
from torpor.kvcache.types import Epoch

LATE_S = 0.02
LATE = (wire.Withdraw, wire.Withdrawn, wire.ReadDone)
PULL = {"connect_timeout_s": 10.0, "handshake_timeout_s": 10.0, "read_timeout_s": 10.0}


@dataclass(frozen=True)
class PairConnector:
    """``extra``: "{folder}" in it is a fresh folder. ``package``: skipped where it cannot be imported. ``pins``: what one engine
    registers is pinned by this process, so it looks held when the other sleeps. ``spares``: a second child has the KV too, and
    is asked when the first has failed; it knows no request ids, block ids or times. ``examples``: its share of the suite."""

    path: str
    extra: dict[str, Any] = field(default_factory=dict)
    package: str | None = None
    pins: bool = False
    spares: bool = False
    examples: int = 4


SOCKETS = PULL | {"socket_dir": "{folder}"}
CONNECTORS = {
    "ipc": PairConnector("ipc", SOCKETS, examples=12),
    "nixl": PairConnector("nixl", PULL, package="nixl_cu13"),
    "pinned": PairConnector("torpor.testing.connectors:PinnedConnector", SOCKETS, pins=True),
    "multi": PairConnector(
        "multi",
        {
            "connectors": [
                {"kv_connector": "ipc", "kv_connector_extra_config": SOCKETS},
                "torpor.testing.connectors:MemoryConnector",
            ]
        },
        spares=True,
    ),
}


def placed(value: Any, folder: str) -> Any:
    """``extra`` with its folder."""
    if isinstance(value, dict):
        return {key: placed(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [placed(inner, folder) for inner in value]
    return value.replace("{folder}", folder) if isinstance(value, str) else value


def pull_workers(worker: KVConnectorWorker | None) -> list[PullWorker]:
    """Itself, or those of its children: what has leases and links."""
    if isinstance(worker, MultiWorker):
        return [found for child in worker._children for found in pull_workers(child)]
    return [worker] if isinstance(worker, PullWorker) else []


def cut(worker: KVConnectorWorker | None) -> None:
    """Every connection of the engine breaks, as when its process or its host is gone: nobody says goodbye."""
    for pulling in pull_workers(worker):
        if pulling._owner is not None:
            for guest in pulling._owner.guests():
                guest._channel.abort()
        if pulling._reader is not None:
            for puller in list(pulling._reader._pullers.values()):
                link = puller.link
                if link is not None:
                    link._channel.abort()


def live_links(worker: KVConnectorWorker | None) -> list[Link]:
    """Those that the engine's reader has."""
    pullers = [p for w in pull_workers(worker) if w._reader is not None for p in list(w._reader._pullers.values())]
    return [link for p in pullers if (link := p.link) is not None and link.alive]


def links(worker: KVConnectorWorker | None) -> list[Epoch]:
    """Of which epochs the engine's reader has links that live."""
    return [link.epoch for link in live_links(worker)]


def parts_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """What each child handed over; of a connector without children that is all there is."""
    return list(params[PARTS].values()) if PARTS in params else [params]


def same(params: dict[str, Any], others: dict[str, Any]) -> bool:
    """To the connector that a load comes from, which is the first of several."""
    return parts_of(params)[0] == parts_of(others)[0]


def whole(params: dict[str, Any]) -> dict[str, Any]:
    """``params`` again, after a change to its parts."""
    return {**next(iter(params[PARTS].values())), PARTS: params[PARTS]} if PARTS in params else params


class Lateness:
    """While ``on``, messages about withdrawals and finished reads take their time."""

    def __init__(self) -> None:
        self.on = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[Lateness]:
        plain = Channel.send

        def send(channel: Channel, message: Any, *args: Any) -> bytes:
            if self.on and isinstance(message, LATE):
                time.sleep(LATE_S)
            return plain(channel, message, *args)

        Channel.send = send  # type: ignore[method-assign]
        try:
            yield self
        finally:
            Channel.send = plain  # type: ignore[method-assign]
