"""vLLM's ``--kv-transfer-config`` in torpor's words, for those who have it in their scripts."""

from __future__ import annotations

import json
from typing import Any

from torpor.errors import ConfigurationError

SETTING = "--kv-transfer-config"
CONNECTORS = {"NixlConnector": "nixl", "IpcConnector": "ipc", "nixl": "nixl", "ipc": "ipc"}
ROLES = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}
# Known to vLLM, without a meaning here: buffers are where the KV cache is, and lost KV is always recomputed.
IGNORED = {"kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size"}
MEANT = {"kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path", "engine_id", "kv_ip", "kv_port"}
MULTI = {"MultiConnector": "multi", "multi": "multi"}


def parse_kv_transfer_config(text: str) -> dict[str, Any]:
    """Keyword arguments of ConnectorConfig. ConfigurationError names the key that is wrong."""
    given = _object(text)
    policy = given.pop("kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise _wrong("kv_load_failure_policy", policy, "lost KV is always recomputed: write recompute, or leave it out")
    for key in given:
        if key not in MEANT | IGNORED:
            raise _wrong(
                key, given[key], f"unknown key; known: {', '.join(sorted(MEANT | IGNORED | {'kv_load_failure_policy'}))}"
            )
    found: dict[str, Any] = {"connector": _connector(given), "role": _role(given.get("kv_role"))}
    found["extra"] = _typed(given, "kv_connector_extra_config", dict) or {}
    if found["connector"] == "multi" and isinstance(found["extra"].get("connectors"), list):
        found["extra"] = {**found["extra"], "connectors": [_child(entry) for entry in found["extra"]["connectors"]]}
    for key, field, kind in (("engine_id", "engine_id", str), ("kv_ip", "host", str), ("kv_port", "port", int)):
        value = _typed(given, key, kind)
        if value is not None:
            found[field] = value
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as e:
        raise ConfigurationError(f"{SETTING} is not valid JSON: {e}", setting=SETTING, value=text) from e
    if not isinstance(given, dict):
        raise ConfigurationError(f"{SETTING} must be a JSON object, not {text}", setting=SETTING, value=text)
    return given


def _connector(given: dict[str, Any]) -> str:
    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    if not isinstance(name, str) or not name:
        raise _wrong("kv_connector", name, "give the connector's name, such as NixlConnector")
    if module is not None:
        return f"{_typed(given, 'kv_connector_module_path', str)}:{name}"
    if ":" in name:
        return name
    known_names = CONNECTORS | MULTI
    if name not in known_names:
        known = ", ".join(known_names)
        raise _wrong("kv_connector", name, f"torpor has {known}; for one of your own add kv_connector_module_path")
    return known_names[name]


def _child(entry: Any) -> Any:
    """One of MultiConnector's, under torpor's name. What else may be wrong with it is said where it is used."""
    if not isinstance(entry, dict):
        return entry
    named = {key: value for key, value in entry.items() if key != "kv_connector_module_path"}
    return {**named, "kv_connector": _connector(entry)}


def _role(given: Any) -> str:
    if given not in ROLES:
        raise _wrong("kv_role", given, f"write one of {', '.join(ROLES)}")
    return ROLES[given]


def _typed(given: dict[str, Any], key: str, kind: type) -> Any:
    value = given.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise _wrong(key, value, f"it must be a {'JSON object' if kind is dict else kind.__name__}")
    return value


def _wrong(key: str, value: Any, help_text: str) -> ConfigurationError:
    return ConfigurationError(f"{SETTING}: {key}={value!r}: {help_text}", setting=SETTING, value=value)
