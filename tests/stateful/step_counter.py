"""How many rules have run, and what came of them: what the long run states at its end."""

from __future__ import annotations

from collections import Counter

counts: Counter[str] = Counter()


def count_step() -> None:
    counts["steps"] += 1


def count_machine() -> None:
    counts["examples"] += 1


def count(what: str) -> None:
    """Something that a history must have had to have proved anything."""
    counts[what] += 1
