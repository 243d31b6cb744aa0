from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torpor.errors import ConfigurationError

DriverName = str  # "auto", "host", "cuda"

PAGE_BYTES = 4096

AUTO = "auto"
BY_DRIVER = -1
EXTENT_BYTES = {"host": 64 << 20, "cuda": 512 << 20}
"""A GPU takes the longer the more pieces there are, and for very large ones too; a processor takes several at once."""
DRIVERS = (AUTO, *EXTENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """ConfigurationError for a value that cannot be; whether there is such a device is found out by ``Memory``."""

    driver: DriverName = AUTO  # cuda where there is a GPU that torch can use, else host
    device: int = 0
    extent_bytes: int = BY_DRIVER  # size of one physical piece; rounded up to the driver's granularity
    chunk_bytes: int = 2 << 20  # what one content hash covers (M7)
    host_limit_bytes: int | None = None  # cap on host images; None: what the machine and its cgroup have free
    share_images: bool = False  # images of weights are shared with engines of this host that have the same
    copy_threads: int | None = None  # None: the cores this process may use, at most 12

    def __post_init__(self) -> None:
        _check(self.driver in DRIVERS, "driver", self.driver, f"must be one of {', '.join(DRIVERS)}")
        by_driver = self.extent_bytes == BY_DRIVER
        if by_driver and self.driver != AUTO:  # else when it is known which one that is
            object.__setattr__(self, "extent_bytes", EXTENT_BYTES.get(self.driver, EXTENT_BYTES["host"]))
        _check(self.device >= 0, "device", self.device, "must be 0 or more")
        _check(by_driver or self.extent_bytes > 0, "extent_bytes", self.extent_bytes, "must be more than 0")
        whole_pages = self.chunk_bytes > 0 and self.chunk_bytes % PAGE_BYTES == 0
        _check(whole_pages, "chunk_bytes", self.chunk_bytes, f"must be a multiple of {PAGE_BYTES}")
        limit, threads = self.host_limit_bytes, self.copy_threads
        _check(limit is None or limit >= 0, "host_limit_bytes", limit, "must be 0 or more, or None")
        _check(threads is None or threads > 0, "copy_threads", threads, "must be more than 0, or None")


def _check(holds: bool, setting: str, value: Any, rule: str) -> None:
    if not holds:
        raise ConfigurationError(f"MemoryConfig.{setting} is {value!r}: it {rule}", setting=setting, value=value)
