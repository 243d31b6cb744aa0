"""A large KV cache has more extents than a shell gives a process descriptors."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torpor.connectors import descriptors
from torpor.errors import TransportError

LIMITS = resource.RLIMIT_NOFILE


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the process's limits are, and become."""
    seen = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: seen[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: seen.append(limits))
    monkeypatch.setattr(descriptors.os, "listdir", lambda folder: ["0", "1", "2"])
    return seen


def test_what_fits_changes_nothing(limits: list[tuple[int, int]]) -> None:
    descriptors.make_room(1024 - descriptors.SPARE - 3)
    assert limits == [(1024, 4096)]


def test_the_limit_is_raised_by_what_is_missing(limits: list[tuple[int, int]]) -> None:
    descriptors.make_room(2000)
    assert limits[-1] == (2003 + descriptors.SPARE, 4096)


def test_beyond_the_systems_own_limit_is_an_error_that_says_what_it_takes(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(TransportError, match=rf"ulimit -n must be {5003 + descriptors.SPARE} or more, it is 4096"):
        descriptors.make_room(5000)
    assert len(limits) == 1


def test_a_kv_cache_of_many_extents_is_read_under_a_small_limit(tmp_path: Path) -> None:
    """Two engines in one process that was started with 64 descriptors: 48 extents each, published, sent and mapped."""
    script = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        from torpor.connectors import ConnectorConfig
        from torpor.kvcache.types import KVCacheSpec
        from torpor.memory import MemoryConfig
        from torpor.testing.kv_engine import KVEngine
        sizes = {{"num_layers": 3, "num_blocks": 64, "block_size": 4, "num_kv_heads": 2, "head_dim": 16}}
        spec = KVCacheSpec(model_id="m@1", dtype="float32", **sizes)
        def engine(name, role):
            config = ConnectorConfig(connector="ipc", engine_id=name, role=role, extra={{"socket_dir": {str(tmp_path / "kv")!r}}})
            return KVEngine(config, spec, memory=MemoryConfig(driver="host", extent_bytes=4096))
        with engine("P", "producer") as p, engine("D", "consumer") as d:
            prompt = list(range(10))
            assert d.load("q", prompt, p.prefill("r", prompt, [1, 2, 3]), [4, 5, 6]) == "recving"
            assert d.has(prompt, [4, 5, 6])
            assert p.sleep().held_bytes == 0
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
