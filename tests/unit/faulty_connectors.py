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
    says: str  # a part of the item's reason: another check that fails by chance would not do
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
    Mutant(SpeaksForItsChildren, "refusal", "does not", CHILDREN),
    Mutant(PrefixBlind, "placement", "other bytes than were handed over, or in other places", SOCKETS),
    Mutant(Greedy, "own buffers", "allocated in pools", SOCKETS),
    Mutant(Talkative, "blocks end", "loads nothing was reported", SOCKETS),
    Mutant(Miserly, "blocks end", "never free again", SOCKETS),
    Mutant(Forgiving, "blocks end", "after its lease had passed", SOCKETS),
    Mutant(Credulous, "wrong requests", "remote_num_tokens", SOCKETS),
    Mutant(ModelBlind, "other layout", "other model was read", SOCKETS),
    Mutant(OldBytes, "follow", "complete with other bytes", SOCKETS),
    Mutant(Optimist, "in-flight read", "its KV is gone", SOCKETS),
    Mutant(Unstoppable, "in-flight read", "were written afterwards", SOCKETS),
    Mutant(Dreamer, "late read", "a sleeping engine's KV was reported as complete", SOCKETS),
    Mutant(SameEpoch, "old epoch", "the epoch after a wake", SOCKETS),
    Mutant(Mournful, "peer crash", "did not let go", SOCKETS),
    Mutant(Patient, "silent peer", "has not ended", SOCKETS),
    Mutant(OnceOnly, "double sleep", "released already", SOCKETS),
    Mutant(Sulking, "failed release", "to nobody after a release that failed", SOCKETS),
    Mutant(OneTry, "failed restore", "to nobody after the wake that was tried again", SOCKETS),
    Mutant(EarlyBird, "partial wake", "the KV cache did not", SOCKETS),
    Mutant(Habitual, "new weights", "with older weights was read", SOCKETS),
    Mutant(Trusting, "new weights", "with newer weights was read", SOCKETS),
    Mutant(Clinging, "shutdown", "still subscribed", SOCKETS),
    Mutant(KeepsMappings, "bytes flat", "mapped bytes of memory files", SOCKETS),
    Mutant(KeepsBytes, "bytes flat", "bytes more after", SOCKETS),
    Mutant(KeepsDescriptors, "resources flat", "descriptors of", SOCKETS),
    Mutant(KeepsThreads, "resources flat", "threads of", SOCKETS),
)
