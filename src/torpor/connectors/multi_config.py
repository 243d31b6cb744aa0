"""The children of ``multi``: how they are written down, and what each is given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.connectors.config import KV_ROLES, ConnectorConfig
from torpor.errors import ConfigurationError, TorporError

if TYPE_CHECKING:
    from torpor.connectors.base import KVConnector

SETTING = "connectors"
ROLES = {**{f"kv_{role}": role for role in KV_ROLES}, **{str(role): role for role in KV_ROLES}}
MEANT = {"kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "kv_role", "kv_ip", "kv_port"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """``label`` is its name among the children: in errors, in statistics, and between peers."""

    label: str
    kind: type[KVConnector]
    config: ConnectorConfig


def children_of(config: ConnectorConfig) -> tuple[Child, ...]:
    """``extra["connectors"]`` is a list of names, or of objects with the keys that vLLM's MultiConnector has; or that list as
    text, in JSON or as names with commas, since a command line has only text. Everything else is the parent's: role, host, port
    (of two that listen, one needs its own), secret, times. Each has an engine id of its own, ``<parent's>.<label>``, and an equal
    share of ``withdraw_timeout_s``. ConfigurationError names the entry."""
    from torpor.connectors.registry import get_connector

    unknown = sorted(set(config.extra) - {SETTING})
    if unknown:
        raise ConfigurationError(
            f"connector {config.connector!r} has no option {unknown[0]!r}; known: {SETTING}. Options of a child belong in its "
            "kv_connector_extra_config",
            setting=unknown[0],
            value=config.extra[unknown[0]],
        )
    given = _listed(config.extra.get(SETTING))
    if not isinstance(given, list) or not given:
        raise _wrong('a list of connectors is needed, such as ["ipc", {"kv_connector": "nixl"}]', given)
    made: list[Child] = []
    for index, entry in enumerate(given):
        fields = _fields(index, entry)
        name = _name(index, fields)
        label = _label(name, [child.label for child in made])
        own = _config(config, index, fields, name, label, len(given))
        made.append(Child(label=label, kind=get_connector(name).configured(own), config=own))
    return tuple(made)


def of_child(error: TorporError, label: str) -> TorporError:
    """The same error, which says whose it is."""
    error.message = f"{label}: {error.message}"
    error.args = (error.message,)
    error.fields["child"] = label
    return error


def _listed(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if not given.lstrip().startswith("["):
        return [name.strip() for name in given.split(",")]
    try:
        return json.loads(given)
    except ValueError as error:
        raise _wrong(f"not valid JSON: {error}", given) from error


def _fields(index: int, entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, str):
        return {"kv_connector": entry}
    if not isinstance(entry, dict):
        raise _wrong(f"entry {index} must be a name or an object", entry)
    unknown = sorted(set(entry) - MEANT)
    if unknown:
        raise _wrong(f"entry {index} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(MEANT))}", entry)
    return entry


def _name(index: int, fields: Mapping[str, Any]) -> str:
    name, module = fields.get("kv_connector"), fields.get("kv_connector_module_path")
    if not isinstance(name, str) or not name:
        raise _wrong(f"entry {index} needs a kv_connector", name)
    return f"{module}:{name}" if isinstance(module, str) else name


def _label(name: str, taken: list[str]) -> str:
    plain = name.rpartition(":")[2]
    same = sum(label == plain or label.startswith(f"{plain}#") for label in taken)
    return f"{plain}#{same + 1}" if same else plain


def _config(parent: ConnectorConfig, index: int, fields: Mapping[str, Any], name: str, label: str, count: int) -> ConnectorConfig:
    role = ROLES.get(fields.get("kv_role", parent.role))
    extra = fields.get("kv_connector_extra_config", {})
    host, port = fields.get("kv_ip", parent.host), fields.get("kv_port", parent.port)
    if role is None:
        raise _wrong(f"kv_role of entry {index} is none of {', '.join(ROLES)}", fields.get("kv_role"))
    if not isinstance(extra, dict) or not isinstance(host, str) or type(port) is not int:
        raise _wrong(f"entry {index}: kv_connector_extra_config is an object, kv_ip text, kv_port a number", dict(fields))
    return dataclasses.replace(
        parent,
        connector=name,
        role=role,
        engine_id=None if parent.engine_id is None else f"{parent.engine_id}.{label}",
        host=host,
        port=port,
        withdraw_timeout_s=parent.withdraw_timeout_s / count,
        extra=extra,
    )


def _wrong(help_text: str, value: Any) -> ConfigurationError:
    return ConfigurationError(f"multi: {help_text} (option {SETTING})", setting=SETTING, value=value)
