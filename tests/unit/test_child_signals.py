"""Ctrl-C on a terminal reaches the children too: they leave it to their parent, from before their first slow import on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torpor.testing.connectors.process import MAIN

PROBE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore it from its start
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            print(getattr(signal.getsignal(signal.SIGINT), "name", "its own"))
            sys.exit()
sys.meta_path.insert(0, Look())
{run}
"""
CORE = 'runpy.run_module("torpor.engine.process", run_name={name!r})'


def handler_when_importing(at: str, run: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROBE.format(at=at, run=run)], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize(("name", "expected"), [("__main__", "SIG_IGN"), ("imported", "its own")])
def test_a_core_that_imports_does_not_hear_an_interrupt(name: str, expected: str) -> None:
    assert handler_when_importing("msgspec", CORE.format(name=name)) == expected


def test_an_engine_of_the_conformance_suite_does_not_hear_an_interrupt() -> None:
    child = MAIN.format(path=sys.path, quiet=0)
    assert handler_when_importing("torpor.testing.connectors.process", child) == "SIG_IGN"
