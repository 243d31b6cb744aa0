"""The part of a start that needs nothing but the size of the weights, begun beside the check of the model's files: the device is
opened, and the host memory of the weights' image is taken. That is seconds of clearing and page-locking pages, for which nobody
waits then. Not beside the imports: in a process that has opened a device they take seconds more (docs/design/memory.md).

It is only a matter of time. Whatever fails here, the start comes to the same point later and says what is wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from torpor.engine.config import EngineConfig
from torpor.errors import TorporError
from torpor.memory import Memory, MemoryConfig
from torpor.models.checkpoint import open_checkpoint
from torpor.models.dtypes import choose_dtype

log = logging.getLogger(__name__)


class HeadStart:
    """On a thread of its own from the constructor on. ``close`` gives back what nobody came for."""

    def __init__(self, config: EngineConfig, open_memory: Callable[[MemoryConfig], Memory] = Memory) -> None:
        """``config``: its driver is known by now."""
        self._config = config
        self._open = open_memory
        self._memory: Memory | None = None
        self._thread = threading.Thread(target=self._run, name="torpor-head-start", daemon=True)
        self._thread.start()

    def memory(self) -> Memory | None:
        """What was opened with the configuration's settings. It goes with this object until ``hand_over``. Waits for the device,
        not for the host's memory."""
        self._thread.join()
        return self._memory

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
        memory, sleep = self._config.memory, self._config.sleep
        try:
            if sleep.prepares_images(memory.driver) and not memory.share_images and (nbytes := expected_bytes(self._config)):
                self._memory = self._open(memory)
                self._memory.take_ahead(nbytes)
        except TorporError as error:
            log.info("host memory for images is not taken ahead: %s", error)
        except Exception:
            log.exception("host memory for images is not taken ahead")


def expected_bytes(config: EngineConfig) -> int:
    """Of the weights in their pool, as the headers of a folder's files have it; 0 for other sources, whose size is known once the
    model is built. ModelError for damaged files. A model may leave tensors out, or keep some in another dtype."""
    folder = Path(config.model.source).expanduser()
    if config.model.load_format != "auto" or not folder.is_dir():
        return 0
    checkpoint = open_checkpoint(folder)
    dtype = choose_dtype(config.model.dtype, checkpoint.dtype, on_cpu=config.memory.driver == "host")
    return checkpoint.bytes_in_pool(dtype)
