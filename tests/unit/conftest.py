"""Where no GPU is, kernels written in Triton run under its interpreter. It must be said before anything imports triton."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
