"""The long run of the state machines: many random histories, and how many of them and of their steps there were.

scripts/stateful --machine engine --examples 2000 --steps 60 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
import warnings

import step_counter
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machines import MACHINES


def run(name: str, examples: int, steps: int, number: int, *, shrinks: bool) -> bool:
    counts = step_counter.counts
    counts.clear()
    begun = time.monotonic()
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
    )
    ok = True
    try:
        run_state_machine_as_test(seed(number)(MACHINES[name]), settings=chosen)
    except Exception:
        ok = False
        sys.excepthook(*sys.exc_info())
    took = time.monotonic() - begun
    word = "ok" if ok else "FAILED"
    examples, steps_run = counts.pop("examples", 0), counts.pop("steps", 0)
    print(f"stateful {name}: {word}, {examples} examples, {steps_run} steps, seed {number}, {took:.0f} s")
    print("    " + ", ".join(f"{what} {times}" for what, times in sorted(counts.items())), flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", choices=[*MACHINES, "all"], default="all")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--no-shrink", action="store_true", help="show the first failure as it is")
    asked = parser.parse_args()
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)
    names = list(MACHINES) if asked.machine == "all" else [asked.machine]
    good = [run(name, asked.examples, asked.steps, asked.seed, shrinks=not asked.no_shrink) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
