from __future__ import annotations

from dataclasses import dataclass

from torpor.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache. At most one of ``num_blocks`` and ``kv_cache_bytes`` may be set; with neither, the size follows from free
    memory: on a GPU, what is left of ``gpu_memory_utilization`` of all its memory once weights and the largest step have theirs.
    """

    block_size: int = 16  # tokens
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # of the device's memory: what everything of this engine may take together
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for setting in ("block_size", "num_blocks", "kv_cache_bytes"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise ConfigurationError(f"{setting} is {value}, it must be 1 or more", setting=setting, value=value)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, it must be more than 0 and at most 1",
                setting="gpu_memory_utilization",
                value=self.gpu_memory_utilization,
            )
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigurationError(
                f"num_blocks ({self.num_blocks}) and kv_cache_bytes ({self.kv_cache_bytes}) are both set: give one of them",
                setting="kv_cache_bytes",
                value=self.kv_cache_bytes,
            )
