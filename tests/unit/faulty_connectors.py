"""Connectors with one deliberate fault each, and the item of the conformance suite that must catch it. Nothing else may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from faulty_moves import (
    Clinging,
    EarlyBird,
    Greedy,
    Habitual,
    KeepsBytes,
    KeepsDescriptors,
    KeepsMappings,
    KeepsThreads,
    OnceOnly,
    OneTry,
    Sulking,
    Trusting,
)
from faulty_reads import (
    Credulous,
    Dreamer,
    Forgiving,
    Miserly,
    ModelBlind,
    Mournful,
    OldBytes,
    Optimist,
    Patient,
    PrefixBlind,
    SameEpoch,
    Talkative,
    Unstoppable,
)

from torpor.connectors.base import KVConnector
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.multi import MultiConnector


class SpeaksForItsChildren(MultiConnector):
    """Declares that it follows a sleep, whatever its children say."""

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        kind = super().configured(config)
        kind.supports_sleep_mode = True
        return kind


@dataclass(frozen=True)
class Mutant:
    kind: type[KVConnector]
    item: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kind.__name__


CHILDREN = {
    "connectors": [
        {"kv_connector": "torpor.testing.connectors:PinnedConnector", "kv_connector_extra_config": {"socket_dir": "{folder}"}},
        "torpor.testing.connectors:UnsupportedConnector",
    ]
}
SOCKETS = {"socket_dir": "{folder}"}

MUTANTS = (
    Mutant(SpeaksForItsChildren, "refusal", CHILDREN),
    Mutant(PrefixBlind, "placement", SOCKETS),
    Mutant(Greedy, "own buffers", SOCKETS),
    Mutant(Talkative, "blocks end", SOCKETS),
    Mutant(Miserly, "blocks end", SOCKETS),
    Mutant(Forgiving, "blocks end", SOCKETS),
    Mutant(Credulous, "wrong requests", SOCKETS),
    Mutant(ModelBlind, "other layout", SOCKETS),
    Mutant(OldBytes, "follow", SOCKETS),
    Mutant(Optimist, "in-flight read", SOCKETS),
    Mutant(Unstoppable, "in-flight read", SOCKETS),
    Mutant(Dreamer, "late read", SOCKETS),
    Mutant(SameEpoch, "old epoch", SOCKETS),
    Mutant(Mournful, "peer crash", SOCKETS),
    Mutant(Patient, "silent peer", SOCKETS),
    Mutant(OnceOnly, "double sleep", SOCKETS),
    Mutant(Sulking, "failed release", SOCKETS),
    Mutant(OneTry, "failed restore", SOCKETS),
    Mutant(EarlyBird, "partial wake", SOCKETS),
    Mutant(Habitual, "new weights", SOCKETS),
    Mutant(Trusting, "new weights", SOCKETS),
    Mutant(Clinging, "shutdown", SOCKETS),
    Mutant(KeepsMappings, "bytes flat", SOCKETS),
    Mutant(KeepsBytes, "bytes flat", SOCKETS),
    Mutant(KeepsDescriptors, "resources flat", SOCKETS),
    Mutant(KeepsThreads, "resources flat", SOCKETS),
)
