"""Bare verbs against torpor's own pools: what a registration that does not follow the mapping does, and that one that does is
right."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from kernel_memory import MIB, used_bytes
from rdma_child import Child
from rdma_verbs import REMOTE_ACCESS_ERROR, SUCCESS, Key, Registration, Verbs

from torpor.memory import Memory, MemoryConfig
from torpor.memory.procfs import pinned_bytes

SIZE = 64 * MIB
PIECE = 1 * MIB
NOISE = 24 * MIB  # of the kernel's per-CPU page lists
OLD, NEW, WRITTEN = 0xA1, 0xB1, 0xC1


class Owner:
    """A pool of SIZE bytes that a peer may read, with or without hooks that follow its mapping."""

    def __init__(self, library: Path, device: str, follows: bool) -> None:
        import torch

        self.verbs = Verbs(library, device)
        self.memory = Memory(MemoryConfig(driver="host", extent_bytes=2 * MIB))
        self.tensor = self.memory.pool("kv_cache", policy="discard").empty(SIZE, torch.uint8)
        self.registration: Registration | None = None
        self.fill(OLD)
        self.register()
        if follows:
            self.memory.register_tag_hooks("kv_cache", self.deregister, self.register, "verbs")

    def register(self) -> None:
        if self.registration is None:
            self.registration = self.verbs.register(self.tensor.data_ptr(), SIZE)

    def deregister(self) -> None:
        if self.registration is not None:
            self.registration.close()
            self.registration = None

    def meet(self, peer: bytes) -> bytes:
        mine = self.verbs.address()
        self.verbs.connect(peer)
        return mine

    def key(self) -> Key:
        assert self.registration is not None
        return self.registration.key

    def fill(self, byte: int) -> None:
        self.tensor.fill_(byte)

    def bytes_seen(self) -> list[int]:
        return sorted(set(ctypes.string_at(self.tensor.data_ptr(), PIECE)))

    def pinned(self) -> int:
        return pinned_bytes()

    def sleep(self) -> int:
        """Bytes unmapped."""
        return self.memory.sleep({"kv_cache": "discard"}).unmapped_bytes

    def wake(self) -> None:
        self.memory.wake(["kv_cache"])
        self.memory.mark_valid("kv_cache")

    def close(self) -> None:
        self.deregister()
        self.verbs.close()
        del self.tensor
        self.memory.close()


class Peer:
    """Reads and writes the owner's memory; here, in the test's process."""

    def __init__(self, verbs: Verbs, owner: Child) -> None:
        self.verbs = verbs
        self.buffer = ctypes.create_string_buffer(PIECE)
        self.registration = verbs.register(ctypes.addressof(self.buffer), PIECE)
        verbs.connect(owner.call("meet", verbs.address()))

    def read(self, key: Key) -> tuple[int, list[int]]:
        """The status, and which bytes arrived."""
        ctypes.memset(self.buffer, 0, PIECE)
        status = self.verbs.read(self.registration, key, PIECE)
        return status, sorted(set(self.buffer.raw))

    def write(self, key: Key, byte: int) -> int:
        ctypes.memset(self.buffer, byte, PIECE)
        return self.verbs.write(self.registration, key, PIECE)


def meet(children: list[Child], verbs: Verbs, library: Path, device: str, *, follows: bool) -> tuple[Child, Peer]:
    owner = Child(functools.partial(Owner, library, device, follows))
    children.append(owner)
    return owner, Peer(verbs, owner)


def test_an_unfollowed_registration_reads_old_bytes_and_loses_writes(
    children: list[Child], verbs: Verbs, verbs_library: Path, rdma_device: str
) -> None:
    """The fault that torpor exists to exclude: every status is success, and the memory is held twice."""
    owner, peer = meet(children, verbs, verbs_library, rdma_device, follows=False)
    key = owner.call("key")
    assert peer.read(key) == (SUCCESS, [OLD])
    before = used_bytes()
    assert owner.call("sleep") == SIZE
    assert peer.read(key) == (SUCCESS, [OLD]), "asleep"
    assert owner.call("pinned") >= SIZE
    assert used_bytes() > before - NOISE, "nothing came back"
    owner.call("wake")
    owner.call("fill", NEW)
    assert peer.read(key) == (SUCCESS, [OLD]), "awake, with new bytes"
    assert used_bytes() > before + SIZE - NOISE, "held twice"
    assert peer.write(key, WRITTEN) == SUCCESS
    assert owner.call("bytes_seen") == [NEW], "the write is lost"


def test_p4a_a_registration_that_follows_gives_everything_back_and_reads_new_bytes(
    children: list[Child], verbs: Verbs, verbs_library: Path, rdma_device: str
) -> None:
    owner, peer = meet(children, verbs, verbs_library, rdma_device, follows=True)
    old_key = owner.call("key")
    assert peer.read(old_key) == (SUCCESS, [OLD])
    before = used_bytes()
    for _ in range(2):
        owner.call("sleep")
        assert owner.call("pinned") == 0
        assert used_bytes() < before - SIZE + NOISE, "the bytes are back"
        owner.call("wake")
        owner.call("fill", NEW)
        assert peer.read(owner.call("key")) == (SUCCESS, [NEW])
        assert used_bytes() < before + NOISE, "held once"
    assert peer.write(owner.call("key"), WRITTEN) == SUCCESS
    assert owner.call("bytes_seen") == [WRITTEN]
    assert peer.read(old_key) == (REMOTE_ACCESS_ERROR, [0]), "an old key is refused by the device"


def test_a_reader_whose_own_buffer_was_mapped_anew_gets_nothing(
    children: list[Child], verbs: Verbs, verbs_library: Path, rdma_device: str
) -> None:
    """The same fault at the other end: the device writes where the buffer was, with status success."""
    owner, _ = meet(children, verbs, verbs_library, rdma_device, follows=True)
    key = owner.call("key")
    ours: Any = Memory(MemoryConfig(driver="host", extent_bytes=2 * MIB))
    import torch

    with ours:
        tensor = ours.pool("kv_cache", policy="discard").empty(2 * MIB, torch.uint8)
        for follows, arrived in ((False, 0), (True, OLD)):
            registration = verbs.register(tensor.data_ptr(), 2 * MIB)
            if follows:
                registration.close()
            ours.sleep({"kv_cache": "discard"})
            ours.wake(["kv_cache"])
            if follows:
                registration = verbs.register(tensor.data_ptr(), 2 * MIB)
            tensor.zero_()
            assert verbs.read(registration, key, PIECE) == SUCCESS
            assert sorted(set(tensor[:PIECE].tolist())) == [arrived]
            registration.close()
        del tensor
