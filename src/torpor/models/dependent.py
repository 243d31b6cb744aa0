# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Programmatic dependent launch: a kernel may begin while the one before it on the stream still runs.

A kernel that is launched with ``launch_pdl`` calls ``wait_for_previous`` before it reads or writes anything that a step changes;
what was queued before it is done then, also what the one before it waited for. ``release_next`` lets the next kernel begin as
soon as all programs of this one have begun. A kernel that is launched without waits for the whole of the one before, as ever.
"""

from __future__ import annotations

import triton
from triton.language.extra import cuda as _cuda


@triton.jit
def wait_for_previous():
    _cuda.gdc_wait()


@triton.jit
def release_next():
    _cuda.gdc_launch_dependents()
