"""What tests of connectors over device memory share: KV caches, prompts, and what is in use on the device."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "integration"), str(TESTS / "unit")]

from kv_meeting import Meeting  # noqa: E402

from torpor.kvcache.types import KVCacheSpec  # noqa: E402

A = list(range(100, 150))  # 50 tokens: 4 blocks of 16
B = list(range(200, 250))
THERE, HERE = [9, 2, 31, 4], [7, 30, 1, 12]
SPEC = KVCacheSpec(
    model_id="stand-in@1", num_layers=4, num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
LARGE = dataclasses.replace(SPEC, num_layers=8, num_blocks=512)  # 256 MiB
SLACK_BYTES = 64 << 20  # kernels that are loaded at first use, and contexts that grow with them
WAIT_S = 20.0


def on(ordinal: int = 0) -> dict[str, Any]:
    """Memory of one GPU."""
    return {"driver": "cuda", "device": ordinal, "extent_bytes": 32 << 20}


def meet(connector: str, folder: Path, spec: KVCacheSpec = SPEC) -> Meeting:
    return Meeting(connector, folder, memory=on(), spec=dataclasses.asdict(spec))


def used_bytes(ordinal: int = 0) -> int:
    """All processes'."""
    free, total = torch.cuda.mem_get_info(ordinal)
    return total - free


def comes_down_to(nbytes: int, within_s: float = 5.0) -> int:
    """The bytes in use, as soon as they are no more than these or the time is over: the driver frees behind a dead process."""
    deadline = time.monotonic() + within_s
    while (used := used_bytes()) > nbytes and time.monotonic() < deadline:
        time.sleep(0.05)
    return used


def nbytes_of(spec: KVCacheSpec) -> int:
    return spec.num_layers * spec.layer_bytes


def scattered(rng: random.Random, count: int, spec: KVCacheSpec = SPEC) -> list[int]:
    return rng.sample(range(spec.num_blocks), count)


def tokens_of(blocks: int, seed: int) -> list[int]:
    """A prompt of which so many blocks are handed off."""
    return [seed, *range(blocks * SPEC.block_size - 1)]
