"""Capturing work into CUDA graphs whose memory belongs to a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torpor.memory import Pool


class GraphMemory:
    """One pool for all graphs of an engine: they never run at the same time, so each may use what the others used."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None], prepare: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """``prepare`` as it is, so that what ``run`` needs is compiled and libraries are set up, then ``run`` captured. Blocks
        until done."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            prepare()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            self._pool.graph_memory() as pool,
            # Other threads may ask the driver for what they need meanwhile.
            torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),  # type: ignore[arg-type]
        ):
            run()
        return graph
