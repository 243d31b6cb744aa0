"""The engine's configuration: one frozen dataclass per subpackage, composed. The CLI reads its defaults off these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from torpor.connectors.config import ConnectorConfig
from torpor.connectors.registry import check_name
from torpor.errors import ConfigurationError
from torpor.kvcache.config import CacheConfig
from torpor.memory.config import MemoryConfig
from torpor.models.config import ModelConfig
from torpor.scheduler.config import SchedulerConfig

WhileAsleep = Literal["reject", "wait", "wake"]


@dataclass(frozen=True, kw_only=True)
class SleepConfig:
    enable_sleep_mode: bool = False  # pools, and a connector that cannot follow is refused at start-up (E4)
    enable_pools: bool = False  # pools only: such a connector is refused by the sleep that would unmap
    # A sleep's images, as much host memory as weights and runtime state, are made at start-up. None: on a GPU, where page-locking
    # them takes seconds, which the first sleep would take else.
    prepare_images: bool | None = None
    while_asleep: WhileAsleep = "reject"  # what a request meets while the engine sleeps (E10)
    retry_after_s: float = 5.0
    default_deadline_s: float = 60.0  # of a sleep that names none

    def __post_init__(self) -> None:
        """ConfigurationError for a value that would be taken for another one, or for none."""
        if self.while_asleep not in get_args(WhileAsleep):
            raise ConfigurationError(
                f"while_asleep is {self.while_asleep!r}; use one of {', '.join(get_args(WhileAsleep))}",
                setting="while_asleep",
                value=self.while_asleep,
            )
        for setting in ("retry_after_s", "default_deadline_s"):
            value = getattr(self, setting)
            if not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"{setting} is {value}, it must be a number, 0 or more", setting=setting, value=value)

    @property
    def pools(self) -> bool:
        return self.enable_sleep_mode or self.enable_pools

    def prepares_images(self, driver: str) -> bool:
        return self.pools and driver != "host" if self.prepare_images is None else self.prepare_images


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    connector: ConnectorConfig | None = None
    sleep: SleepConfig = field(default_factory=SleepConfig)

    def __post_init__(self) -> None:
        """ConfigurationError for settings that contradict each other."""
        if self.memory.share_images and not self.sleep.pools:
            message = "share_images shares the images of a sleep: it needs enable_sleep_mode or enable_pools"
            raise ConfigurationError(message, setting="share_images", value=True)
        if self.connector is not None:
            check_name(self.connector.connector)
