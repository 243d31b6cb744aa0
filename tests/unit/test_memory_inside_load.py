"""Inside a load nothing is allocated and no image is touched: it would lie where the load writes, or take its memory away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch_fake import FakeTorch, torch_pool

from torpor.errors import StateError
from torpor.memory import Memory, MemoryConfig, Pool

MIB = 1 << 20
CONFIG = MemoryConfig(extent_bytes=MIB, chunk_bytes=64 << 10, copy_threads=2)
SIZE = MIB // 2 + 100


def enters(pool: Pool) -> None:
    with pool:
        pytest.fail("entered")


def captures(pool: Pool) -> None:
    with pool.graph_memory():
        pytest.fail("began")


FORBIDDEN: dict[str, Callable[[Memory, Pool], object]] = {
    "empty": lambda memory, pool: pool.empty(1000, torch.uint8),
    "zeros": lambda memory, pool: pool.zeros(1000, torch.uint8),
    "reserve": lambda memory, pool: pool.reserve(1000),
    "with pool": lambda memory, pool: enters(pool),
    "graph_memory": lambda memory, pool: captures(pool),
    "prepare_images": lambda memory, pool: memory.prepare_images(fill=True),
    "release_images": lambda memory, pool: memory.release_images("weights"),
    "take_ahead": lambda memory, pool: memory.take_ahead(MIB),
    "end_ahead": lambda memory, pool: memory.end_ahead(),
}


@contextlib.contextmanager
def in_steps(memory: Memory, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    with memory.load_in_steps([tensor]) as staging:
        staging.ready(0)
        yield staging.tensors[0]
        staging.written(0)


@contextlib.contextmanager
def through_images(memory: Memory, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    with memory.load_through_images([tensor]) as [staging]:
        yield staging


@pytest.mark.parametrize("load", [in_steps, through_images])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_it_is_refused_and_the_load_ends_right(memory: Memory, name: str, load: Callable[..., object]) -> None:
    pool = torch_pool(memory, FakeTorch(), "weights")
    tensor = pool.empty(SIZE, torch.uint8).fill_(1)
    with load(memory, tensor) as staged:  # type: ignore[attr-defined]
        staged[: SIZE // 2] = 5
        with pytest.raises(StateError, match="load") as caught:
            FORBIDDEN[name](memory, pool)
        staged[SIZE // 2 :] = 6
    assert caught.value.fields["state"] == "load"
    del staged
    assert tensor[: SIZE // 2].eq(5).all()
    assert tensor[SIZE // 2 :].eq(6).all()
    memory.check_integrity()
    assert memory.sleep().tags[0].copied_bytes == 0
    memory.wake()
    assert tensor[: SIZE // 2].eq(5).all()
    if name not in ("with pool", "graph_memory"):
        FORBIDDEN[name](memory, pool)


def test_a_load_that_has_ended_lends_nothing(memory: Memory) -> None:
    tensor = memory.pool("weights").empty(SIZE, torch.uint8).fill_(1)
    with memory.load_in_steps([tensor]) as staging:
        staging.ready(0)
        staging.tensors[0].fill_(2)
    for call in (staging.ready, staging.written):
        with pytest.raises(StateError, match="ended"):
            call(0)
    del staging, call
    assert tensor.eq(2).all()


def test_a_load_that_was_given_up_lends_nothing(memory: Memory) -> None:
    tensor = memory.pool("weights").empty(SIZE, torch.uint8).fill_(1)
    with pytest.raises(KeyError), memory.load_in_steps([tensor]) as staging:
        raise KeyError
    memory.release_images("weights")
    for call in (staging.ready, staging.written):
        with pytest.raises(StateError, match="ended"):
            call(0)
    del staging, call
    memory.check_integrity()
