"""What the GPU tests of ``with pool:`` share."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from torpor.memory import Memory, MemoryConfig
from torpor.memory.torch_cuda import guests

MIB = 1 << 20
GPU = "cuda:0"


@contextlib.contextmanager
def closed_memory() -> Iterator[Memory]:
    """A Memory on GPU 0 that must have given everything back when the test is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__repr__", object.__repr__)  # a failed assertion must not read sleeping memory
        torch.cuda.init()
        memory = Memory(MemoryConfig(driver="cuda"))
        yield memory
        gc.collect()
        memory.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what tensors of a failed test still had
    assert memory.device.closed
    assert guests.nobody


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device=GPU).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=GPU, generator=generator)


def sleep(memory: Memory, *tags: str, policy: str = "host") -> None:
    torch.cuda.synchronize()
    memory.sleep(dict.fromkeys(tags, policy))


def in_threads(count: int, call: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            call(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
