"""The command line of ``scripts/mutate``."""

from __future__ import annotations

import argparse
import fnmatch
import queue
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mutants.bench import Bench, Outcome, Verdict
from mutants.catalogue import MUTANTS
from mutants.mutant import Mutant

REPOSITORY = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate", description="Breaks a copy of the source, place by place, to prove the tests."
    )
    parser.add_argument("--list", action="store_true", help="print every mutant and its test, run nothing")
    parser.add_argument("--check", action="store_true", help="only look whether every mutant still fits the source")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one; wildcards and repeats are fine")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, chosen by --seed")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies that work at once (default 2)")
    parser.add_argument("--why", action="store_true", help="also print what each test said")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Mutant]:
    found = [m for m in MUTANTS if not options.only or any(fnmatch.fnmatch(m.name, p) for p in options.only)]
    if not found:
        sys.exit(f"no mutant is called {', '.join(options.only)}: scripts/mutate --list")
    left_out = [m.name for m in found if not m.can_run]
    if left_out and not (options.list or options.check):
        print(f"{len(left_out)} are left out, for want of an optional package: {', '.join(left_out)}")
        found = [m for m in found if m.can_run]
    if options.sample is not None and options.sample < len(found):
        seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
        print(f"seed {seed}")
        found = random.Random(seed).sample(found, options.sample)
    return found


def problems(mutants: Sequence[Mutant]) -> list[str]:
    names = [m.name for m in mutants]
    found = [f"two mutants are called {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    return found + [problem for m in mutants if (problem := m.problem(REPOSITORY)) is not None]


class Campaign:
    """All trials, on several benches at once; native ones on the first bench, which alone builds the native core."""

    def __init__(self, mutants: Sequence[Mutant], benches: Sequence[Bench], why: bool) -> None:
        self.killed: list[Mutant] = []
        self.failures: list[str] = []
        self._benches = benches
        self._why = why
        self._native = [m for m in mutants if m.is_native]
        self._plain = [m for m in mutants if not m.is_native]
        self._todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._interrupted = False

    def run(self) -> None:
        self._everywhere(self._prepare)
        if self.failures:
            return
        for mutant in self._plain:
            self._todo.put(mutant)
        self._everywhere(self._work)

    def _everywhere(self, work: Callable[[int, Bench], None]) -> None:
        threads = [threading.Thread(target=work, args=(n, bench)) for n, bench in enumerate(self._benches)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # also after Ctrl-C: the copies go only when nobody works in them
            self._interrupted = any(thread.is_alive() for thread in threads)
            for bench in self._benches if self._interrupted else ():
                bench.stop()
            for thread in threads:
                thread.join()

    def _prepare(self, number: int, bench: Bench) -> None:
        """The benches share the proof that everything is green; the first one has the native core to build."""
        share = self._plain[number :: len(self._benches)] + (self._native if number == 0 else [])
        problem = bench.prepare(share)
        if problem is not None:
            with self._lock:
                self.failures.append(problem)

    def _work(self, number: int, bench: Bench) -> None:
        for mutant in self._native if number == 0 else []:
            self._take_note(mutant, bench.trial(mutant))
        while True:
            try:
                mutant = self._todo.get_nowait()
            except queue.Empty:
                return
            self._take_note(mutant, bench.trial(mutant))

    def _take_note(self, mutant: Mutant, outcome: Outcome) -> None:
        if self._interrupted:
            return
        line = f"{outcome.verdict.value:<9}{outcome.seconds:6.1f} s  {mutant.name:<44} {mutant.killer}"
        with self._lock:
            print(line + (f"\n{'':20}{outcome.reason}" if self._why else ""), flush=True)
            if outcome.verdict is Verdict.KILLED:
                self.killed.append(mutant)
            else:
                self.failures.append(f"{outcome.verdict.value} {mutant.name} ({mutant.why}): {mutant.killer}: {outcome.reason}")


def hunt(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that copies and tests do not outlive this
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = Bench(REPOSITORY, Path(folder, "0"))
        benches = [first, *(Bench(first.folder, Path(folder, str(n))) for n in range(1, max(1, options.jobs)))]
        campaign = Campaign(mutants, benches, options.why)
        campaign.run()
    if campaign.failures:
        print("", *campaign.failures, sep="\n")
    print(f"killed {len(campaign.killed)}/{len(mutants)} in {time.monotonic() - started:.0f} s")
    return 0 if len(campaign.killed) == len(mutants) else 1


def main() -> int:
    options = arguments()
    mutants = chosen(options)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<44} {mutant.why}\n{'':44} {mutant.file} > {mutant.killer}")
        print(f"{len(mutants)} mutants")
        return 0
    found = problems(mutants)
    if found:
        print(*found, sep="\n")
        return 2
    if options.check:
        print(f"{len(mutants)} mutants fit the source")
        return 0
    return hunt(mutants, options)


if __name__ == "__main__":
    sys.exit(main())
