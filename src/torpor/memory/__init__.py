"""Tagged pools of device memory that can sleep: physical pages go and come back, addresses stay.

>>> with Memory(MemoryConfig(driver="host")) as memory:
...     weights = memory.pool("weights").zeros((1024, 1024))
...     report = memory.sleep({"weights": "host"})
...     wake = memory.wake()
"""

from torpor.memory.config import MemoryConfig
from torpor.memory.drivers import choose_driver
from torpor.memory.ledger import ExportedPool, ExportedRegion, ExportLedger, Grant
from torpor.memory.loading import Staging
from torpor.memory.memory import Memory
from torpor.memory.pool import Pool
from torpor.memory.types import (
    IMAGE_USES,
    POLICIES,
    AheadReport,
    Content,
    Holder,
    ImageUse,
    MemoryStats,
    Policy,
    Residency,
    SharingReport,
    SleepReport,
    TagSleepReport,
    TagStats,
    TagWakeReport,
    WakeReport,
)

__all__ = [
    "IMAGE_USES",
    "POLICIES",
    "AheadReport",
    "Content",
    "ExportLedger",
    "ExportedPool",
    "ExportedRegion",
    "Grant",
    "Holder",
    "ImageUse",
    "Memory",
    "MemoryConfig",
    "MemoryStats",
    "Policy",
    "Pool",
    "Residency",
    "SharingReport",
    "SleepReport",
    "Staging",
    "TagSleepReport",
    "TagStats",
    "TagWakeReport",
    "WakeReport",
    "choose_driver",
]
