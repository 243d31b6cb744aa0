"""One run of QEMU: its command line, the job it is given, the streams that come out of it, and its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kernel import Kernel
from mounts import Mount

POLL_S = 0.05
STOP_S = 5.0
KVM = Path("/dev/kvm")
KVM_MODULES = (Path("/sys/module/kvm_intel"), Path("/sys/module/kvm_amd"))
# quiet: a console of 115200 baud is slow. tsc, mitigations: what an emulated processor need not find out.
KERNEL_ARGUMENTS = "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off random.trust_cpu=on audit=0 apparmor=0"


class TimeLimit(Exception):
    """The command, or the machine around it, took too long; it was ended."""


class GuestFailed(Exception):
    """With the reason the machine gave, and the end of its console."""


@dataclass(frozen=True)
class Machine:
    kernel: Kernel
    initramfs: Path
    job: Path
    mounts: list[Mount]
    command: list[str]
    environment: dict[str, str]
    folder: Path
    accel: str
    cpus: int
    memory_mib: int
    console: Path


def accelerator(asked: str) -> str:
    """KVM without a module of the processor's own below it (a nested machine's kvm_pvm) was slower than TCG: a kernel that boots
    in 3 s emulated was still clearing its memory after 71 s."""
    if asked != "auto":
        return asked
    return "kvm" if os.access(KVM, os.W_OK) and any(module.exists() for module in KVM_MODULES) else "tcg"


def write_job(machine: Machine) -> None:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in machine.environment.items())
    (machine.job / "run").write_text(f"{exports}cd {shlex.quote(str(machine.folder))}\nexec {shlex.join(machine.command)}\n")
    lines = [f"m{n} {'rw' if mount.writable else 'ro'} {mount.path}\n" for n, mount in enumerate(machine.mounts)]
    (machine.job / "mounts").write_text("".join(lines))


def command_line(machine: Machine, out: int, err: int) -> list[str]:
    """``out`` and ``err``: descriptors it inherits and writes the job's streams to."""
    accel = accelerator(machine.accel)
    processor = ["-accel", "kvm", "-cpu", "host"] if accel == "kvm" else ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
    line = ["qemu-system-x86_64", "-M", "q35,usb=off", *processor, "-smp", str(machine.cpus), "-m", str(machine.memory_mib)]
    line += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none"]
    line += ["-kernel", str(machine.kernel.image), "-initrd", str(machine.initramfs), "-append", KERNEL_ARGUMENTS]
    line += ["-serial", f"file:{machine.console}", "-device", "virtio-serial-pci"]
    for name, descriptor in (("out", out), ("err", err)):
        line += ["-add-fd", f"fd={descriptor},set={descriptor}"]
        line += ["-chardev", f"file,id={name},path=/dev/fdset/{descriptor},append=on"]
        line += ["-device", f"virtserialport,chardev={name},name={name}"]
    shares = [("job", Mount(machine.job, writable=True)), *((f"m{n}", mount) for n, mount in enumerate(machine.mounts))]
    for tag, mount in shares:
        rights = "" if mount.writable else ",readonly=on"
        line += ["-virtfs", f"local,path={mount.path},mount_tag={tag},security_model=none,multidevs=remap{rights}"]
    return line


def run_machine(machine: Machine, deadline: float, say: Callable[[str], None]) -> int:
    """The command's exit status. TimeLimit, GuestFailed."""
    write_job(machine)
    say(f"booting {machine.kernel.release} ({accelerator(machine.accel)}): {shlex.join(machine.command)}")
    log = machine.console.with_suffix(".qemu")
    with streamed(sys.stdout.buffer) as out, streamed(sys.stderr.buffer) as err, log.open("wb") as words:
        process = subprocess.Popen(
            command_line(machine, out, err), stdin=subprocess.DEVNULL, stdout=words, stderr=words, pass_fds=(out, err)
        )
        try:
            ended = wait_for(process, machine, deadline, say)
        finally:
            stop(process)
    status = machine.job / "status"
    if status.exists():
        return int(status.read_text())
    last = log.read_text(errors="replace") + last_lines(machine.console)
    if not ended:
        raise TimeLimit(f"it was ended; last lines of the console:\n{last}")
    failure = machine.job / "failure"
    raise GuestFailed(f"{failure.read_text().strip() if failure.exists() else 'it does not say why'}\n{last}")


def wait_for(process: subprocess.Popen[bytes], machine: Machine, deadline: float, say: Callable[[str], None]) -> bool:
    """False at the deadline."""
    ready = machine.job / "ready"
    told = False
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        if not told and ready.exists() and (uptime := ready.read_text().strip()):
            say(f"rxe0 is active {uptime} s after power-on")
            told = True
        time.sleep(POLL_S)
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def streamed(into: BinaryIO) -> Iterator[int]:
    """A pipe's descriptor; what is written to it goes on at once. QEMU cannot open a socket or a terminal of ours by its name."""
    source, sink = os.pipe()

    def copy() -> None:
        while data := os.read(source, 65536):
            into.write(data)
            into.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield sink
    finally:
        os.close(sink)
        thread.join(STOP_S)
        os.close(source)


def last_lines(path: Path, count: int = 20) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
