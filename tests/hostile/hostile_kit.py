"""What all hostile tests share: one seed, one scale, a count of what was tried, and the makers of bad input.

``TORPOR_HOSTILE_SEED`` and ``TORPOR_HOSTILE_SCALE`` are set by ``scripts/hostile``; without them a run is short and always the
same.
"""

from __future__ import annotations

import copy
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "unit"))

SEED = int(os.environ.get("TORPOR_HOSTILE_SEED", "0"))
SCALE = float(os.environ.get("TORPOR_HOSTILE_SCALE", "1"))
TRIED: Counter[str] = Counter()

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1,
    10**30, 10**400, 0.0, -0.5, 1.5, 1e-320, 1e-38, 1e-5, 0.01, 100.0, 1e30, 1e308, math.inf, -math.inf, math.nan,
    "", " ", "a", "5", "1e5", "true", "null", "\x00", "\x7f", "é", "\U0001f600", "\ud800", "\udfff\ud800", "a" * 300, "a" * 5000,
    "../../etc/passwd", "{{ 7*7 }}", "%s%n", "localhost", "127.0.0.1", "10.0.0.1", "::1", "0.0.0.0", "no.host.invalid",
)  # fmt: skip
NAMES = ("a", "", "torpor", "epoch", "lease", "__proto__", "é", "\ud800", "x" * 200)


def rng(name: str) -> random.Random:
    """Of one test; a failure shows the line."""
    print(f"hostile: {name} with seed {SEED}")
    return random.Random(f"{SEED}:{name}")


def scaled(count: int) -> int:
    return max(1, round(count * SCALE))


def tried(what: str, count: int = 1) -> None:
    """For the summary at the end of the run."""
    TRIED[what] += count


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def any_json(rand: random.Random, depth: int = 0) -> Any:
    kind = rand.random()
    if depth > 3 or kind < 0.7:
        return rand.choice(SCALARS)
    if kind < 0.74:
        return nested(rand.choice((5, 20, 100, 400)))
    if kind < 0.87:
        return [any_json(rand, depth + 1) for _ in range(rand.choice((0, 1, 2, 5, 40)))]
    return {rand.choice(NAMES): any_json(rand, depth + 1) for _ in range(rand.randrange(5))}


def mutated_object(rand: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three fields replaced, left out, added or made subtly wrong, at any depth."""
    bad = copy.deepcopy(good)
    for _ in range(rand.choice((1, 1, 1, 2, 3))):
        place = bad
        while (inner := [v for v in place.values() if isinstance(v, dict) and v]) and rand.random() < 0.5:
            place = rand.choice(inner)
        _spoil(rand, place)
    return bad


def _spoil(rand: random.Random, place: dict[str, Any]) -> None:
    name = rand.choice([*place, rand.choice(NAMES)])
    how = rand.random()
    value = place.get(name)
    if how < 0.1:
        place.pop(name, None)
    elif how < 0.5 and isinstance(value, int) and not isinstance(value, bool):
        place[name] = value + rand.choice((-1, 1, 2, -(2**31), 2**31, 2**64))
    elif how < 0.5 and isinstance(value, list):
        place[name] = _spoiled_list(rand, value)
    elif how < 0.5 and isinstance(value, str) and value:
        at = rand.randrange(len(value))
        place[name] = value[:at] + rand.choice("0f9.x\x00") + value[at + rand.randrange(2) :]
    else:
        place[name] = any_json(rand)


def _spoiled_list(rand: random.Random, items: list[Any]) -> list[Any]:
    changes = (
        lambda: items[:-1],
        lambda: [*items, *items],
        lambda: list(reversed(items)),
        lambda: [*items, any_json(rand)],
        lambda: [rand.randrange(-2, 300) for _ in items],
        lambda: items * rand.choice((0, 10, 2000)),
    )
    return rand.choice(changes)()


def mutated_bytes(rand: random.Random, good: bytes) -> bytes:
    """A truncation, flipped bits, a run overwritten, inserted or left out, or a length-like word made absurd."""
    data = bytearray(good)
    for _ in range(rand.choice((1, 1, 2, 5))):
        at = rand.randrange(len(data)) if data else 0
        how = rand.randrange(6)
        if how == 0:
            del data[at:]
        elif how == 1 and data:
            data[at] ^= 1 << rand.randrange(8)
        elif how == 2:
            data[at : at + rand.randrange(1, 9)] = rand.randbytes(rand.randrange(1, 9))
        elif how == 3:
            data[at:at] = rand.randbytes(rand.randrange(1, 40))
        elif how == 4:
            del data[at : at + rand.randrange(1, 40)]
        else:
            word = rand.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, rand.getrandbits(64)))
            data[at : at + 8] = word.to_bytes(8, rand.choice(("little", "big")))
    return bytes(data)
