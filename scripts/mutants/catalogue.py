"""All mutants. What is added here needs a test that notices it."""

from __future__ import annotations

from mutants import (
    connectors,
    engine,
    hand_offs,
    memory,
    memory_images,
    native,
    rdma,
    runner,
    scheduling,
    server,
    suite,
    torch_pools,
)
from mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *memory.MUTANTS,
    *memory_images.MUTANTS,
    *engine.MUTANTS,
    *connectors.MUTANTS,
    *rdma.MUTANTS,
    *hand_offs.MUTANTS,
    *scheduling.MUTANTS,
    *server.MUTANTS,
    *native.MUTANTS,
    *runner.MUTANTS,
    *torch_pools.MUTANTS,
    *suite.MUTANTS,
)
