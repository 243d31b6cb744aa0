"""The part of a start that needs no model library, begun beside the import of those: the device is opened, and the host memory of
the weights' image is taken. That is seconds of clearing and page-locking pages, for which nobody waits then.

It is only a matter of time. Whatever fails here, the start comes to the same point later and says what is wrong.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from torpor.engine.config import EngineConfig
from torpor.errors import ConfigurationError, DeviceError, TorporError
from torpor.memory import Memory, MemoryConfig
from torpor.models.weight_bytes import expected_weight_bytes

log = logging.getLogger(__name__)


class HeadStart:
    """On a thread of its own from the constructor on. ``close`` gives back what nobody came for."""

    def __init__(self, config: EngineConfig, open_memory: Callable[[MemoryConfig], Memory] = Memory) -> None:
        self._config = config
        self._open = open_memory
        self._memory: Memory | None = None
        self._thread = threading.Thread(target=self._run, name="torpor-head-start", daemon=True)
        self._thread.start()

    def memory(self, config: MemoryConfig) -> Memory | None:
        """What was opened, if it is as ``config`` asks. It goes with this object until ``hand_over``. Waits for the device, not
        for the host's memory."""
        self._thread.join()
        memory = self._memory
        return memory if memory is not None and memory.config == config else None

    def hand_over(self) -> None:
        """Somebody else closes the memory."""
        self._memory = None

    def close(self) -> None:
        """Blocks until what was begun is given back. Idempotent."""
        self._thread.join()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _run(self) -> None:
        try:
            nbytes = expected_weight_bytes(self._config.model)
            if nbytes is not None:
                self._memory = self._open_memory()
            if self._memory is not None and nbytes is not None:
                self._memory.take_ahead(nbytes)
        except TorporError as error:
            log.info("host memory for images is not taken ahead: %s", error)
        except Exception:
            log.exception("host memory for images is not taken ahead")

    def _open_memory(self) -> Memory | None:
        """None where no images are prepared."""
        asked, sleep = self._config.memory, self._config.sleep
        for driver in ("cuda", "host") if asked.driver == "auto" else (asked.driver,):
            if sleep.prepares_images(driver) and not asked.share_images:
                try:
                    return self._open(dataclasses.replace(asked, driver=driver))
                except (ConfigurationError, DeviceError):
                    if asked.driver != "auto":
                        raise
        return None
