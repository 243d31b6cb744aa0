"""Debian's kernel package cut down to what is booted: the plain ELF image, and the modules for 9p and Soft-RoCE in load order.

The image in the package unpacks itself; under emulation that takes longer than all the rest of the boot (4.7 of 7.6 s), so it is
done here, once. Modules lose their signature for the same reason: nobody checks it.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

# crc32_generic is asked for by name at run time (rdma_rxe), in no list of dependencies.
MODULES = ("virtio_pci", "virtio_console", "9p", "9pnet_virtio", "crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe", "dummy")
SIGNATURE = b"~Module signature appended~\n"
SIGNATURE_INFO_BYTES = 12  # before the mark; its last four are the signature's length
SETUP_HEADER = 0x1F1  # of a bzImage


class KernelError(Exception):
    """This package is not what was expected."""


@dataclass(frozen=True)
class Kernel:
    """``folder`` has vmlinux and the modules' files, ``modules`` their names in load order."""

    release: str
    folder: Path
    modules: tuple[str, ...]

    @classmethod
    def in_cache(cls, cache: Path) -> Kernel | None:
        """The newest that is whole: the list is written last."""
        lists = sorted(cache.glob("*/modules.json"), key=os.path.getmtime)
        if not lists or set(json.loads(lists[-1].read_text())["wanted"]) != set(MODULES):
            return None
        folder = lists[-1].parent
        return cls(folder.name, folder, tuple(json.loads(lists[-1].read_text())["order"]))

    @property
    def image(self) -> Path:
        return self.folder / "vmlinux"


def unpack(tree: Path, cache: Path) -> Kernel:
    """From an unpacked package into the cache. KernelError."""
    images = sorted((tree / "boot").glob("vmlinuz-*"))
    if not images:
        raise KernelError("it has no boot/vmlinuz-*")
    release = images[-1].name.removeprefix("vmlinuz-")
    new = cache / f".{release}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    (new / "vmlinux").write_bytes(elf_of(images[-1].read_bytes()))
    found = {path.name.split(".ko")[0]: path for path in (tree / "lib" / "modules" / release).rglob("*.ko*")}
    builtin = (tree / "lib" / "modules" / release / "modules.builtin").read_text()
    order = load_order(found, builtin, new)
    (new / "modules.json").write_text(json.dumps({"wanted": MODULES, "order": order}))
    shutil.rmtree(cache / release, ignore_errors=True)
    new.rename(cache / release)
    return Kernel(release, cache / release, tuple(order))


def load_order(found: dict[str, Path], builtin: str, into: Path) -> list[str]:
    """Dependencies first. Writes every module it names, plain and unsigned."""
    order: list[str] = []

    def visit(name: str) -> None:
        path = found.get(name) or found.get(name.replace("_", "-"))
        if name in order or (path is None and f"/{name}.ko" in builtin.replace("-", "_")):
            return
        if path is None:
            raise KernelError(f"it has no module {name}")
        module = unsigned(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
        for dependency in dependencies(module):
            visit(dependency)
        (into / f"{name}.ko").write_bytes(module)
        order.append(name)

    for name in MODULES:
        visit(name)
    return order


def dependencies(module: bytes) -> list[str]:
    """From its modinfo section: ``depends=a,b``."""
    start = module.find(b"\0depends=")
    if start < 0:
        return []
    words = module[start + len(b"\0depends=") :].split(b"\0", 1)[0].decode()
    return [word.replace("-", "_") for word in words.split(",") if word]


def unsigned(module: bytes) -> bytes:
    if not module.endswith(SIGNATURE):
        return module
    end = len(module) - len(SIGNATURE)
    (length,) = struct.unpack(">I", module[end - 4 : end])
    return module[: end - SIGNATURE_INFO_BYTES - length]


def elf_of(image: bytes) -> bytes:
    """The kernel inside a bzImage (Documentation/arch/x86/boot.rst). KernelError."""
    if image[0x202:0x206] != b"HdrS":
        raise KernelError("its image is no bzImage")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = offset + ((image[SETUP_HEADER] or 4) + 1) * 512
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        plain = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        plain = zlib.decompressobj(31).decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd") and shutil.which("zstd"):
        plain = subprocess.run(["zstd", "-dc"], input=payload[:-4], stdout=subprocess.PIPE, check=True).stdout
    else:
        raise KernelError(f"its image is packed in a way that is not known here ({payload[:4].hex()}), or zstd is missing")
    if not plain.startswith(b"\x7fELF"):
        raise KernelError("its image holds no ELF file")
    return plain
