"""``scripts/rdma-vm``: boots Debian's kernel in QEMU, makes a Soft-RoCE device, runs one command with the host's files, powers
off.

Exit status: the command's; 124 when the time limit ended it; 125 when the machine did not get as far as the command; 77 when what
it needs cannot be had here (the message says what to do about it).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from host import CannotPrepare, prepare
from initramfs import build_initramfs
from machine import GuestFailed, Machine, TimeLimit, run_machine
from mounts import mounts_for

ROOT = Path(__file__).resolve().parents[2]
# Plugins that these tests do not use take ten seconds to import on an emulated processor.
UNUSED = ("cacheprovider", "schemathesis", "hypothesispytest", "anyio")
TESTS = ["python", "-m", "pytest", *(f"-pno:{name}" for name in UNUSED), "-m", "rdma and not slow", "tests/rdma"]
CANNOT_PREPARE, TIME_LIMIT, GUEST_FAILED = 77, 124, 125


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/rdma-vm",
        usage="scripts/rdma-vm [options] [command ...]",
        description=f"Runs a command in a virtual machine with the RDMA device rxe0 (10.99.0.1). Default: {' '.join(TESTS)}",
        epilog="The command sees /usr, this folder, .venv and its Python, read-only and at their own paths; /tmp is memory.",
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for all of it, the boot included (300)")
    parser.add_argument("--cpus", type=int, default=2, help="of the machine (2)")
    parser.add_argument("--memory", type=int, default=3072, metavar="MIB", help="of the machine (3072)")
    parser.add_argument(
        "--accel", choices=("auto", "kvm", "tcg"), default="auto", help="auto: KVM where the processor's own is there, else TCG"
    )
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="for the command; may be repeated")
    parser.add_argument("--read-only", action="append", default=[], type=Path, metavar="DIR", help="one more folder it sees")
    parser.add_argument("--writable", action="append", default=[], type=Path, metavar="DIR", help="a folder it may write to")
    parser.add_argument("--console", type=Path, default=ROOT / "build/rdma-vm/console.log", help="log of the machine's kernel")
    parser.add_argument("--cache", type=Path, help="for the kernel (~/.cache/torpor/rdma-vm)")
    parser.add_argument("--prepare", action="store_true", help="install what is missing, fetch the kernel, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def say(what: str) -> None:
    print(f"rdma-vm: [{time.monotonic() - BEGAN:.1f} s] {what}", file=sys.stderr, flush=True)


def main() -> int:
    asked = options()
    cache = asked.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torpor" / "rdma-vm"
    try:
        kernel = prepare(cache, say)
    except CannotPrepare as error:
        say(f"cannot be prepared: {error}")
        return CANNOT_PREPARE
    if asked.prepare:
        say(f"prepared: kernel {kernel.release} in {cache}")
        return 0
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    asked.console.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="torpor-rdma-vm-") as folder:
        return boot(asked, kernel, command or TESTS, Path(folder))


def boot(asked: argparse.Namespace, kernel: object, command: list[str], folder: Path) -> int:
    compile_sources()
    initramfs = folder / "initramfs"
    initramfs.write_bytes(build_initramfs(kernel))
    job = folder / "job"
    job.mkdir()
    machine = Machine(
        kernel=kernel,
        initramfs=initramfs,
        job=job,
        mounts=mounts_for(ROOT, asked.read_only, asked.writable),
        command=command,
        environment=environment(asked.env),
        folder=ROOT,
        accel=asked.accel,
        cpus=asked.cpus,
        memory_mib=asked.memory,
        console=asked.console,
    )
    try:
        status = run_machine(machine, BEGAN + asked.timeout, say)
    except TimeLimit as error:
        say(f"time limit of {asked.timeout:g} s: {error}")
        return TIME_LIMIT
    except GuestFailed as error:
        say(f"the machine ended before the command did: {error}")
        return GUEST_FAILED
    say(f"done, exit status {status}; console log: {asked.console}")
    return status


def environment(assignments: list[str]) -> dict[str, str]:
    """Of the command. It finds the virtual environment's programs first, and writes nothing beside its sources."""
    path = f"{ROOT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    variables = {"PATH": path, "HOME": "/root", "TERM": "dumb", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORPOR_RDMA_VM": "1"}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            sys.exit(f"rdma-vm: --env {assignment!r} is not of the form NAME=VALUE")
        variables[name] = value
    return variables


def compile_sources() -> None:
    """Here and not by every process of the slow machine, which cannot keep what it compiles."""
    python = ROOT / ".venv/bin/python"
    if python.exists():
        folders = [str(ROOT / name) for name in ("src", "tests")]
        subprocess.run([python, "-m", "compileall", "-q", *folders], timeout=120, check=False, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    BEGAN = time.monotonic()
    if shutil.which("uname") and os.uname().machine != "x86_64":
        sys.exit(f"rdma-vm: x86-64 only, this is {os.uname().machine}")
    sys.exit(main())
