"""One engine's memory, commanded by benchmarks/shared_images.py: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401  the tree's own src first
import torch

from torpor.memory import Memory, MemoryConfig, Staging
from torpor.models.checkpoint import open_checkpoint

TAG = "weights"


class Steps:
    def __init__(self, names: list[str], staging: Staging) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._staging = staging

    def before(self, name: str) -> None:
        self._staging.ready(self._index[name])

    def after(self, name: str) -> None:
        self._staging.written(self._index[name])


class Engine:
    def __init__(self, driver: str, folder: str, share: bool) -> None:
        self.memory = Memory(MemoryConfig(driver=driver, share_images=share))
        self._folder = Path(folder)
        self.tensors: dict[str, torch.Tensor] = {}

    def place(self) -> dict[str, Any]:
        self.checkpoint = open_checkpoint(self._folder)
        pool = self.memory.pool(TAG)
        pool.reserve(sum(-(-entry.nbytes // 256) * 256 for entry in self.checkpoint.entries.values()))
        self.tensors = {name: pool.empty(entry.shape, entry.dtype) for name, entry in self.checkpoint.entries.items()}
        self.memory.device.hash_chunks(next(iter(self.tensors.values())).data_ptr(), 4096, 4096)  # kernels are compiled once
        return {}

    def load(self, how: str) -> dict[str, Any]:
        names, tensors = list(self.tensors), list(self.tensors.values())
        if how == "direct":
            self.checkpoint.read_into(self.tensors)
        elif how == "through":
            with self.memory.load_through_images(tensors) as staging:
                self.checkpoint.read_into(dict(zip(names, staging, strict=True)))
        else:
            with self.memory.load_in_steps(tensors) as steps:
                self.checkpoint.read_into(dict(zip(names, steps.tensors, strict=True)), Steps(names, steps))
        return {}

    def prepare(self) -> dict[str, Any]:
        return {"bytes": self.memory.prepare_images(fill=True)}

    def share(self) -> dict[str, Any]:
        report = self.memory.share_images(TAG)
        return {name: getattr(report, name) for name in ("found_bytes", "made_bytes", "private_bytes", "problems")}

    def sleep(self) -> dict[str, Any]:
        report = self.memory.sleep()
        return {"copied_bytes": report.tags[0].copied_bytes, "phases_s": report.phases_s}

    def wake(self) -> dict[str, Any]:
        return {"phases_s": self.memory.wake().phases_s}

    def digest(self) -> dict[str, Any]:
        """Of what the tensors hold."""
        told = hashlib.sha256()
        for tensor in self.tensors.values():
            told.update(self.memory.device.hash_chunks(tensor.data_ptr(), tensor.nbytes, 2 << 20).tobytes())
        return {"digest": told.hexdigest()}

    def compare(self) -> dict[str, Any]:
        """Every tenth tensor against the files, byte for byte."""
        wrong = []
        for name in list(self.tensors)[::10]:
            entry = self.checkpoint.entries[name]
            expected = torch.empty(entry.shape, dtype=entry.dtype)
            self.checkpoint.read_into({name: expected})
            if not torch.equal(self.tensors[name].cpu().view(torch.int16), expected.view(torch.int16)):
                wrong.append(name)
        return {"wrong": wrong}

    def change(self) -> dict[str, Any]:
        """One weight."""
        tensor = list(self.tensors.values())[len(self.tensors) // 2]
        tensor.view(torch.int16).view(-1)[17] += 1
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return {}

    def stats(self) -> dict[str, Any]:
        stats = self.memory.stats()
        return {"committed": stats.host_committed_bytes, "shared": stats.host_shared_bytes}


def main() -> None:
    driver, folder, share = sys.argv[1], sys.argv[2], sys.argv[3] == "share"
    if driver == "cuda":
        torch.zeros(1, device="cuda")
    engine = Engine(driver, folder, share)
    tell({"ready": True})
    for line in sys.stdin:
        name, *words = json.loads(line)
        began = time.perf_counter()
        try:
            call: Callable[..., dict[str, Any]] = getattr(engine, name)
            answer = call(*words)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        tell({**answer, "s": time.perf_counter() - began})


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
