"""Getting a GPU ready while the model libraries are imported: the driver, torch's context and cuBLAS take seconds, nearly all of
them outside of Python."""

from __future__ import annotations

import logging
import threading
from contextlib import closing

from torpor._native import Device
from torpor.memory import MemoryConfig

log = logging.getLogger(__name__)


class EarlyGpu:
    """Begins on a thread of its own when it is made. Where there is no GPU, or it does not work, it says nothing: whoever uses
    the GPU afterwards finds out, and says it better."""

    def __init__(self, config: MemoryConfig) -> None:
        self._ordinal = config.device
        self._thread = threading.Thread(target=self._prepare, name="torpor-early-gpu", daemon=True)
        if config.driver != "host":
            self._thread.start()

    def wait(self) -> None:
        """Blocks until the GPU is ready, or is not going to be."""
        if self._thread.ident is not None:
            self._thread.join()

    def _prepare(self) -> None:
        try:
            with closing(Device.open("cuda", self._ordinal)):  # keeps the context until torch has it
                _prepare_torch(self._ordinal)
        except Exception as error:
            log.debug("the GPU was not made ready early: %r", error)


def _prepare_torch(ordinal: int) -> None:
    import torch

    if torch.cuda.is_available() and ordinal < torch.cuda.device_count():
        some = torch.ones(16, 16, device=f"cuda:{ordinal}", dtype=torch.bfloat16)
        torch.mm(some, some)  # the first product makes cuBLAS's handle and loads its code
        torch.cuda.synchronize(ordinal)
