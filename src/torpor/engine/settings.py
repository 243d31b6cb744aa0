"""One flat set of keywords for the whole configuration: for ``LLM(...)``, tests and scripts."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from torpor.connectors.config import ConnectorConfig
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.errors import ConfigurationError
from torpor.kvcache.config import CacheConfig
from torpor.memory.config import MemoryConfig
from torpor.models.config import ModelConfig
from torpor.scheduler.config import SchedulerConfig

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "sleep": SleepConfig,
}


def known_settings() -> dict[str, str]:
    """Setting to the section of EngineConfig that has it. Names are unique over all sections."""
    return {f.name: section for section, kind in SECTIONS.items() for f in dataclasses.fields(kind)}


def config_from_settings(source: str, *, connector: ConnectorConfig | None = None, **settings: Any) -> EngineConfig:
    """``config_from_settings("builtin:smollm2-135m", enable_sleep_mode=True, num_blocks=256)``. ConfigurationError for a name
    that no section has."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    known = known_settings()
    for name, value in {**settings, "source": source}.items():
        if name not in known:
            raise _unknown(name, value, known)
        sections[known[name]][name] = value
    return EngineConfig(connector=connector, **{section: SECTIONS[section](**values) for section, values in sections.items()})


def _unknown(name: str, value: object, known: dict[str, str]) -> ConfigurationError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
    return ConfigurationError(f"unknown setting {name!r}: {hint}", setting=name, value=value)
