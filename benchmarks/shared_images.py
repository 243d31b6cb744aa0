"""What an image costs while weights are loaded, and what engines with the same weights save by sharing it.

    .venv/bin/python benchmarks/shared_images.py                        # host driver, 256 MiB of weights, 1, 2 and 4 engines
    python benchmarks/gpu_shared_images.py                              # 16 GiB, 2 engines

Every engine is a process that loads the same safetensors, which lie in memory (a page cache that is never cold), in the shapes of
an 8B model. Ways to load, in processes of their own:

    direct       to the device without an image; what preparing the image takes afterwards is beside it
    through      host memory is taken first, then files are read into the image, then the device gets it
    in steps     the three at once (Memory.load_in_steps): what the server does

Host bytes are proportional set sizes (/proc/<pid>/smaps_rollup) beyond those before the load. Sharing is then broken in every way
that must not matter: one engine changes a weight, one is killed, one comes late. Contents are checked after every wake.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import common
import torch

from torpor.memory.procfs import open_memfds

GIB = 1 << 30
HIDDEN, LAYERS = 4096, 36
EXPONENT, SMALL = 0x7F80, 0x3C00  # of a bfloat16: 0.008 to 0.016
FILES = 8
OWN_BYTES = {"host": 0, "cuda": 160 << 20}  # beside images of 2 GiB and of 16 an H200 showed 0.14 GiB a process


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Of an 8B model, narrower for less, with so many bytes in bfloat16."""
    hidden = HIDDEN
    while _bytes(_model(hidden)) > nbytes:
        hidden //= 2
    out = _model(hidden)
    rest = (nbytes - _bytes(out)) // 2 // hidden
    for i in range(0, rest, 8192):
        out[f"more.{i}"] = (min(8192, rest - i), hidden)
    return out


def _model(hidden: int) -> dict[str, tuple[int, ...]]:
    layer = {
        "q": (hidden, hidden),
        "k": (hidden // 4, hidden),
        "v": (hidden // 4, hidden),
        "o": (hidden, hidden),
        "gate": (3 * hidden, hidden),
        "up": (3 * hidden, hidden),
        "down": (hidden, 3 * hidden),
        "norm": (hidden,),
    }
    ends = {"embed": (37 * hidden, hidden), "head": (37 * hidden, hidden)}
    return {**ends, **{f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}}


def _bytes(model: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * torch.Size(shape).numel() for shape in model.values())


@contextlib.contextmanager
def checkpoint(folder: Path, model: dict[str, tuple[int, ...]], on_gpu: bool) -> Iterator[None]:
    """Safetensors with random values, small ones and others in every run, that lie in memory files of this process."""
    device = "cuda" if on_gpu else "cpu"
    with ThreadPoolExecutor(FILES if on_gpu else 2) as pool:
        parts = [list(model)[index::FILES] for index in range(FILES)]
        jobs = [pool.submit(_write_file, {n: model[n] for n in part}, i, device) for i, part in enumerate(parts)]
    files = [job.result() for job in jobs]
    weight_map = {}
    for index, (part, file) in enumerate(zip(parts, files, strict=True)):
        name = f"model-{index}.safetensors"
        (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if on_gpu:
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for file in files:
            os.close(file)


def _write_file(model: dict[str, tuple[int, ...]], seed: int, device: str) -> int:
    header, end = {}, 0
    for name, shape in model.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    descriptor = os.memfd_create("torpor-bench")
    at = os.pwrite(descriptor, struct.pack("<Q", len(head)) + head, 0)
    generator = torch.Generator(device).manual_seed((os.getpid() << 8) + seed)
    for shape in model.values():
        values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device, generator=generator)
        values = (values & ~EXPONENT | SMALL).cpu()
        data = memoryview(values.numpy().reshape(-1).view("u1"))
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done : done + (64 << 20)], at + done)
        at += done
    return descriptor


class Child:
    """An engine in a process of its own."""

    stock: ClassVar[dict[bool, list[Child]]] = {False: [], True: []}  # started ahead: a GPU's processes take seconds to come up

    @classmethod
    def get(cls, driver: str, folder: Path, *, share: bool = False) -> Child:
        return cls.stock[share].pop(0) if cls.stock[share] else cls(driver, folder, share=share)

    def __init__(self, driver: str, folder: Path, *, share: bool = False) -> None:
        script = Path(__file__).with_name("shared_images_engine.py")
        command = [sys.executable, str(script), driver, str(folder), "share" if share else "private"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=common.environment()
        )
        self._idle_pss = 0

    def do(self, *words: Any) -> dict[str, Any]:
        self.ask(*words)
        return self.answer()

    def ask(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def begin(self) -> None:
        self.answer()
        self._idle_pss = self._pss()
        self.do("place")

    @property
    def pss(self) -> int:
        """Beyond what it had before it loaded."""
        return self._pss() - self._idle_pss

    def _pss(self) -> int:
        with open(f"/proc/{self._process.pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

    def end(self, kill: bool = False) -> None:
        if kill:
            self._process.kill()
        self._process.communicate()


def prime(nbytes: int) -> None:
    """A virtual machine's host gives memory anew, for seconds a GiB, where it was not used lately."""
    with contextlib.closing(mmap.mmap(-1, nbytes)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = torch.frombuffer(memory, dtype=torch.uint8)
        view[:: 1 << 12] = 1
        del view


def load_times(driver: str, folder: Path, nbytes: int) -> tuple[dict[str, dict[str, float]], str]:
    """Seconds by way and step; and the digest of what was loaded."""
    ways = {"direct": ["prepare"], "through": [], "in steps": [], "in steps, again": []}
    prime(nbytes)
    children = {way: Child.get(driver, folder) for way in ways}
    out: dict[str, dict[str, float]] = {}
    digests = set()
    for way, more in ways.items():
        child = children[way]
        child.begin()
        out[way] = {"load": child.do("load", way.split(",")[0])["s"]}
        for step in more:
            out[way][step] = child.do(step)["s"]
        first = child.do("sleep")
        out[way] |= {"first sleep": first["s"], "copied": first["copied_bytes"], "wake": child.do("wake")["s"]}
        digests.add(child.do("digest")["digest"])
        if way == "direct" and (wrong := child.do("compare")["wrong"]):
            raise RuntimeError(f"loaded wrongly: {wrong}")
        child.end()
        print(way, out[way], flush=True)
    if len(digests) != 1:
        raise RuntimeError("ways to load differ in what they load")
    return out, digests.pop()


def many(driver: str, folder: Path, count: int, share: bool, digest: str) -> dict[str, Any]:
    """So many with the same weights, one after another, all asleep in the end."""
    children = [Child.get(driver, folder, share=share) for _ in range(count)]
    rows = []
    for child in children:
        child.begin()
        row = {"load": child.do("load", "direct" if share else "in steps")["s"]}
        if share:
            shared = child.do("share")
            row |= {"share": shared["s"], "found": shared["found_bytes"], "made": shared["made_bytes"]}
            if shared["private_bytes"]:
                raise RuntimeError(f"not shared: {shared}")
        row["first sleep"] = child.do("sleep")["s"]
        rows.append(row)
    asleep = [child.pss for child in children]
    for child, row in zip(children, rows, strict=True):
        row["wake"] = child.do("wake")["s"]
        if child.do("digest")["digest"] != digest:
            raise RuntimeError("a wake brought other bytes")
    print(count, share, rows, asleep, flush=True)
    if share and count > 1:
        break_sharing(driver, folder, children, digest)
    for child in children:
        child.end(kill=share)
    return {"engines": count, "shared": share, "host bytes asleep": sum(asleep), "each": rows}


def break_sharing(driver: str, folder: Path, children: list[Child], digest: str) -> None:
    """Nothing that one does may reach another."""
    first, second = children[:2]
    second.do("change")
    changed = second.do("digest")["digest"]
    copied = second.do("sleep")
    second.do("wake")
    first.do("sleep")
    first.do("wake")
    print("one weight changed:", copied, second.do("stats"), second.do("sleep"), second.do("wake"), flush=True)
    if (first.do("digest")["digest"], second.do("digest")["digest"]) != (digest, changed):
        raise RuntimeError("a change reached another engine, or was lost")
    second.do("sleep")
    first.end(kill=True)
    wake = second.do("wake")
    if second.do("digest")["digest"] != changed:
        raise RuntimeError("an engine lost content with another engine")
    print("the maker killed, the other wakes:", wake, flush=True)
    late = children[0] = Child.get(driver, folder, share=True)
    late.begin()
    late.do("load", "direct")
    print("one comes late:", late.do("share"), late.do("sleep"), late.do("wake"), flush=True)
    if late.do("digest")["digest"] != digest:
        raise RuntimeError("a late engine has other bytes")


def left_over() -> int:
    """Files of images that somebody still has."""
    names = 0
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            for descriptor, _ in open_memfds(pid):
                names += os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("/memfd:torpor-image-")
    return names


def main(driver: str = "host", gib: float = 0.25, quick_gib: float = 0.0625, engines: str = "1,2,4") -> None:
    options = common.arguments(__doc__, driver=driver, gib=gib, engines=engines)
    if options.quick:
        options.gib, options.engines = quick_gib, "2"
    on_gpu = options.driver == "cuda"
    name = "gpu_shared_images" if on_gpu else "shared_images"
    run = common.Run(name, f"images of {options.gib:g} GiB of weights: made while they load, shared by engines", options.out)
    nbytes = int(options.gib * GIB)
    counts = [int(word) for word in options.engines.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="torpor-bench-"))
    try:
        if on_gpu:
            Child.stock = {
                share: [Child(options.driver, folder, share=share) for _ in range(sum(counts) + more)]
                for share, more in ((False, 4), (True, sum(count > 1 for count in counts)))
            }
        with checkpoint(folder, shapes(nbytes), on_gpu):
            loads, digest = load_times(options.driver, folder, nbytes)
            columns = ["load", "prepare", "first sleep", "wake"]
            run.table("loading, s", ["", *columns], [[way, *(row.get(c, "") for c in columns)] for way, row in loads.items()])
            results = [many(options.driver, folder, n, share, digest) for n in counts for share in (False, True)]
    finally:
        shutil.rmtree(folder)
    show(run, results)
    files = left_over()
    run.write({"loads": loads, "engines": results}, goals(loads, results, files, nbytes, OWN_BYTES[options.driver]))


def show(run: common.Run, results: list[dict[str, Any]]) -> None:
    rows = []
    for result in results:
        first, last = result["each"][0], result["each"][-1]
        how = f"{result['engines']}, {'one image' if result['shared'] else 'images of their own'}"
        times = [first["load"], first.get("share", ""), last["load"], last.get("share", ""), last["first sleep"], last["wake"]]
        rows.append([how, result["host bytes asleep"] / GIB, *times])
    columns = ["engines", "GiB of host memory asleep", "load of the first, s", "share", "load of the last, s", "share"]
    run.table("engines", [*columns[:4], "last: load, s", "last: share, s", "last: first sleep, s", "last: wake, s"], rows)


def goals(
    loads: dict[str, dict[str, float]], results: list[dict[str, Any]], files: int, nbytes: float, own_bytes: int
) -> list[common.Goal]:
    """``own_bytes``: what an engine's process may take besides images, whatever their size."""
    direct = loads["direct"]
    steps = min(loads["in steps"]["load"], loads["in steps, again"]["load"])
    hidden = direct["load"] + direct["prepare"] - steps
    out = [
        common.Goal(
            what="an image made while loading costs less than half of one made afterwards",
            measured=f"{steps:.2f} s, {hidden:.2f} s of {direct['prepare']:.2f} hidden",
            needed=f"{direct['load'] + direct['prepare'] / 2:.2f} s",
            reached=hidden > direct["prepare"] / 2,
        ),
        common.Goal(what="no file is left of engines that were killed", measured=str(files), needed="0", reached=files == 0),
    ]
    for result in results:
        if result["shared"]:
            took, limit = result["host bytes asleep"] / GIB, (1.1 * nbytes + own_bytes * result["engines"]) / GIB
            what = f"{result['engines']} engines asleep, GiB of host memory for one image of {nbytes / GIB:g}"
            out.append(common.Goal(what=what, measured=f"{took:.2f}", needed=f"{limit:.2f}", reached=took < limit))
    return out


if __name__ == "__main__":
    main()
