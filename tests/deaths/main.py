"""Kills and stops P, D, their cores and the router at random moments, and looks at the survivors. ``scripts/deaths``."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from rounds import Rounds, any_death
from town import Town


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/deaths", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--connector", choices=["ipc", "nixl"], default="ipc")
    parser.add_argument("--max-s", type=float, default=float("inf"), help="stop after so long, and say how many there were")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.connector}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the town does not outlive this
    with tempfile.TemporaryDirectory() as name:
        done = run(Path(name), options)
    print(f"deaths survived: {done} of {options.times}, seed {options.seed}, {options.connector}", flush=True)
    return 0


def run(folder: Path, options: argparse.Namespace) -> int:
    from engine_models import save_model

    rng, started, done = random.Random(options.seed), time.monotonic(), 0
    (folder / "model").mkdir()
    with Town(folder, save_model(folder / "model"), options.connector) as town:
        rounds = Rounds(town, rng, lambda text: print(f"{done + 1:3} {text}", flush=True))
        rounds.prepare()
        while done < options.times and time.monotonic() - started < options.max_s:
            death = any_death(rng)
            try:
                rounds.run(death)
            except BaseException:
                print(f"death {done + 1}, {death}:\n{town.fleet.last_words()}", flush=True)
                raise
            done += 1
        print(dict(sorted(rounds.ends.items())), flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
