"""What the suite is told about the connector that it checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torpor.connectors import ConnectorConfig, KVConnector, KVConnectorWorker, get_connector
from torpor.errors import ConfigurationError, ConnectorError

if TYPE_CHECKING:
    from torpor.memory import MemoryConfig

Phase = Literal["release", "restore"]
FailNext = Callable[[KVConnectorWorker, Phase], bool]
"""Makes the worker's next release or restore fail once, as its transport would. False: not known how."""

WITHDRAW_S, HEARTBEAT_S = 5.0, 0.5
FOLDER = "{folder}"  # in a value of ``extra``: a folder that is fresh for every item

FOR_TESTS = {
    "memory": "torpor.testing.connectors:MemoryConnector",
    "pinned": "torpor.testing.connectors:PinnedConnector",
}
"""Connectors by name that are for tests alone: the suite knows them, a server does not."""

EXTRA: dict[str, dict[str, Any]] = {
    "ipc": {"socket_dir": FOLDER},
    "pinned": {"socket_dir": FOLDER},
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A connector's class and how engines are given it.

    ``path`` is its ``module:Class``, since some items run engines in other processes: it must be importable there, with this
    process's ``sys.path``. ``extra`` and ``settings`` are the options and the other fields of every engine's ConnectorConfig.
    ``patience`` is for a machine that is slower than those the suite's limits were made for, an emulated one: all that the suite
    waits for, and the deadlines that it sets its engines, take so many times longer. What is in ``extra`` and ``settings`` stays.
    """

    name: str
    path: str
    kind: type[KVConnector]
    extra: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory: MemoryConfig | None = None  # None: the host driver
    fail_next: FailNext | None = None  # None: one that knows torpor's own workers
    patience: float = 1.0

    @classmethod
    def of(
        cls,
        connector: str | type[KVConnector],
        *,
        extra: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        memory: MemoryConfig | None = None,
        fail_next: FailNext | None = None,
        patience: float = 1.0,
    ) -> Subject:
        """``connector``: a registered name, ``memory`` or ``pinned``, ``module:Class``, or a class. ConnectorError for one that
        cannot be found, or whose options it refuses; ConfigurationError for a class that cannot be found again by its name, and
        for a ``patience`` below 1, or a setting that is none of ConnectorConfig's, or the suite's own to choose."""
        if not (1 <= patience < math.inf):
            raise ConfigurationError(f"patience {patience!r} is no number from 1 on", setting="patience", value=patience)
        _check_settings(settings or {})
        if isinstance(connector, str):
            path = FOR_TESTS.get(connector, connector)
            name, kind = connector, get_connector(path)
        else:
            path = f"{connector.__module__}:{connector.__qualname__}"
            name, kind = path, connector
            _check_found_again(path, connector)
        options = {**EXTRA.get(name, {}), **(extra or {})}
        subject = cls(
            name=name,
            path=path,
            kind=kind,
            extra=options,
            settings=settings or {},
            memory=memory,
            fail_next=fail_next,
            patience=patience,
        )
        return dataclasses.replace(subject, kind=kind.configured(subject.config("both", None, "/nonexistent")))

    def to_wire(self) -> dict[str, Any]:
        """Plain data for another process; ``fail_next`` stays here."""
        memory = None if self.memory is None else dataclasses.asdict(self.memory)
        return {
            "connector": self.path,
            "extra": dict(self.extra),
            "settings": dict(self.settings),
            "memory": memory,
            "patience": self.patience,
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Subject:
        from torpor.memory import MemoryConfig

        return cls.of(**{**wire, "memory": None if wire["memory"] is None else MemoryConfig(**wire["memory"])})

    def patient(self, seconds: float) -> float:
        """How long to wait here for what ordinary machines do within ``seconds``."""
        return seconds * self.patience

    def with_settings(self, settings: Mapping[str, Any]) -> Subject:
        return dataclasses.replace(self, settings={**self.settings, **settings})

    def config(self, role: Literal["producer", "consumer", "both"], engine_id: str | None, folder: str) -> ConnectorConfig:
        waits = {"withdraw_timeout_s": self.patient(WITHDRAW_S), "lease_heartbeat_s": self.patient(HEARTBEAT_S)}
        fields: dict[str, Any] = {**waits, **self.settings}
        return ConnectorConfig(
            connector=self.path, role=role, engine_id=engine_id, extra=_placed(dict(self.extra), folder), **fields
        )


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(ConnectorConfig)} - {"connector", "role", "engine_id", "extra"}
    for name, value in settings.items():
        if name not in known:
            message = f"engines of the suite have no setting {name!r}; known: {', '.join(sorted(known))}"
            raise ConfigurationError(message, setting=name, value=value)


def _check_found_again(path: str, kind: type[KVConnector]) -> None:
    try:
        found = get_connector(path)
    except ConnectorError as error:
        raise ConfigurationError(
            f"{path} cannot be imported by that name, as other processes must: define the class at the top of a module",
            setting="connector",
            value=path,
        ) from error
    if found is not kind:
        raise ConfigurationError(f"{path} is another class than the one given", setting="connector", value=path)


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(FOLDER, folder)
    if isinstance(value, dict):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_placed(inner, folder) for inner in value]
    return value
