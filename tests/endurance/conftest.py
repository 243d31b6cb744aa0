from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "unit"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("endurance")
    group.addoption("--cycles", type=int, default=None, help="sleep/wake cycles of one engine; a pair makes a fifth of them")
    group.addoption("--seed", type=int, default=None, help="of everything that is random; printed")
