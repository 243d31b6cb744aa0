"""Connectors by name. A transport's package is imported when its connector is asked for, not before."""

from __future__ import annotations

import importlib

from torpor.connectors.base import KVConnector
from torpor.errors import ConnectorError

KNOWN = {
    "ipc": "torpor.connectors.ipc:IpcConnector",
    "nixl": "torpor.connectors.nixl:NixlConnector",
    "mooncake": "torpor.connectors.mooncake:MooncakeConnector",
    "offload": "torpor.connectors.offload:OffloadConnector",
    "lmcache": "torpor.connectors.lmcache:LMCacheConnector",
    "multi": "torpor.connectors.multi:MultiConnector",
}


def check_name(name: str) -> tuple[str, str]:
    """The module and the class that ``name`` means; nothing is imported. ConnectorError lists the known names."""
    module_name, _, class_name = KNOWN.get(name, name).partition(":")
    if not module_name or not class_name:
        raise ConnectorError(
            f"connector {name!r} is not known; known: {', '.join(KNOWN)}, or module:Class", connector=name, setting="kv_connector"
        )
    return module_name, class_name


def get_connector(name: str) -> type[KVConnector]:
    """``name``: a known one, or ``module:Class``. ConnectorError lists the known names, or says what to install."""
    module_name, class_name = check_name(name)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConnectorError(f"connector {name!r} cannot be imported: {error}", connector=name, setting="kv_connector") from error
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise ConnectorError(f"connector {name!r} is {found!r}, not a KVConnector class", connector=name, setting="kv_connector")
    return found
