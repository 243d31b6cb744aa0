"""A core process keeps the garbage collector away from what it loaded. In an interpreter of its own: freezing is for ever."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from torpor.engine import collector

CODE = """if True:
    import gc, json, sys
    from torpor.engine import process, startup
    seen = []

    def factory(**callbacks):
        startup.import_model_libraries()
        seen.append((callbacks, gc.isenabled(), "torch" in sys.modules))
        return "core"

    core = process.settled(factory)
    made = core(progress=1, on_state=2, on_ready=3)
    print(json.dumps([made, seen, gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()]))
"""


def test_what_was_loaded_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], timeout=100, capture_output=True, text=True, check=True)
    made, seen, enabled, frozen, watched, thresholds = json.loads(done.stdout)
    assert made == "core"
    assert seen == [[{"progress": 1, "on_state": 2, "on_ready": 3}, True, True]]
    assert enabled
    assert frozen > 100_000
    assert watched < 1_000
    assert thresholds[0] > 10_000, "the objects of one step set off a collection"


@pytest.mark.parametrize("on", [True, False])
def test_a_pause_of_the_collector_ends_as_it_began(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with collector.paused():
            assert not gc.isenabled()
        assert gc.isenabled() == on
    finally:
        gc.enable()
