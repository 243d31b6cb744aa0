"""Says at the end of a run what was tried."""

from __future__ import annotations

from typing import Any

from hostile_kit import SCALE, SEED, TRIED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TRIED:
        terminalreporter.section(f"hostile input, seed {SEED}, scale {SCALE:g}")
        for what, count in sorted(TRIED.items()):
            terminalreporter.write_line(f"{count:8d}  {what}")
